"""Groups without a gradient are replaced before the update (DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from ..records import MixedBatch, RolloutGroup, Trajectory, mean
from ..settings import at_least, check, require
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
        """Of all fresh rollouts of the step. `lucky_guess_rate`: correct answers whose reasoning does not hold."""
        rollouts = [rollout for group in self.everything for rollout in group.rollouts]
        grades = [rollout.grade for rollout in rollouts if rollout.grade is not None]
        gradable = [grade for grade in grades if grade.reward is not None]
        checked = [grade for grade in gradable if grade.correct and grade.sound is not None]
        return {
            "reward/mean": mean([grade.reward for grade in gradable if grade.reward is not None]),
            "reward/pass_at_1": mean([grade.correct for grade in gradable]),
            "reward/lucky_guess_rate": mean([not grade.sound for grade in checked]),
            "reward/no_answer_share": mean([grade.verdict == "no_answer" for grade in grades]),
            "reward/timeout_share": mean([grade.verdict == "timeout" for grade in grades]),
            "reward/error_share": mean([grade.verdict == "error" for grade in grades]),
            "reward/ungradable": float(len(grades) - len(gradable)),
            "rollout/response_tokens": mean([len(rollout.token_ids) for rollout in rollouts]),
            "rollout/truncated_share": mean([rollout.finish == "length" for rollout in rollouts]),
            "rollout/rounds": float(self.rounds),
            "rollout/filtered_groups": float(len(self.everything) - len(self.groups)),
        }


@dataclass(frozen=True)
class DynamicSampling:
    """A group whose rows all have the same reward is replaced by the group of a newly drawn question, a fresh one. The
    rows are those that would be trained on: the stored one counts, a rollout that gave way to it does not.

    max_rounds: further rounds of rollouts in a step, at most; 0: none, and the batch is what was planned
    min_reward, max_reward: mean reward of a group's graded rows, inclusive; outside of them a group is replaced too:
        training on questions of one difficulty alone
    masks: a group outside of them is not replaced: it stays in the batch, and no token of it is in the loss. The
        normaliser counts its rows. With the paper's levels as the range this is its Table 9. max_rounds is 0

    With max_rounds > 0 this differs from DAPO, which samples until the batch is full: when the rounds or the questions
    run out, the batch is filled up to its size with groups that were to be left out, those without a gradient before
    others. The normaliser counts them all.
    """

    max_rounds: Annotated[int, at_least(0)] = 0
    min_reward: float | None = None
    max_reward: float | None = None
    masks: bool = False

    def __post_init__(self) -> None:
        check(DynamicSampling, vars(self))
        low, high = self.min_reward, self.max_reward
        require(
            self.max_rounds > 0 or self.masks or (low is None and high is None),
            "DynamicSampling.min_reward and max_reward leave no group out with DynamicSampling.max_rounds = 0; set it "
            "to the rounds in which others may be sampled, or DynamicSampling.masks = True",
        )
        require(
            not self.masks or (self.max_rounds == 0 and (low, high) != (None, None)),
            "DynamicSampling.masks needs DynamicSampling.min_reward or max_reward, and DynamicSampling.max_rounds = 0; "
            f"got {low!r}, {high!r} and {self.max_rounds!r}",
        )
        require(
            low is None or high is None or low <= high,
            f"DynamicSampling.min_reward must be at most DynamicSampling.max_reward, got {low!r} and {high!r}",
        )

    def replacements(
        self,
        plan: Plan,
        groups: Sequence[RolloutGroup],
        stored: Mapping[str, Trajectory],
        width: int,
        rounds: int,
        fresh: FreshSource,
        buffer: ReplayBuffer,
    ) -> Plan | None:
        """Newly drawn questions in place of those without a signal, no question twice; None where sampling is done.

        groups: what the step has sampled so far, graded; stored: the trajectory of each question that has one
        width: K; rounds: of rollouts so far
        """
        if rounds > self.max_rounds:
            return None
        missing = plan.questions - sum(self._rank(group, stored, width) == 0 for group in groups)
        retired = buffer.retired if buffer.retirement.leaves_fresh else ()
        drawn = fresh.draw(missing, {group.question.id for group in groups}, retired, plan.step)
        return Plan(plan.step, drawn, [], {}, rounds) if drawn else None

    def select(
        self, plan: Plan, groups: list[RolloutGroup], stored: Mapping[str, Trajectory], width: int, rounds: int
    ) -> Sampled:
        """The batch: as many groups as were planned, those to be trained on before others."""
        if len(groups) == plan.questions:
            return Sampled(plan, groups, groups, rounds)
        best = sorted(groups, key=lambda group: self._rank(group, stored, width))[: plan.questions]
        ids = {group.question.id for group in best}
        batch = [group for group in groups if group.question.id in ids]
        of_batch = replace(
            plan,
            fresh=[group.question for group in batch if not group.replayed],
            replayed=[group.question for group in batch if group.replayed],
        )
        return Sampled(of_batch, batch, groups, rounds)

    def masked(self, batch: MixedBatch) -> MixedBatch:
        """The batch with the groups outside the range out of the loss, where `masks` is set."""
        if not self.masks:
            return batch
        outside = [not self._in_range([row.response.reward for row in rows]) for rows in batch.rows]
        rows = [
            [replace(row, advantage=0.0, in_loss=False) for row in rows] if out else rows
            for rows, out in zip(batch.rows, outside, strict=True)
        ]
        return replace(batch, rows=rows)

    def _in_range(self, rewards: Sequence[float | None]) -> bool:
        """Whether the mean of the graded rows' rewards, of which there is one, lies between the bounds."""
        graded = [reward for reward in rewards if reward is not None]
        low, high = self.min_reward, self.max_reward
        value = sum(graded) / len(graded) if graded else 0.0
        return (low is None or value >= low) and (high is None or value <= high)

    def _rank(self, group: RolloutGroup, stored: Mapping[str, Trajectory], width: int) -> int:
        """0: to be trained on; 1: without a gradient; 2: with one, of a difficulty that is not asked for."""
        rows = group.completed(stored.get(group.question.id), width)
        rewards = [row.reward for row in rows]
        if len({reward for reward in rewards if reward is not None}) < 2:
            return 1
        return 0 if self._in_range(rewards) else 2
