"""Rewards are compared up to rounding: a float32 of 0.99999994 is a 1."""

from __future__ import annotations

ROUNDING = 1e-6  # of a number, or of 1 where that is more
LARGEST_REWARD = 1e6  # in size: squares of larger ones overflow in an update, which could not name their source


def less_rounding(value: float) -> float:
    """The least number that counts as `value`. So `a >= less_rounding(b)` says that a is b at least."""
    return value - ROUNDING * max(1.0, abs(value))


def are_equal(values: list[float]) -> bool:
    """Whether they differ by rounding alone; of none and of one it is True."""
    return not values or min(values) >= less_rounding(max(values))
