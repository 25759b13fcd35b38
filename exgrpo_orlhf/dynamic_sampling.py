"""Groups without a gradient are replaced before the update (DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from .replay import Plan, ReplayBuffer, RolloutGroup, Trajectory
from .replay.mixer import FreshSource
from .settings import require


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

    Above 0 it departs from DAPO, which samples until the batch is full: when the rounds or the questions run out, the
    batch is filled up to its size with groups that were to be left out. They have no gradient, but the normaliser
    counts them.
    """

    max_rounds: int = 0

    def __post_init__(self) -> None:
        require(
            self.max_rounds >= 0, f"DynamicSampling.max_rounds must be at least 0 (0: off), got {self.max_rounds!r}"
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
            missing = size - sum(_has_signal(group, stored) for group in everything)
            retired = buffer.retired if buffer.retirement.leaves_fresh else ()
            drawn = fresh.draw(missing, {group.question.id for group in everything}, retired)
            if not drawn:
                break
            everything = everything + roll(Plan(plan.step, drawn, [], {}, rounds))
            rounds += 1
        if len(everything) == size:
            return Sampled(plan, everything, everything, rounds)
        best = sorted(everything, key=lambda group: not _has_signal(group, stored))[:size]
        ids = {group.question.id for group in best}
        groups = [group for group in everything if group.question.id in ids]
        of_batch = replace(
            plan,
            fresh=[group.question for group in groups if not group.replayed],
            replayed=[group.question for group in groups if group.replayed],
        )
        return Sampled(of_batch, groups, everything, rounds)


def _has_signal(group: RolloutGroup, stored: Mapping[str, Trajectory]) -> bool:
    rewards = {rollout.grade.reward for rollout in group.rollouts if rollout.grade} - {None}
    if group.replayed:
        rewards.add(stored[group.question.id].reward)
    return len(rewards) > 1
