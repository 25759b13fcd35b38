"""Compares our OpenRLHF actor on the pretended device with itself on the CPU, and prints the differences as JSON for
test_pretended_cuda.py.

DeepSpeed needs memory addresses, which the pretended device does not have: `OneRank` does its arithmetic for one rank,
without an optimiser. The rest is the real code: replay buffer, training step, forward pass, loss.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openrlhf_on_cpu  # noqa: F401  (first: without CUDA OpenRLHF cannot be imported before it)
import torch
from device import Pretended, install, messages_of
from openrlhf.trainer.ray import ppo_actor
from openrlhf.utils.deepspeed import DeepspeedStrategy
from openrlhf_ranks import K, arguments, assembled_actor, experiences_of, mixed_batch
from transformers import AutoModelForCausalLM

from exgrpo_orlhf.engines.openrlhf import actor
from exgrpo_orlhf.objective import MixedPolicyLoss, token_stats

LOSS = MixedPolicyLoss(response_length=12, kl_coef=0.01, entropy_coef=0.001)
GROUPS = 4


class OneRank(DeepspeedStrategy):
    def __init__(self, args: Any) -> None:
        super().__init__(args=args)
        self.world_size, self.accumulated_gradient = 1, GROUPS * K // args.train.micro_batch_size
        self.ds_device_mesh = {"dp": SimpleNamespace(get_group=lambda: None)}

    def backward(self, loss: torch.Tensor, *_: Any) -> None:
        (loss / self.accumulated_gradient).backward()

    def optimizer_step(self, *_: Any, **__: Any) -> None: ...

    def get_grad_norm(self, model: Any) -> float:
        return 0.0

    def all_reduce(self, data: Any, op: str = "mean") -> Any:
        return data


class Engine(torch.nn.Module):
    """Stands for DeepSpeed's engine."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def work(model: Path, device: str, packed: bool) -> dict[str, Any]:
    """Measures and fits a batch with replayed, ungradable and short rows, with KL and entropy terms."""
    args = arguments(LOSS, groups=GROUPS, **{"ds.packing_samples": packed, "train.micro_batch_size": 4})
    policy = torch.nn.Module.__new__(actor.MixedActor)
    torch.nn.Module.__init__(policy)
    policy.temperature, policy.packing_samples, policy.is_vlm = 0.9, packed, False
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")
    policy.model = Engine(loaded.to(device))
    ours = assembled_actor(policy, OneRank(args), norms=[1.0])
    batch, rows = mixed_batch(groups=GROUPS)
    rows = [replace(row, prompt=[token % 18 for token in row.prompt]) for row in rows]
    log_probs, entropies = zip(*ours.measure(rows), strict=True)
    for experience in experiences_of(args, batch, rows, log_probs):
        experience.base_action_log_probs = experience.action_log_probs - 0.1  # the reference model's
        ours.append(experience)
    status = ours.fit(args.algo.kl.init_coef)
    gradient = torch.cat([parameter.grad.flatten().float() for parameter in policy.parameters()]).cpu()
    return {
        "log_probs": np.concatenate(log_probs),
        "entropies": np.array(entropies),
        "status": np.array([status[name] for name in sorted(status)], np.float64),
        "gradient": gradient.numpy(),
    }


def planted(model: Path) -> dict[str, str]:
    """The error messages if a tensor was left on the CPU."""
    stats, loss = token_stats.token_stats, actor.MixedLoss.forward

    def other_stats(hidden: Any, weight: Any, targets: Any, **more: Any) -> Any:
        return stats(hidden, weight, targets.cpu(), **more)

    def other_loss(self: Any, log_probs: Any, old: Any, *rest: Any, **more: Any) -> Any:
        return loss(self, log_probs, old.cpu(), *rest, **more)

    on_cuda = lambda: work(model, "cuda", packed=False)
    return messages_of(
        {
            "forward": (token_stats, "token_stats", other_stats, on_cuda),
            "loss": (actor.MixedLoss, "forward", other_loss, on_cuda),
        }
    )


def main(model: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    ppo_actor.DataLoader = actor.in_order  # as MixedPolicyActor sets it where it makes its model
    right = {packed: work(model, "cpu", packed) for packed in (False, True)}
    install()
    with Pretended():
        figures: dict[str, Any] = {}
        for packed, expected in right.items():
            got = work(model, "cuda", packed)
            differences = {name: float(np.abs(expected[name] - got[name]).max()) for name in expected}
            share = np.linalg.norm(expected["gradient"] - got["gradient"]) / np.linalg.norm(expected["gradient"])
            figures["packed" if packed else "padded"] = {**differences, "gradient": float(share)}
        figures["planted"] = planted(model)
    print(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
