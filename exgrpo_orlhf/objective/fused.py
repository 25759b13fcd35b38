"""The arithmetic of `token_stats` on a block of logits, for GPUs: torch.compile makes one or two passes of it.

There each operation alone reads and writes the whole block. On a CPU the block stays in the cache, and nothing is
compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

log = logging.getLogger(__name__)


def sums(z: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row of logits (N, W): the largest one m, Σ e^(z−m), Σ e^(z−m)·(z−m), Σ e^((z−m)/T). (N,) each, float32
    or better."""
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    peak = z.amax(1)
    below = z - peak[:, None]
    p = below.exp()
    return peak, p.sum(1), (p * below).sum(1), (below / temperature).exp().sum(1)


def gradient(
    z: Tensor, column: Tensor, scale: Tensor, tempered: Tensor, temperature: float, through: tuple[Tensor, ...] | None
) -> Tensor:
    """Of log-probs and entropies in the logits, (N, W) in their dtype. All others are (N,).

    column: of the targets, which may lie outside of the block; scale: the log-probs' gradient, divided by T
    tempered: log Σ e^(z/T); through: the entropies' gradient, log Σ e^z and the entropies; None without that gradient
    """
    dtype, z = z.dtype, z.to(tempered.dtype)
    chosen = torch.arange(z.shape[1], device=z.device) == column[:, None]
    slope = scale[:, None] * (chosen.to(z.dtype) - (z / temperature - tempered[:, None]).exp())
    if through is not None:
        grad_entropies, total, entropies = (values[:, None] for values in through)
        log_p = z - total
        slope = slope - grad_entropies * log_p.exp() * (log_p + entropies)
    return slope.to(dtype)


class Arithmetic(NamedTuple):
    """The two functions of this file, compiled or as they are."""

    sums: Callable[..., tuple[Tensor, ...]]
    gradient: Callable[..., Tensor]


@cache
def compiled(device: torch.device) -> Arithmetic | None:
    """For this device, or None: for a CPU, and where torch.compile is switched off or fails, which is said once."""
    if device.type == "cpu":
        return None
    config: Any = torch._dynamo.config
    try:
        if config.disable:
            raise RuntimeError("torch.compile is switched off")
        # In this process: two small kernels need no pool of compiling processes.
        made = Arithmetic(*(torch.compile(f, dynamic=True, options={"compile_threads": 1}) for f in (sums, gradient)))
        z, ones = torch.zeros(8, 64, dtype=torch.bfloat16, device=device), torch.ones(8, device=device)
        with torch.no_grad():
            made.sums(z, 0.9)
            made.gradient(z, ones.long(), ones, ones, 0.9, None)
    except Exception as error:  # of dynamo, inductor, Triton, the C compiler, the driver, of any kind
        reason = str(error).strip().partition("\n")[0]
        log.warning("log-probs and entropies are computed without fused kernels, which takes longer: %s", reason)
        return None
    return made
