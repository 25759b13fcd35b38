"""Difficulty levels: a question's latest accuracy, cut at two thresholds; or the spread of its latest rewards
(ReplayBuffer.difficulty)."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Literal

from ..checks import check_settings, require

Level = Literal["unsolved", "hard", "medium", "easy", "solved"]
LEVELS: tuple[Level, ...] = ("unsolved", "hard", "medium", "easy", "solved")
SPREAD_EPSILON = 1e-8


def as_fraction(value: float) -> Fraction:
    """The fraction a decimal setting means: 0.7 is 7/10, not the nearest binary float (which is below 7/10)."""
    return Fraction(value).limit_denominator(1_000_000)


class DifficultyBuckets:
    """Accuracy → level: hard (0, low], medium (low, high], easy (high, 1); 0 is unsolved and 1 is solved.

    Levels are for metrics, and for `QuestionSampler.partition = 'level'`; otherwise the sampler's buckets are exact
    accuracies, and levels change nothing.

    The paper puts the upper threshold into both medium and easy; here it is medium (arXiv 2510.02245, section 3).
    Accuracies are exact fractions, so that 2 of 8 is on the threshold 0.25 and never beside it.

    thresholds: low and high
    """

    def __init__(self, thresholds: tuple[float, float] = (0.25, 0.75)) -> None:
        """Raises ValueError unless 0 < low < high < 1."""
        check_settings(DifficultyBuckets, locals())
        require(
            len(thresholds) == 2 and 0 < thresholds[0] < thresholds[1] < 1,
            f"DifficultyBuckets.thresholds must be two accuracies with 0 < low < high < 1, got {thresholds!r}",
        )
        self.low, self.high = map(as_fraction, thresholds)

    def level(self, accuracy: Fraction) -> Level:
        if accuracy == 0:
            return "unsolved"
        if accuracy == 1:
            return "solved"
        if accuracy <= self.low:
            return "hard"
        return "medium" if accuracy <= self.high else "easy"


def spread_levels(spreads: Mapping[str, float], group_size: int) -> dict[str, Fraction | None]:
    """Difficulty by the spread σ of a group's rewards (paper, section 5.3): round(K·σ̃)/K in [0, 1], where
    σ̃ = (σ − σ_min)/max(σ_max − σ_min, ε) over the batch.

    spreads: σ of each group of a batch, by question id
    None where the rewards are all equal (σ = 0). Where all spreads are equal, in a batch of one group too, σ̃ is 0.
    """
    low, high = min(spreads.values(), default=0.0), max(spreads.values(), default=0.0)
    scale = group_size / max(high - low, SPREAD_EPSILON)
    return {
        question_id: Fraction(int((spread - low) * scale + 0.5), group_size) if spread > 0 else None
        for question_id, spread in spreads.items()
    }
