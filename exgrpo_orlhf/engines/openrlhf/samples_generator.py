"""Responses from OpenRLHF's vLLM engines. The requests for all questions of a step are sent at once."""

from __future__ import annotations

import heapq
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from ...environments.playing import Play
from ...records import Rollout
from ..engine import EngineLost

_POLL = 0.01  # seconds between two looks at what environments have answered


@dataclass(frozen=True)
class Request:
    """n responses to one prompt.

    A request has its own seed, so that the random numbers of a response do not depend on which other requests the
    engine works on.

    temperature: 0 is greedy; top_p: below 1 in evaluation only
    max_tokens: of a response; None: as many as the run allows; stop: texts that end it
    """

    prompt: Sequence[int]
    n: int
    temperature: float
    seed: int
    top_p: float = 1.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sampler:
    """Sends each request to the engine with the fewest responses to generate, and yields what is complete.

    Prompts are sent as token ids, so that generation and training see the same tokens. The engine stops at the model's
    own end tokens; `stop` adds the one that closes the assistant's turn. Rollouts are not filtered (top-p, top-k), and
    vLLM does not detokenise them: the trainer decodes the text for the verifier, once.

    with_logprobs: whether to ask for the engine's own log-probs, for a train/rollout correction
    timeout: seconds without any response after which an engine counts as lost; stop: more end tokens
    """

    engines: Sequence[Any]
    max_response_tokens: int
    with_logprobs: bool
    timeout: float
    stop: Sequence[int]

    def __call__(self, requests: Sequence[Request]) -> Generator[tuple[int, list[Rollout]], None, None]:
        """Yields position and ungraded rollouts of each request when it is complete. Closing the generator cancels the
        remaining requests.

        Raises EngineLost for an engine that died or does not answer.
        """
        load = [(0, i) for i in range(len(self.engines))]
        pending = {}
        for position, request in enumerate(requests):
            tokens, engine = heapq.heappop(load)
            reference = self.engines[engine].generate.remote(list(request.prompt), self._params(request))
            pending[reference] = (position, engine)
            heapq.heappush(load, (tokens + request.n, engine))
        try:
            while pending:
                ready, _ = ray.wait(list(pending), num_returns=1, timeout=self.timeout)
                if not ready:
                    raise self._silent(pending)
                position, engine = pending.pop(ready[0])
                output = results(ready[0], f"vLLM engine {engine}", self.timeout)
                rollouts = [self._rollout(one, engine) for one in sorted(output.outputs, key=lambda o: o.index)]
                if len(rollouts) != requests[position].n:
                    raise EngineLost(f"vLLM engine {engine} gave {len(rollouts)} of {requests[position].n} responses")
                yield position, rollouts
        finally:
            for reference in pending:
                ray.cancel(reference)

    def play(self, plays: Sequence[Play], temperature: float, top_p: float = 1.0) -> Generator[int, None, None]:
        """Play episodes, each at its own pace: its next turn is sent when its environment has answered. Yields the
        position of each that is over. Raises as a call does."""
        load = [0] * len(self.engines)  # turns that an engine is working on
        environment_turns = set(range(len(plays)))  # whose environment has not answered
        pending: dict[Any, tuple[int, int]] = {}
        last_answer = time.monotonic()
        try:
            while environment_turns or pending:
                for position in [i for i in environment_turns if plays[i].answered]:
                    one = plays[position]
                    environment_turns.remove(position)
                    if not one.received():
                        yield position
                        last_answer = time.monotonic()  # the caller may have taken long
                        continue
                    engine = min(range(len(load)), key=load.__getitem__)
                    stop = one.player.environment.stop
                    request = Request(one.context, 1, temperature, one.turn_seed, top_p, one.room, stop)
                    reference = self.engines[engine].generate.remote(one.context, self._params(request))
                    pending[reference] = (position, engine)
                    load[engine] += 1
                    last_answer = time.monotonic() if len(pending) == 1 else last_answer
                if not pending:
                    time.sleep(_POLL if environment_turns else 0)
                    continue
                ready, _ = ray.wait([*pending], num_returns=1, timeout=_POLL if environment_turns else self.timeout)
                if not ready and time.monotonic() - last_answer >= self.timeout:
                    raise self._silent(pending)
                for reference in ready:
                    position, engine = pending.pop(reference)
                    load[engine] -= 1
                    output = results(reference, f"vLLM engine {engine}", self.timeout)
                    plays[position].act(self._rollout(output.outputs[0], engine))
                    environment_turns.add(position)
                    last_answer = time.monotonic()
        finally:
            for reference in pending:
                ray.cancel(reference)

    def _silent(self, pending: Mapping[Any, tuple[int, int]]) -> EngineLost:
        engines = ", ".join(map(str, sorted({engine for _, engine in pending.values()})))
        return EngineLost(f"vLLM engine {engines}: no answer for {self.timeout:.0f} s (OpenRLHF.timeout)")

    def _params(self, request: Request) -> SamplingParams:
        return SamplingParams(
            n=request.n,
            temperature=request.temperature,
            seed=request.seed if request.temperature else None,  # greedy decoding draws no numbers
            top_p=request.top_p,
            max_tokens=request.max_tokens or self.max_response_tokens,
            stop_token_ids=list(self.stop),  # they stay in the response, as the model's own do
            logprobs=1 if self.with_logprobs else None,
            stop=list(request.stop),
            include_stop_str_in_output=True,
            detokenize=bool(request.stop),  # to see the texts in it, special tokens too
            skip_special_tokens=not request.stop,
            output_kind=RequestOutputKind.FINAL_ONLY,  # other kinds return n > 1 responses in pieces
        )

    def _rollout(self, output: Any, engine: int) -> Rollout:
        if output.finish_reason not in ("stop", "length"):
            raise EngineLost(f"vLLM engine {engine} ended a response by {output.finish_reason!r}")
        ids = np.asarray(output.token_ids, np.int32)
        logprobs = None
        if self.with_logprobs:
            of_tokens = zip(output.token_ids, output.logprobs, strict=True)
            logprobs = np.array([entries[token].logprob for token, entries in of_tokens], np.float32)
        return Rollout(ids, output.finish_reason, sampler_logprobs=logprobs)


def results(references: Any, who: str, timeout: float) -> Any:
    """The results of these references.

    Args:
        who: names the actor in error messages
        timeout: seconds

    Raises EngineLost if the actor does not answer in time, died or failed.
    """
    try:
        return ray.get(references, timeout=timeout)
    except GetTimeoutError:
        raise EngineLost(f"{who}: no answer for {timeout:.0f} s (OpenRLHF.timeout)") from None
    except RayActorError as error:
        raise EngineLost(f"{who} died: {str(error).strip()}") from error
    except RayTaskError as error:
        # str(error), because Ray may give the error its cause's class too, and then it has no `traceback_str`.
        raise EngineLost(f"{who} failed: {error.cause}\n{str(error).strip()[-2000:]}") from error
