"""Retirement: when a mastered question leaves the replay buffer, and whether it is visited again."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ..checks import Count, PositiveShare, check_settings, require
from .difficulty import as_fraction


@dataclass(frozen=True)
class RetirementPolicy:
    """A question retires when its accuracy has reached `at_accuracy` in `times_in_a_row` observations: it leaves the
    buffer with its trajectories, and what is sampled of it is no longer stored.

    at_accuracy: accuracy at which a question retires, in (0, 1]; None switches retirement off
    times_in_a_row: observations in a row at that accuracy
    leaves_fresh: whether a retired question also leaves fresh sampling, from the next epoch on. The paper retires from
        the buffer only (False); the official code also drops it from the training set.
    revisits_every: steps; in each such step a share of the retired questions returns and is in that step's batch, as
        fresh questions (the paper's Table 7: 25); None: never
    revisited_share: of the retired questions, drawn uniformly, rounded down (Table 7: 10 %)
    """

    at_accuracy: PositiveShare | None = 1.0
    times_in_a_row: Count = 1
    leaves_fresh: bool = False
    revisits_every: Count | None = None
    revisited_share: PositiveShare = 0.1

    def __post_init__(self) -> None:
        """Raises ValueError for a value out of range, or one that needs another setting to have a meaning."""
        check_settings(RetirementPolicy, vars(self))
        for name in ("leaves_fresh", "revisits_every"):
            require(
                self.at_accuracy is not None or not getattr(self, name),
                f"RetirementPolicy.{name} = {getattr(self, name)!r} needs retirement, but "
                "RetirementPolicy.at_accuracy is None",
            )

    def is_mastered(self, accuracy: Fraction) -> bool:
        """Whether an observation of this accuracy counts towards retirement."""
        return self.at_accuracy is not None and accuracy >= as_fraction(self.at_accuracy)
