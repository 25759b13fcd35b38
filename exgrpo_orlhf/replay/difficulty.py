"""Difficulty levels: a question's latest accuracy, cut at two thresholds."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

Level = Literal["unsolved", "hard", "medium", "easy", "solved"]
LEVELS: tuple[Level, ...] = ("unsolved", "hard", "medium", "easy", "solved")


def as_fraction(value: float) -> Fraction:
    """The fraction a decimal setting means: 0.7 is 7/10, not the nearest binary float (which is below 7/10)."""
    return Fraction(value).limit_denominator(1_000_000)


class DifficultyBuckets:
    """Accuracy → level: hard (0, low], medium (low, high], easy (high, 1); 0 is unsolved and 1 is solved.

    The paper puts the upper threshold into both medium and easy; here it is medium (arXiv 2510.02245, section 3).
    Accuracies are exact fractions, so that 2 of 8 is on the threshold 0.25 and never beside it.
    """

    def __init__(self, thresholds: tuple[float, float] = (0.25, 0.75)) -> None:
        """Raises ValueError unless 0 < low < high < 1."""
        if len(thresholds) != 2 or not 0 < thresholds[0] < thresholds[1] < 1:
            raise ValueError(
                f"DifficultyBuckets.thresholds must be two accuracies with 0 < low < high < 1, got {thresholds!r}"
            )
        self.low, self.high = as_fraction(thresholds[0]), as_fraction(thresholds[1])

    def level(self, accuracy: Fraction) -> Level:
        if not 0 <= accuracy <= 1:
            raise ValueError(f"an accuracy lies in [0, 1], got {accuracy}")
        if accuracy == 0:
            return "unsolved"
        if accuracy == 1:
            return "solved"
        if accuracy <= self.low:
            return "hard"
        return "medium" if accuracy <= self.high else "easy"
