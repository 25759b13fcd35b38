"""The sampler behind Ray: OpenRLHF's vLLM engines. The requests for all questions of a step are sent at once."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from ..records import Rollout
from .queued import QueuedSampler
from .request import POLL, EngineLost, Request
from .vllm_requests import rollouts_of, sampling_params


class RaySampler(QueuedSampler):
    """Sends each request to the engine with the fewest responses to generate, and yields what is complete.

    Prompts are sent as token ids, so that generation and training see the same tokens. The engine stops at the model's
    own end tokens too.
    """

    def __init__(self, engines: Sequence[Any], timeout: float, sleeps: bool) -> None:
        """timeout: seconds without any response after which an engine counts as lost; sleeps: whether the engines give
        their GPUs to the trainer meanwhile"""
        self.engines, self.timeout, self.sleeps = engines, timeout, sleeps
        self._load = [0] * len(engines)  # responses that an engine is working on
        self._under_way: dict[Any, tuple[int, int]] = {}  # engine and responses of each reference
        self._silence = 0.0  # seconds of waiting without any response

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Wakes the engines up, and after success lets them sleep again."""
        if self.sleeps:
            batch_vllm_engine_call(self.engines, "wake_up")
        yield
        if self.sleeps:
            batch_vllm_engine_call(self.engines, "sleep")

    def _send(self, request: Request, seed: int) -> Any:
        engine = min(range(len(self._load)), key=self._load.__getitem__)
        reference = self.engines[engine].generate.remote(list(request.prompt_ids), sampling_params(request, seed))
        if not self._under_way:
            self._silence = 0.0
        self._load[engine] += request.n
        self._under_way[reference] = (engine, request.n)
        return reference

    def _arrived(self, pending: Mapping[Any, tuple[int, Request]], wait: bool) -> list[tuple[Any, list[Rollout]]]:
        begin = time.monotonic()
        ready, _ = ray.wait([*pending], num_returns=1, timeout=self.timeout if wait else POLL)
        self._silence = 0.0 if ready else self._silence + time.monotonic() - begin
        if not ready and (wait or self._silence >= self.timeout):
            engines = ", ".join(map(str, sorted({self._under_way[reference][0] for reference in pending})))
            raise EngineLost(f"vLLM engine {engines}: no answer for {self.timeout:.0f} s (OpenRLHF.timeout)")
        arrived = []
        for reference in ready:
            engine, (_, request) = f"vLLM engine {self._under_way[reference][0]}", pending[reference]
            arrived.append((reference, rollouts_of(request, results(reference, engine, self.timeout), engine)))
            self._forget(reference)
        return arrived

    def _cancel(self, handles: Collection[Any]) -> None:
        for reference in handles:
            ray.cancel(reference)
            self._forget(reference)

    def _forget(self, reference: Any) -> None:
        engine, responses = self._under_way.pop(reference)
        self._load[engine] -= responses


def results(references: Any, who: str, timeout: float) -> Any:
    """The results of these references. who: names the actor in messages; timeout: seconds. Raises EngineLost if the
    actor does not answer in time, died or failed."""
    try:
        return ray.get(references, timeout=timeout)
    except GetTimeoutError:
        raise EngineLost(f"{who}: no answer for {timeout:.0f} s (OpenRLHF.timeout)") from None
    except RayActorError as error:
        raise EngineLost(f"{who} died: {str(error).strip()}") from error
    except RayTaskError as error:
        # str(error), because Ray may give the error its cause's class too, and then it has no `traceback_str`.
        raise EngineLost(f"{who} failed: {error.cause}\n{str(error).strip()[-2000:]}") from error
