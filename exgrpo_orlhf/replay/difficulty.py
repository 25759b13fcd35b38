"""How difficult a question is: its latest accuracy, cut at two thresholds, or the spread of its latest rewards
(ReplayBuffer.difficulty); and when it is mastered and retires."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from ..checks import Count, PositiveShare, check_settings, require
from ..records import RolloutGroup, mean
from ..rounding import are_equal, less_rounding

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


def mean_reward(group: RolloutGroup) -> float:
    """Of the gradable rollouts; exactly their reward where all are the same. Raises IndexError without any."""
    rewards = group.rewards
    return rewards[0] + mean([reward - rewards[0] for reward in rewards])


def is_above_mean(reward: float, group: RolloutGroup) -> bool:
    """Whether its advantage is positive beside the rollouts of this group."""
    return less_rounding(reward) > mean_reward(group)


def spread_of(group: RolloutGroup) -> float:
    """σ_q, the standard deviation (of n) of its gradable rollouts' rewards; exactly 0 where all are the same."""
    rewards = group.rewards
    return 0.0 if are_equal(rewards) else float(np.std([reward - rewards[0] for reward in rewards]))
