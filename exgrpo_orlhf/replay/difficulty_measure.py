"""A question's difficulty: its latest accuracy, or the spread of its latest rewards (ReplayBuffer.difficulty)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from ..records import RolloutGroup, Trajectory
from ..rounding import less_rounding
from .stored import QuestionRecord

SPREAD_EPSILON = 1e-8


class ByAccuracy:
    """The paper's: a question that is never solved is no candidate."""

    def difficulty(self, record: QuestionRecord) -> Fraction | None:
        """None: no candidate"""
        return record.accuracy or None

    def spreads(self, groups: Iterable[RolloutGroup]) -> dict[str, float]:
        """What `spread_levels` takes of a batch's graded groups."""
        return {}

    def has_failed(self, group: RolloutGroup) -> bool:
        """Whether none of a graded group's rollouts is worth more than a stored one."""
        return group.accuracy == 0

    def worth_replaying(self, stored: Sequence[Trajectory], group: RolloutGroup) -> list[bool]:
        """Of each stored trajectory, beside this group of its question."""
        return [True] * len(stored)


class BySpread:
    """The paper's section 5.3, for rewards between 0 and 1: a question is a candidate unless its latest rewards were
    all equal, and a trajectory is replayed whose reward is above their mean: its advantage is positive."""

    def difficulty(self, record: QuestionRecord) -> Fraction | None:
        return record.spread

    def spreads(self, groups: Iterable[RolloutGroup]) -> dict[str, float]:
        return {group.question.id: group.spread for group in groups}

    def has_failed(self, group: RolloutGroup) -> bool:
        return group.spread == 0

    def worth_replaying(self, stored: Sequence[Trajectory], group: RolloutGroup) -> list[bool]:
        return [less_rounding(trajectory.reward) > group.mean_reward for trajectory in stored]


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
