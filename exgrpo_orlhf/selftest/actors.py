"""OpenRLHF's actors with methods that return what the doctor compares.

Import this module only where OpenRLHF can be imported: with CUDA, or after cpu.install().
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..engines.lora import gathered
from ..engines.openrlhf.actor import MixedPolicyActor
from ..engines.openrlhf.weight_sync import VllmEngine
from . import parity

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # vLLM's names


def record_gradients(actor: MixedPolicyActor, gradients: parity.Gradients) -> None:
    """From now on appends the gradient of each of the actor's optimiser steps to `gradients`."""
    engine, step = actor.actor.model, actor.strategy.optimizer_step

    def recorded(*args: Any, **options: Any) -> None:
        if engine.is_gradient_accumulation_boundary():
            from deepspeed.utils import safe_get_full_grad

            named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
            gradients.append({name: safe_get_full_grad(p).float().cpu() for name, p in named})
        step(*args, **options)

    actor.strategy.optimizer_step = recorded


class DoctorActor(MixedPolicyActor):
    """A policy actor that also returns its gradients, weights, states and surroundings."""

    def whereabouts(self, names: Sequence[str]) -> tuple[str, dict[str, str]]:
        """Rank and host, and those of the environment variables that are set here."""
        environment = {name: os.environ[name] for name in names if name in os.environ}
        return f"rank {self._rank} on {socket.gethostname()}", environment

    def sees(self, marker: str, paths: Sequence[str]) -> list[str]:
        """Which of a marker file and some paths this rank does not see. Writes a file of its own beside the marker."""
        path = Path(marker)
        if path.parent.is_dir():
            path.with_name(f"{path.name}-{self._rank}").touch()
        return [str(part) for part in (path, *map(Path, paths)) if not part.exists()]

    def collective(self, megabytes: int) -> tuple[float, float]:
        """The sum of 1 over all ranks, and the speed of an all-reduce in gigabytes per second."""
        device = torch.cuda.current_device()
        values = torch.ones(megabytes * 2**18, device=device)
        torch.distributed.all_reduce(values.clone())
        torch.cuda.synchronize()
        begin = time.perf_counter()
        torch.distributed.all_reduce(values)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        return float(values.mean()), megabytes / 1024 / seconds

    def start_recording(self, frozen: bool) -> None:
        """frozen: until the recording ends no optimiser step changes a weight"""
        self.gradients: parity.Gradients = []
        if frozen:
            self.guard.limit = -1.0
        record_gradients(self, self.gradients)

    def recorded_gradients(self) -> parity.Gradients:
        """The gradients since `start_recording`, from rank 0; the others return none. Ends the recording."""
        del self.strategy.optimizer_step  # the method of its class is in force again
        self.guard.limit = self.strategy.args.exgrpo.optimizer.skip_above_grad_norm
        gradients, self.gradients = self.gradients, []
        return [] if self._rank else gradients

    def weights(self) -> dict[str, np.ndarray]:
        """The weights that the model computes with, as float32, from rank 0; the others return none. With LoRA the
        merged ones."""
        if self.actor.adapter is not None:
            merged = self.actor.adapter.merged_state(keep=not self._rank)
            return {name: value.float().numpy() for name, value in merged.items()}
        named = dict(self.actor.model.module.named_parameters())
        with gathered(list(named.values())):
            return {} if self._rank else {name: p.detach().float().cpu().numpy() for name, p in named.items()}

    def states(self) -> dict[str, float]:
        """The squared norm of this rank's part of the master weights and of each optimiser state."""
        optimizer, norms = self.actor.model.optimizer, {}
        zero_3 = self.strategy.stage == 3
        masters = optimizer.fp32_partitioned_groups_flat if zero_3 else optimizer.single_partition_of_fp32_groups
        for i, master in enumerate(masters):
            for name, value in {"weights": master, **optimizer.optimizer.state.get(master, {})}.items():
                norms[f"{name} of group {i}"] = float(torch.as_tensor(value).detach().double().square().sum())
        return norms


class DoctorEngine(VllmEngine):
    """A vLLM actor that returns log-probs of the sampled distribution, and its weights."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        kwargs |= {"logprobs_mode": "processed_logprobs", "max_logprobs": 1}
        await super().__init__(*args, **kwargs)

    async def weights(self) -> dict[str, np.ndarray]:
        """The parameters of the vLLM model, float32, under vLLM's names. q, k and v are one tensor, and so are gate and
        up. The embedding has more rows than the vocabulary. A tied weight occurs once."""
        (weights,) = await self.llm.collective_rpc("model_weights")
        return dict(weights)


def compare_weights(engine: Mapping[str, np.ndarray], actor: Mapping[str, np.ndarray]) -> tuple[list[str], int]:
    """Compares the weights of a vLLM engine with the actor's, bit for bit. Returns the names of those that differ, and
    how many could be compared: vLLM packs the experts of a layer in its own way, so these are left out."""
    names, compared = [], 0
    for name, weight in engine.items():
        fused = next((fused for fused in _FUSED if fused in name), None)
        parts = [name.replace(fused, part) for part in _FUSED[fused]] if fused else [name]
        if not actor.keys() >= set(parts):
            continue
        compared += 1
        expected = np.concatenate([actor[part] for part in parts])
        if not np.array_equal(weight[: len(expected)], expected):  # vLLM pads the vocabulary
            names.append(name)
    return names, compared
