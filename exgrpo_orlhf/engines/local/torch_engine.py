"""The local engine, in one process on one CPU or one GPU: it generates, scores, updates and saves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch

from ...attention.packing import PackedRow
from ...checkpoints import name_end_tokens
from ...environments.environment import Environment
from ...environments.playing import player_of
from ...experiment import Experiment
from ...io import tokenizer_file, weights
from ...io.files import Files
from ...objective import MixedPolicyLoss
from ...questions.prompts import PromptEncoder, Prompts
from ...records import Measured, MixedBatch, Rollout
from ...sampling import Sampler
from ...sampling.batch import check_rows
from ...sampling.torch_loop import LoopSampler
from ...settings import LocalEngine, LoRA, Optimizer, Sampling
from ..engine import Engine, UpdateStats
from ..frozen_copy import FrozenCopy
from ..lora import FOLDER, Adapter
from .forward import PolicyForward, within_memory
from .placement import check_model, device_of, dtype_of, end_and_pad, load
from .update import PolicyUpdate, Reference

_FULL = LoRA()  # training of all weights


@dataclass(frozen=True)
class LocalParts:
    """The parts of an experiment that the local engine follows."""

    settings: LocalEngine
    optimizer: Optimizer
    sampling: Sampling
    prompts: Prompts
    lora: LoRA = _FULL
    copies: tuple[str, ...] = ()
    environment: Environment | None = None

    @classmethod
    def of(cls, experiment: Experiment) -> LocalParts:
        """Raises ValueError for an experiment of another engine."""
        if experiment.local is None:
            raise ValueError(f"train.engine must be 'local', got {experiment.settings.engine!r}")
        rest = {field.name: getattr(experiment, field.name) for field in fields(cls) if field.name != "settings"}
        return cls(experiment.local, **rest)


class TorchEngine(Engine):
    """The engine with transformers and torch, in this process."""

    whole_batches = overlaps_update = False

    def __init__(
        self,
        parts: LocalParts,
        *,
        model_path: str | Path,
        weights_path: str | Path | None = None,
        seed: int = 0,
        reference: bool = False,
        generates: bool = True,
    ) -> None:
        """model_path: a Hugging Face causal LM with its tokenizer; weights_path: a checkpoint of it to continue from;
        reference: whether there is a KL term to the model at `model_path`: a frozen copy of it, or with LoRA the same
        model without its adapter, unless it is among `LocalParts.copies`; generates: False for an engine that only
        scores and trains

        Raises ValueError for a device that is not there, and for a model that this engine cannot train.
        """
        settings, sampling, prompts, lora = parts.settings, parts.sampling, parts.prompts, parts.lora
        torch.set_num_threads(settings.threads)
        self.device = device_of(settings.device)
        self.model_path = model_path
        self.settings, self.sampling, self.seed = settings, sampling, seed
        self.tokenizer = tokenizer_file.load(model_path)
        self.prompts = PromptEncoder(prompts, self.tokenizer)
        self.adapter: Adapter | None = None
        if lora.rank is None:
            self.model = load(weights_path or model_path, self.device)
        else:
            self.model = load(model_path, self.device)
            self.adapter = Adapter(self.model, lora, model_path, seed)
            if weights_path is not None:
                self.adapter.load(Path(weights_path) / FOLDER)
        check_model(self.model, model_path, prompts.max_tokens + sampling.max_response_tokens)
        self.end, self.pad = end_and_pad(self.model, self.tokenizer, self.prompts.turn_ends())
        self.player = player_of(parts.environment, self.prompts, sampling.max_response_tokens)
        self.forward = PolicyForward(self.model, sampling.temperature, dtype_of(settings.dtype, self.device))
        rows = settings.generation_rows
        self.sampler: Sampler = LoopSampler(self.model, self.tokenizer, self.end, self.pad, rows, self._computing)
        if generates:
            self._choose_sampler(prompts.max_tokens + sampling.max_response_tokens)
        base = self._reference() if reference and "base" not in parts.copies else None
        copies = {name: FrozenCopy(self.model) for name in parts.copies}
        self._update = PolicyUpdate(self.forward, base, parts.optimizer, settings, copies)

    def _reference(self) -> Reference:
        adapter, forward = self.adapter, self.forward
        if adapter is None:
            frozen = load(self.model_path, self.device).requires_grad_(False)
            return PolicyForward(frozen, forward.temperature, forward.compute_dtype)

        def base(rows: Sequence[PackedRow], pack: bool) -> tuple[torch.Tensor, torch.Tensor]:
            with adapter.disabled():
                return forward(rows, pack)

        return base

    # -- sample -------------------------------------------------------------------------------------------------------

    def _choose_sampler(self, tokens: int) -> None:
        """tokens: of prompt and response together, at most. Raises ValueError for a model or device that the sampler
        cannot use, and EngineLost if vLLM cannot start."""
        settings = self.settings
        if not settings.samples_by_vllm(self.device.type):
            check_rows(self.model, self.pad, turns=self.player is not None)
            return
        if self.device.index:
            raise ValueError(
                f"LocalEngine.device = {settings.device!r}: vLLM takes the first GPU that the process sees; set "
                f"CUDA_VISIBLE_DEVICES={self.device.index} and LocalEngine.device = 'cuda'"
            )
        from ...sampling.vllm_here import VllmSampler

        self.sampler_logprobs = True
        self.sampler = VllmSampler(
            self.model_path,
            self._weights,
            dtype=self.forward.compute_dtype,
            tokens=tokens,
            rows=settings.generation_rows,
            memory=settings.sampler_memory,
        )

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """As fast with merged weights as without an adapter, and faster for small models (benchmarks/lora.py)."""
        with nullcontext() if self.adapter is None else self.adapter.merged(), self.forward.autocast():
            yield

    @contextmanager
    def _weights(self) -> Iterator[Iterable[tuple[str, torch.Tensor]]]:
        """The policy's by their names in the base model, once. An adapter is merged into one after another."""
        if self.adapter is None:
            yield self.model.named_parameters()
        else:
            with closing(self.adapter.merged_parameters()) as weights:
                yield weights

    # -- score and update ---------------------------------------------------------------------------------------------

    @within_memory()
    def measure(self, rows: Sequence[PackedRow]) -> list[Measured]:
        return self.forward.measure(rows, self.settings.micro_batch_tokens)

    @within_memory()
    def update(self, batch: MixedBatch, loss: MixedPolicyLoss) -> UpdateStats:
        """One or more optimiser steps on a batch (see PolicyUpdate). With the sampler's log-probs it also measures how
        far they are from the trainer's, nats a token (`rollout/logprob_gap`)."""
        stats = self._update(batch, self.forward_rows(batch), loss)
        self.sampler.outdated = True
        gaps = [
            np.abs(measured - row.response.sampler_logprobs)
            for row, measured in zip(batch.flat_rows(), stats.behaviour_logprobs, strict=True)
            if row.in_loss and isinstance(row.response, Rollout) and row.response.sampler_logprobs is not None
        ]
        if not gaps:
            return stats
        return replace(stats, metrics={**stats.metrics, "rollout/logprob_gap": float(np.concatenate(gaps).mean())})

    def reincarnate(self) -> None:
        self._update.reincarnate()

    def sync(self) -> None:
        """Nothing: it generates with the weights that it trains."""

    # -- save ---------------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> Files:
        """Hugging Face files in `folder`, optimiser, schedule and frozen copies in its subfolder trainer/.

        With LoRA the weights are merged, and the adapter is in the subfolder adapter/: the run goes on from that.
        """
        state = None if self.adapter is None else self.adapter.merged_state()
        weights.save(self.model, folder, state_dict=state)
        if self.adapter is not None:
            self.adapter.save(folder / FOLDER)
        tokenizer_file.save(self.tokenizer, folder)
        name_end_tokens(folder, self.prompts.turn_ends())
        (folder / "trainer").mkdir(exist_ok=True)
        self._update.save(folder / "trainer")
        return {}

    def load(self, folder: Path) -> None:
        """Loads optimiser, schedule and frozen copies. The weights come with the constructor's `weights_path`."""
        self._update.load(folder / "trainer")
