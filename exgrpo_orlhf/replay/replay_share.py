"""How much of a batch is replayed: ρ by step, after a delayed start."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from ..checks import require
from ..records import RolloutGroup
from .difficulty import as_fraction


class ReplayShare:
    """ρ of a step: 0 until a batch's Pass@1 exceeds `start_at_accuracy`, then a line from `rho` to `rho_end`.

    Settings as in `ReplayMixer`. started_at: the last step that was planned before the start; None: not started
    """

    def __init__(
        self, rho: float, rho_end: float | None, rho_steps: int | None, start_at_accuracy: float | None
    ) -> None:
        """Raises ValueError for rho_end without rho_steps or the reverse."""
        require(
            (rho_end is None) == (rho_steps is None),
            "ReplayMixer.rho_end and ReplayMixer.rho_steps are both numbers, or both None (constant ρ); got "
            f"{rho_end!r} and {rho_steps!r}",
        )
        self.rho, self.rho_end = as_fraction(rho), as_fraction(rho if rho_end is None else rho_end)
        self.rho_steps = 1 if rho_steps is None else rho_steps
        self.start_at_accuracy = None if start_at_accuracy is None else as_fraction(start_at_accuracy)
        self.started_at: int | None = 0 if start_at_accuracy is None else None

    @property
    def started(self) -> bool:
        return self.started_at is not None

    @property
    def largest(self) -> Fraction:
        """0: no question is ever planned for replay."""
        return max(self.rho, self.rho_end)

    def at(self, step: int) -> Fraction:
        """The step's ρ, exact. Replay may begin in the step after the start."""
        if self.started_at is None:
            return Fraction(0)
        steps = min(max(step - self.started_at - 1, 0), self.rho_steps)
        return self.rho + (self.rho_end - self.rho) * steps / self.rho_steps

    def observe(self, groups: Sequence[RolloutGroup], step: int) -> None:
        """Start once a batch's Pass@1 exceeds `start_at_accuracy`; replay never stops again. step: the last one that is
        planned already"""
        if self.started or self.start_at_accuracy is None:
            return
        graded = sum(group.graded for group in groups)
        if graded and Fraction(sum(group.correct for group in groups), graded) > self.start_at_accuracy:
            self.started_at = step
