"""Responses from OpenRLHF's vLLM engines: to all questions of a step, as many as each needs, in one dispatch."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from ...records import Rollout
from .waiting import EngineLost, answer


@dataclass(frozen=True)
class Request:
    """n responses to one prompt. seed: None lets the engine draw; temperature 0 is greedy; top_p: not for training"""

    prompt: Sequence[int]
    n: int
    temperature: float
    seed: int | None
    top_p: float = 1.0


class Sampler:
    """Sends each request to the engine that has least to do, and hands on what is complete.

    The prompt goes as token ids, so that what is generated from is what is trained on; the engine's own stop tokens are
    the model's, `stop` adds the one that closes the assistant's turn. No filter (top-p, top-k) on rollouts and no
    detokenising: the verifier's text is decoded here, once.
    """

    def __init__(
        self,
        engines: Sequence[Any],
        max_response_tokens: int,
        with_logprobs: bool,
        timeout: float,
        stop: Sequence[int],
    ) -> None:
        """with_logprobs: ask for the engine's own log-probs, for a train/rollout correction; stop: more end tokens"""
        self.engines, self.max_response_tokens, self.stop = list(engines), max_response_tokens, list(stop)
        self.with_logprobs, self.timeout = with_logprobs, timeout

    def __call__(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[Rollout]]]:
        """Position and ungraded rollouts of each request, as it is complete. Closing it cancels the others.

        Raises EngineLost for an engine that died or is silent.
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
                    silent = sorted({engine for _, engine in pending.values()})
                    raise EngineLost(
                        f"vLLM engine {', '.join(map(str, silent))}: no answer for {self.timeout:.0f} s "
                        "(OpenRLHF.timeout)"
                    )
                position, engine = pending.pop(ready[0])
                output = answer(ready[0], f"vLLM engine {engine}", self.timeout)
                rollouts = [self._rollout(one, engine) for one in sorted(output.outputs, key=lambda o: o.index)]
                if len(rollouts) != requests[position].n:
                    raise EngineLost(f"vLLM engine {engine} gave {len(rollouts)} of {requests[position].n} responses")
                yield position, rollouts
        finally:
            for reference in pending:
                ray.cancel(reference)

    def _params(self, request: Request) -> SamplingParams:
        return SamplingParams(
            n=request.n,
            temperature=request.temperature,
            seed=request.seed,
            top_p=request.top_p,
            max_tokens=self.max_response_tokens,
            stop_token_ids=self.stop,  # they stay in the response, as the model's own do
            logprobs=1 if self.with_logprobs else None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,  # with n > 1 anything else comes in pieces
        )

    def _rollout(self, output: Any, engine: int) -> Rollout:
        if output.finish_reason not in ("stop", "length"):
            raise EngineLost(f"vLLM engine {engine} ended a response by {output.finish_reason!r}")
        ids = np.asarray(output.token_ids, np.int32)
        logprobs = None
        if self.with_logprobs:
            of_tokens = zip(output.token_ids, output.logprobs, strict=True)
            logprobs = np.array([known[token].logprob for token, known in of_tokens], np.float32)
        return Rollout(ids, output.finish_reason, sampler_logprobs=logprobs)
