"""How much is replayed: ρ of a step, the delayed start, and the end by a policy reincarnation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..checks import Count, ShareBelowOne, check_settings, require
from ..records import RolloutGroup
from .difficulty import as_fraction


@dataclass(frozen=True, repr=False)
class Reincarnation:
    """Policy reincarnation (ReMix, arXiv 2507.06892). Behind its last step with replay, T, a run goes on from π_T:
    nothing is replayed or stored any more, a batch is gone through once, the reference of the KL term is π_T, and
    Adam's moments begin at 0. The learning rate's schedule goes on.

    after_step: T; None: by `at_accuracy`
    at_accuracy: T is the step of the first batch whose Pass@1 (mean accuracy over its graded fresh rollouts) exceeds
        this; with train.generate_ahead the step after it, whose batch is sampled already
    """

    after_step: Count | None = None
    at_accuracy: ShareBelowOne | None = None

    def __post_init__(self) -> None:
        check_settings(Reincarnation, vars(self))
        require(
            (self.after_step is None) != (self.at_accuracy is None),
            "Reincarnation.after_step and Reincarnation.at_accuracy: one must be bound, and the other None; got "
            f"{self.after_step!r} and {self.at_accuracy!r}",
        )

    def last_step(self, pass_at_1: Fraction, step: int) -> int | None:
        """T, if a batch of this accuracy decides it. step: the last one that is planned already"""
        return step if self.at_accuracy is not None and pass_at_1 > as_fraction(self.at_accuracy) else None


class ReplayShare:
    """ρ of a step: 0 until a batch's Pass@1 exceeds `start_at_accuracy`, then a line from `rho` to `rho_end`, and 0
    after a reincarnation.

    Settings as in `ReplayMixer`. started_at: the last step that was planned before the start; None: not started
    last_step: T of the reincarnation, once it is known; over: whether the step under way lies behind it
    """

    def __init__(
        self,
        rho: float,
        rho_end: float | None,
        rho_steps: int | None,
        start_at_accuracy: float | None,
        reincarnation: Reincarnation | None = None,
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
        self.reincarnation = reincarnation
        self.last_step: int | None = reincarnation.after_step if reincarnation else None
        self.over = False

    @property
    def started(self) -> bool:
        return self.started_at is not None

    @property
    def active(self) -> bool:
        """Whether anything may be replayed or stored in the step under way."""
        return self.started and not self.over

    @property
    def largest(self) -> Fraction:
        """0: no question is ever planned for replay."""
        return max(self.rho, self.rho_end)

    def at(self, step: int) -> Fraction:
        """The step's ρ, exact. Replay may begin in the step after the start."""
        if self.started_at is None or (self.last_step is not None and step > self.last_step):
            return Fraction(0)
        steps = min(max(step - self.started_at - 1, 0), self.rho_steps)
        return self.rho + (self.rho_end - self.rho) * steps / self.rho_steps

    def begin(self, step: int) -> bool:
        """At the beginning of each step: whether the run is reincarnated now."""
        self.over = self.last_step is not None and step > self.last_step
        return self.over and step - 1 == self.last_step

    def observe(self, groups: Sequence[RolloutGroup], step: int) -> None:
        """Start once a batch's Pass@1 exceeds `start_at_accuracy`, and end by `Reincarnation.at_accuracy`. step: the
        last one that is planned already"""
        pass_at_1 = Fraction(sum(group.correct for group in groups), sum(group.graded for group in groups) or 1)
        if self.started_at is None and self.start_at_accuracy is not None and pass_at_1 > self.start_at_accuracy:
            self.started_at = step
        if self.reincarnation and self.last_step is None:
            self.last_step = self.reincarnation.last_step(pass_at_1, step)
