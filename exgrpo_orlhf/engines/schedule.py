"""The learning rate of each optimiser step: one schedule for both engines and for supervised starts."""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LambdaLR

from ..settings import Optimizer


def rate_share(step: int, *, steps: int | None, warmup: int, schedule: str) -> float:
    """The learning rate of an optimiser step, counted from 1, as a share of its peak.

    It rises in `warmup` equal steps and then stays ('constant') or falls, linearly or as half a cosine, to what would
    be 0 one step after the last. (transformers' schedules begin at 0, so that their first step trains nothing.)
    """
    if step < warmup:
        return step / warmup
    if steps is None:
        return 1.0
    peak, step = max(warmup, 1), min(step, steps + 1)
    fall = steps + 1 - peak
    return (steps + 1 - step) / fall if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * ((step - peak) / fall)))


def scheduler(optimizer: torch.optim.Optimizer, settings: Optimizer) -> LambdaLR:
    """Sets the rate of each step of an optimizer, whose own rate is the peak."""
    steps, warmup, schedule = settings.decay_steps, settings.warmup_steps, settings.schedule
    return LambdaLR(optimizer, lambda done: rate_share(done + 1, steps=steps, warmup=warmup, schedule=schedule))
