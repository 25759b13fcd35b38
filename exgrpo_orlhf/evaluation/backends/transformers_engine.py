"""Responses by transformers in this process, on one CPU or one GPU, of any causal language model."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import transformers

from ...engines.local.generation import check_rows, generate
from ...engines.local.placement import device_of, dtype_of, end_and_pad, load
from . import EngineFailure, GenerationRequest, Key, Response


class TransformersEngine:
    """Generates chunks of requests with prompts of similar length.

    Chunks do not depend on which responses exist already. A chunk with a missing response is generated again as a
    whole, so an evaluation that was killed continues with the same responses that it would have had.
    """

    def __init__(self, model_path: str, tokenizer: Any, *, device: str, dtype: str, threads: int, rows: int) -> None:
        """Load the model.

        Args:
            device: as torch names it; 'auto' is the GPU if there is one.
            dtype: 'auto' is float32 on a CPU, bfloat16 on a GPU.
            threads: of the CPU.
            rows: responses generated at a time.

        Raises:
            EngineFailure: the device does not exist, or the model lacks weights, names no end token or cannot generate
                in batches.
        """
        torch.set_num_threads(threads)
        self.rows, self.tokenizer, self.threads = rows, tokenizer, threads
        try:
            place = device_of(device, "--device")
            self.model = load(model_path, place, dtype_of(dtype, place))
            self.end, self.pad = end_and_pad(self.model, tokenizer)
            check_rows(self.model, self.pad)
        except ValueError as error:
            raise EngineFailure(f"{model_path}: {error}") from error
        self.reproducible = (
            f"the {rows} rows of a chunk are computed together: with another --rows, --limit or --samples the last "
            "bits of the logits differ, and seldom a token"
        )

    def generate(
        self, requests: Sequence[GenerationRequest], done: Collection[Key]
    ) -> Generator[list[Response], None, None]:
        for chunk in self._chunks(requests):
            if any(request.key not in done for request in chunk):
                yield self._answer(chunk, done)

    def _answer(self, chunk: Sequence[GenerationRequest], done: Collection[Key]) -> list[Response]:
        first = chunk[0]
        try:
            rollouts = generate(
                self.model,
                [request.prompt_ids for request in chunk],
                end=sorted({*self.end, *first.stop_ids}),
                pad=self.pad,
                max_new_tokens=max(request.max_tokens for request in chunk),
                limits=[request.max_tokens for request in chunk],
                stop=first.stop,
                tokenizer=self.tokenizer,
                temperature=first.temperature or None,
                top_p=first.top_p,
                seeds=[request.seed for request in chunk],
            )
        except ArithmeticError as error:
            raise EngineFailure(f"{first.key[0]}, row {first.key[1]} and others: {error}; are the weights?") from error
        except torch.OutOfMemoryError as error:
            raise EngineFailure(f"{len(chunk)} responses at a time are too many for the GPU; lower --rows") from error
        return [
            Response(
                request,
                self.tokenizer.decode(rollout.token_ids.tolist(), skip_special_tokens=True),
                len(rollout.token_ids),
                rollout.finish,
                token_ids=tuple(rollout.token_ids.tolist()),
            )
            for request, rollout in zip(chunk, rollouts, strict=True)
            if request.key not in done
        ]

    def _chunks(self, requests: Sequence[GenerationRequest]) -> Iterator[list[GenerationRequest]]:
        """Chunks of one benchmark and setting, with prompts of similar length, so that there is little padding."""

        setting = lambda request: (request.key[0], request.temperature, request.top_p)
        for _, same in groupby(requests, setting):
            ordered = sorted(same, key=lambda request: (len(request.prompt_ids), request.key))
            for begin in range(0, len(ordered), self.rows):
                yield ordered[begin : begin + self.rows]

    def describe(self) -> dict[str, Any]:
        return {
            "name": "transformers",
            "version": transformers.__version__,
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "rows": self.rows,
            "threads": self.threads,
        }

    def close(self) -> None:
        """Nothing to do: the model is freed with the object."""
