"""The sampler in torch: a loop over a transformers model and its cache, on one CPU or one GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from ..records import Rollout
from .generation import generate
from .request import EngineLost, Portion, Request, Sampler, StepSeed

_Place = tuple[int, int, Request]  # position of a request, which of its n responses, the request


class LoopSampler(Sampler):
    """Generates chunks of responses to prompts of similar length, with little padding.

    Chunks do not depend on which responses exist already. A chunk with a missing response is generated again as a
    whole, so what was interrupted continues with the same responses that it would have had.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        end: Sequence[int],
        pad: int,
        rows: int,
        computing: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """end: tokens that end a response; rows: responses generated at a time; computing: the context of a chunk"""
        self.model, self.tokenizer, self.end, self.pad, self.computing = model, tokenizer, end, pad, computing
        self.together = self.rows = rows
        self.kept: dict[int, Tensor] = {}  # by session, keys and values of its turns
        self.reproducible = (
            f"the {rows} rows of a chunk are computed together: with another --rows, --limit or --samples the last "
            "bits of the logits differ, and seldom a token"
        )

    def sample(self, requests: Sequence[Request], done: Collection[int] = ()) -> Generator[Portion, None, None]:
        """As Sampler does. Raises ArithmeticError for logits that are not finite, before any response with them."""
        rollouts: dict[int, list[Rollout]] = {}
        for number, chunk in self._chunks(requests):
            if all(i in done for i, *_ in chunk):
                continue
            portion = []
            for (i, _, request), rollout in zip(chunk, self._generate(number, chunk), strict=True):
                of_request = rollouts.setdefault(i, [])
                of_request.append(rollout)
                if len(of_request) == request.n and i not in done:
                    portion.append((i, rollouts.pop(i)))
            yield portion

    def _chunks(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[_Place]]]:
        """Chunks of one benchmark and setting, numbered for each of them."""

        def setting(place: _Place) -> tuple[Any, ...]:
            request = place[2]
            return request.key[:1], request.temperature, request.top_p, request.stop, request.end

        places = [(i, k, request) for i, request in enumerate(requests) for k in range(request.n)]
        for _, same in groupby(places, setting):
            ordered = sorted(same, key=lambda place: (len(place[2].prompt_ids), place[0]))
            for number, begin in enumerate(range(0, len(ordered), self.rows)):
                yield number, ordered[begin : begin + self.rows]

    def _generate(self, number: int, chunk: Sequence[_Place]) -> list[Rollout]:
        requests = [request for *_, request in chunk]
        seed = requests[0].seed
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        seeds = None if isinstance(seed, StepSeed) else [request.seed_at(i) + k for i, k, request in chunk]
        # Joint numbers come from torch's global generator: it is seeded here, and its state is restored afterwards.
        with self.computing(), torch.random.fork_rng(devices=devices):
            if isinstance(seed, StepSeed):
                torch.manual_seed(seed.of_chunk(number))
            try:
                return generate(
                    self.model,
                    requests,
                    end=self.end,
                    pad=self.pad,
                    seeds=seeds,
                    tokenizer=self.tokenizer,
                    kept=self.kept,
                )
            except torch.OutOfMemoryError as error:
                raise EngineLost(
                    f"{len(chunk)} responses at a time are too many for the GPU; lower --rows of run_bench.py or "
                    "LocalEngine.generation_rows"
                ) from error

    def forget(self, sessions: Iterable[int]) -> None:
        for session in sessions:
            self.kept.pop(session, None)

    def describe(self) -> dict[str, Any]:
        return {
            "name": "transformers",
            "version": transformers.__version__,
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "rows": self.rows,
            "threads": torch.get_num_threads(),
        }
