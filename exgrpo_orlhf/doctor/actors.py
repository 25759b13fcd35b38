"""OpenRLHF's actors as the doctor needs them: they return what it compares.

Imported where OpenRLHF can be: with CUDA, or after cpu.install().
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from openrlhf.trainer.ray import vllm_engine

from ..engines.openrlhf.actor import MixedPolicyActor
from . import parity

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # vLLM's names


class DoctorActor(MixedPolicyActor):
    """A policy actor that returns its gradients, weights, states and surroundings."""

    def init_model_from_pretrained(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        super().init_model_from_pretrained(strategy, *args, **kwargs)
        self.gradients: parity.Gradients | None = None
        step = self.strategy.optimizer_step

        def noted(*more: Any, **options: Any) -> None:
            engine = self.actor.model
            if self.gradients is not None and engine.is_gradient_accumulation_boundary():
                from deepspeed.utils import safe_get_full_grad

                named = engine.module.named_parameters()
                self.gradients.append({name: safe_get_full_grad(p).float().cpu() for name, p in named})
            step(*more, **options)

        self.strategy.optimizer_step = noted

    def whereabouts(self, names: Sequence[str]) -> dict[str, Any]:
        """Host, rank and those of the environment variables that are set here."""
        return {
            "who": f"rank {self._rank} on {socket.gethostname()}",
            "environment": {name: os.environ[name] for name in names if name in os.environ},
        }

    def sees(self, marker: str, paths: Sequence[str]) -> list[str]:
        """Which of a marker file and some paths are not there on this rank; it leaves a file of its own beside the
        marker."""
        path = Path(marker)
        if path.parent.is_dir():
            path.with_name(f"{path.name}-{self._rank}").touch()
        return [str(part) for part in (path, *map(Path, paths)) if not part.exists()]

    def collective(self, megabytes: int) -> tuple[float, float]:
        """Sum over all ranks of 1, and gigabytes a second of an all-reduce."""
        device = torch.cuda.current_device()
        values = torch.ones(megabytes * 2**18, device=device)
        torch.distributed.all_reduce(values.clone())
        torch.cuda.synchronize()
        begin = time.perf_counter()
        torch.distributed.all_reduce(values)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        return float(values.mean()), megabytes / 1024 / seconds

    def start_recording(self) -> None:
        self.gradients = []

    def recorded_gradients(self) -> parity.Gradients:
        found, self.gradients = self.gradients or [], None
        return found if self._rank == 0 else []

    def weights(self) -> dict[str, np.ndarray]:
        """What the model computes with, as float32; from rank 0, the others return none."""
        import deepspeed

        named = dict(self.actor.model.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(named.values()), enabled=self.strategy.stage == 3):
            if self._rank:
                return {}
            return {name: parameter.detach().float().cpu().numpy() for name, parameter in named.items()}

    def states(self) -> dict[str, float]:
        """The squared norm of this rank's part of the master weights and of each optimiser state."""
        optimizer, found = self.actor.model.optimizer, {}
        zero_3 = self.strategy.stage == 3
        masters = optimizer.fp32_partitioned_groups_flat if zero_3 else optimizer.single_partition_of_fp32_groups
        for i, master in enumerate(masters):
            for name, value in {"weights": master, **optimizer.optimizer.state.get(master, {})}.items():
                found[f"{name} of group {i}"] = float(torch.as_tensor(value).detach().double().square().sum())
        return found


def rollout_actor(cpu_bench: bool) -> Any:
    """OpenRLHF's vLLM actor, which returns log-probs of the sampled distribution, and its weights."""
    base = vllm_engine.RolloutRayActor.__ray_metadata__.modified_class

    class DoctorRollout(base):  # type: ignore[misc, valid-type]
        async def __init__(self, *args: Any, **kwargs: Any) -> None:
            if not cpu_bench:
                kwargs["worker_extension_cls"] = "exgrpo_orlhf.doctor.worker.DoctorWorker"
            kwargs |= {"logprobs_mode": "processed_logprobs", "max_logprobs": 1}
            await super().__init__(*args, **kwargs)

        async def weights(self) -> dict[str, Any]:
            """The vLLM model's parameters, as vLLM has them. q, k and v are one tensor, gate and up too; the embedding
            has more rows than the vocabulary; what is tied occurs once."""
            (weights,) = await self.llm.collective_rpc("model_weights")
            return {name: np.asarray(torch.as_tensor(weight).float()) for name, weight in weights.items()}

    return ray.remote(DoctorRollout)


def different(engine: Mapping[str, np.ndarray], actor: Mapping[str, np.ndarray]) -> tuple[list[str], int]:
    """The parameters of a vLLM engine that are not the actor's, bit for bit; and how many could be compared. vLLM
    packs the experts of a layer in a way of its own: those are not compared."""
    names, compared = [], 0
    for name, weight in engine.items():
        fused = next((fused for fused in _FUSED if fused in name), None)
        parts = [name.replace(fused, part) for part in _FUSED[fused]] if fused else [name]
        if not actor.keys() >= set(parts):
            continue
        compared += 1
        wanted = np.concatenate([actor[part] for part in parts])
        if not np.array_equal(weight[: len(wanted)], wanted):  # vLLM pads the vocabulary
            names.append(name)
    return names, compared
