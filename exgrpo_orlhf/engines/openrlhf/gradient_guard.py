"""Skips updates whose gradient is not finite or too large, with DeepSpeed's own mechanism for skipping a step."""

from __future__ import annotations

import math
from typing import Any

import torch


class GradientGuard:
    """Checks the gradient norm of every optimiser step before the step is made.

    DeepSpeed skips a step whose gradients overflowed, but checks for that in float16 only. Its check is replaced here
    by one that also skips a norm above `limit`. A skipped step does not advance the learning rate's schedule.

    norms: of every step since `begin`, before clipping; skipped: number of steps that were skipped; rate: the learning
        rate of the last step
    """

    def __init__(self, optimizer: Any, zero_stage: int, limit: float | None) -> None:
        """optimizer: DeepSpeed's, of ZeRO stage 1, 2 or 3; limit: None for no limit but finiteness"""
        self.optimizer, self.limit = optimizer, limit
        self.norms: list[float] = []
        self.skipped, self.rate = 0, 0.0
        if zero_stage == 3:
            optimizer._overflow_check_and_loss_scale_update = self._check_stage_3
        else:
            optimizer.check_grad_overflow = True
            optimizer.check_overflow = self._check_stage_2

    def begin(self) -> None:
        self.norms, self.skipped = [], 0

    def _check_stage_2(self, partition_gradients: bool = True) -> None:
        self.optimizer.overflow = self._skip(self.optimizer.scaled_global_norm())

    def _check_stage_3(self) -> bool:
        norm = torch.linalg.vector_norm(torch.stack(self.optimizer._get_norm_groups()))
        self.optimizer.overflow = self._skip(norm)
        if self.optimizer.overflow:
            self.optimizer._overflow_clean_up(self.optimizer.loss_scale)
        return bool(self.optimizer.overflow)

    def _skip(self, scaled_norm: Any) -> bool:
        # DeepSpeed reports a norm that is not finite as −1, so `has_overflow` is asked too.
        norm = math.nan if self.optimizer.has_overflow() else float(scaled_norm) / float(self.optimizer.loss_scale)
        self.rate = float(self.optimizer.param_groups[0]["lr"])
        self.norms.append(norm)
        skip = not math.isfinite(norm) or (self.limit is not None and norm > self.limit)
        self.skipped += skip
        return skip
