"""Retirement: when a mastered question leaves the replay buffer, and whether it returns."""

from __future__ import annotations

from fractions import Fraction

from .difficulty import as_fraction


class RetirementPolicy:
    """A question retires when its accuracy has reached `at_accuracy` in `times_in_a_row` observations: it leaves the
    buffer with its trajectories, and what is sampled of it is no longer stored.

    at_accuracy: accuracy at which a question retires, in (0, 1]; None switches retirement off
    times_in_a_row: observations in a row at that accuracy
    leaves_fresh: whether a retired question also leaves fresh sampling, from the next epoch on. The paper retires from
        the buffer only (False); the official code also drops it from the training set. On a weak model the latter
        starved training of all but lucky guesses, so it is an option and not the default.
    returns_after: a retired question returns after that many steps; None: never
    returns_below: a retired question returns when a fresh group of it has an accuracy below this; None: never
    """

    def __init__(
        self,
        at_accuracy: float | None = 1.0,
        times_in_a_row: int = 1,
        leaves_fresh: bool = False,
        returns_after: int | None = None,
        returns_below: float | None = None,
    ) -> None:
        """Raises ValueError for a value out of range, or one that needs another setting to have a meaning."""
        if at_accuracy is not None and not 0 < at_accuracy <= 1:
            raise ValueError(
                f"RetirementPolicy.at_accuracy must lie in (0, 1], or be None to switch it off; got {at_accuracy!r}"
            )
        if times_in_a_row < 1:
            raise ValueError(f"RetirementPolicy.times_in_a_row must be at least 1, got {times_in_a_row!r}")
        if returns_after is not None and returns_after < 1:
            raise ValueError(
                f"RetirementPolicy.returns_after must be at least 1 step, or None for never; got {returns_after!r}"
            )
        if returns_below is not None and not 0 < returns_below <= (at_accuracy or 0):
            raise ValueError(
                "RetirementPolicy.returns_below must be positive and not above RetirementPolicy.at_accuracy; got "
                f"{returns_below!r} with {at_accuracy!r}"
            )
        for name, value in (("leaves_fresh", leaves_fresh), ("returns_after", returns_after)):
            if at_accuracy is None and value:
                raise ValueError(
                    f"RetirementPolicy.{name} = {value!r} needs retirement, but RetirementPolicy.at_accuracy is None"
                )
        if leaves_fresh and returns_below is not None:
            raise ValueError(
                "RetirementPolicy.returns_below needs fresh rollouts of retired questions, but "
                "RetirementPolicy.leaves_fresh is True; use RetirementPolicy.returns_after"
            )
        self.at_accuracy = None if at_accuracy is None else as_fraction(at_accuracy)
        self.times_in_a_row = times_in_a_row
        self.leaves_fresh = leaves_fresh
        self.returns_after = returns_after
        self.returns_below = None if returns_below is None else as_fraction(returns_below)

    def mastered(self, accuracy: Fraction) -> bool:
        """Whether one observation counts towards retirement."""
        return self.at_accuracy is not None and accuracy >= self.at_accuracy

    def retires(self, streak: int) -> bool:
        """streak: observations in a row that counted."""
        return streak >= self.times_in_a_row

    def is_back(self, accuracy: Fraction) -> bool:
        """Whether a retired question with this accuracy returns."""
        return self.returns_below is not None and accuracy < self.returns_below
