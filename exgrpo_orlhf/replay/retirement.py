"""Retirement: when a mastered question leaves the replay buffer."""

from __future__ import annotations

from fractions import Fraction

from .difficulty import as_fraction


class RetirementPolicy:
    """A question whose latest accuracy reaches `at_accuracy` is retired: its trajectories leave the buffer for good.

    at_accuracy: accuracy at which a question retires, in (0, 1]; None switches retirement off
    leaves_fresh: whether a retired question also leaves fresh sampling, from the next epoch on. The paper retires from
        the buffer only (False); the official code also drops it from the training set. On a weak model the latter
        starved training of all but lucky guesses, so it is an option and not the default.
    """

    def __init__(self, at_accuracy: float | None = 1.0, leaves_fresh: bool = False) -> None:
        """Raises ValueError for an accuracy outside (0, 1], or if questions should leave fresh sampling unretired."""
        if at_accuracy is not None and not 0 < at_accuracy <= 1:
            raise ValueError(
                f"RetirementPolicy.at_accuracy must lie in (0, 1], or be None to switch it off; got {at_accuracy!r}"
            )
        if at_accuracy is None and leaves_fresh:
            raise ValueError(
                "RetirementPolicy.leaves_fresh = True needs retirement, but RetirementPolicy.at_accuracy is None"
            )
        self.at_accuracy = None if at_accuracy is None else as_fraction(at_accuracy)
        self.leaves_fresh = leaves_fresh

    def retires(self, accuracy: Fraction) -> bool:
        return self.at_accuracy is not None and accuracy >= self.at_accuracy
