"""Groups without a gradient are replaced before the update (DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..records import RolloutGroup, Trajectory
from ..settings import require
from . import Plan, ReplayBuffer
from .mixer import FreshSource


@dataclass(frozen=True)
class Sampled:
    """What a step has sampled.

    plan: the questions of the batch; groups: the batch, graded; everything: with the groups that were left out
    rounds: of rollouts
    """

    plan: Plan
    groups: list[RolloutGroup]
    everything: list[RolloutGroup]
    rounds: int

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/rounds": float(self.rounds),
            "rollout/filtered_groups": float(len(self.everything) - len(self.groups)),
        }


@dataclass(frozen=True)
class DynamicSampling:
    """A group all of whose rows have the same reward makes place for the group of a newly drawn question. The stored
    row of a replayed group counts; the question that takes its place is a fresh one.

    max_rounds: further rounds of rollouts in a step, at most; 0: none, and the batch is what was planned
    min_reward, max_reward: mean reward of a group's graded rows, inclusive; outside of them a group makes place too:
        training on questions of one difficulty alone, as in ExGRPO's first comparison (section 3.1)

    Above 0 it departs from DAPO, which samples until the batch is full: when the rounds or the questions run out, the
    batch is filled up to its size with groups that were to be left out, those without a gradient before others. The
    normaliser counts them all.
    """

    max_rounds: int = 0
    min_reward: float | None = None
    max_reward: float | None = None

    def __post_init__(self) -> None:
        require(
            self.max_rounds >= 0, f"DynamicSampling.max_rounds must be at least 0 (0: off), got {self.max_rounds!r}"
        )
        low, high = self.min_reward, self.max_reward
        require(
            self.max_rounds > 0 or (low is None and high is None),
            "DynamicSampling.min_reward and max_reward leave no group out with DynamicSampling.max_rounds = 0; set it "
            "to the rounds in which others may be sampled",
        )
        require(
            low is None or high is None or low <= high,
            f"DynamicSampling.min_reward must be at most DynamicSampling.max_reward, got {low!r} and {high!r}",
        )

    def sample(
        self,
        plan: Plan,
        stored: Mapping[str, Trajectory],
        roll: Callable[[Plan], list[RolloutGroup]],
        fresh: FreshSource,
        buffer: ReplayBuffer,
    ) -> Sampled:
        """Sample the planned questions, then others in place of those without a signal; none twice.

        stored: the trajectory of each replayed question; roll: samples and grades a plan
        """
        everything = roll(plan)
        size, rounds = len(everything), 1
        while rounds <= self.max_rounds:
            missing = size - sum(self._rank(group, stored) == 0 for group in everything)
            retired = buffer.retired if buffer.retirement.leaves_fresh else ()
            drawn = fresh.draw(missing, {group.question.id for group in everything}, retired)
            if not drawn:
                break
            everything = everything + roll(Plan(plan.step, drawn, [], {}, rounds))
            rounds += 1
        if len(everything) == size:
            return Sampled(plan, everything, everything, rounds)
        best = sorted(everything, key=lambda group: self._rank(group, stored))[:size]
        ids = {group.question.id for group in best}
        groups = [group for group in everything if group.question.id in ids]
        of_batch = replace(
            plan,
            fresh=[group.question for group in groups if not group.replayed],
            replayed=[group.question for group in groups if group.replayed],
        )
        return Sampled(of_batch, groups, everything, rounds)

    def _rank(self, group: RolloutGroup, stored: Mapping[str, Trajectory]) -> int:
        """0: to be trained on; 1: without a gradient; 2: with one, of a difficulty that is not asked for."""
        rewards = [
            rollout.grade.reward for rollout in group.rollouts if rollout.grade and rollout.grade.reward is not None
        ]
        if group.replayed:
            rewards.append(stored[group.question.id].reward)
        if len(set(rewards)) < 2:
            return 1
        mean = sum(rewards) / len(rewards)
        low, high = self.min_reward, self.max_reward
        return 0 if (low is None or mean >= low) and (high is None or mean <= high) else 2
