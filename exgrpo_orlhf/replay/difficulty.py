"""Difficulty levels: a question's latest accuracy, cut at two thresholds, fixed or adapted to the buffer; or the spread
of its latest rewards (ReplayBuffer.difficulty)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sized
from fractions import Fraction
from typing import Literal

from ..settings import check_settings, require

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

    thresholds: low and high, where they are fixed
    quantiles: two shares of the candidates between 0 and 1; the levels are then cut there and the thresholds unused
        (see `adapted`). None: fixed thresholds
    """

    def __init__(
        self, thresholds: tuple[float, float] = (0.25, 0.75), quantiles: tuple[float, float] | None = None
    ) -> None:
        """Raises ValueError unless 0 < low < high < 1, for thresholds and for quantiles."""
        check_settings(DifficultyBuckets, locals())
        for name, pair, kind in (("thresholds", thresholds, "accuracies"), ("quantiles", quantiles, "shares")):
            require(
                pair is None or (len(pair) == 2 and 0 < pair[0] < pair[1] < 1),
                f"DifficultyBuckets.{name} must be two {kind} with 0 < low < high < 1, got {pair!r}",
            )
        self.low, self.high = as_fraction(thresholds[0]), as_fraction(thresholds[1])
        self.quantiles = None if quantiles is None else (as_fraction(quantiles[0]), as_fraction(quantiles[1]))

    def adapted(self, candidates: Mapping[Fraction, Sized]) -> DifficultyBuckets:
        """The levels for these candidates, by exact accuracy: cut at their quantiles, or as they are if fixed.

        A candidate's rank is the share of candidates of lower accuracy plus half the share of its own: hard up to the
        first quantile, medium up to the second. Equal accuracies share a rank and thus a level, so a level can be
        empty. Unsolved and solved candidates are levels of their own and do not count.
        """
        if self.quantiles is None:
            return self
        sizes = {accuracy: len(members) for accuracy, members in sorted(candidates.items()) if 0 < accuracy < 1}
        adapted = copy.copy(self)
        adapted.low = adapted.high = Fraction(0)
        total, below = sum(sizes.values()), 0
        for accuracy, size in sizes.items():
            rank = Fraction(2 * below + size, 2 * total)
            if rank <= self.quantiles[0]:
                adapted.low = accuracy
            if rank <= self.quantiles[1]:
                adapted.high = accuracy
            below += size
        return adapted

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
