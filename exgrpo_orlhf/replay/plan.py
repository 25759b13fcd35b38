"""What a step is made of: fresh questions, and replayed ones with what is stored of them. Groups without a gradient are
replaced before the update (DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..checks import Natural, check_settings, require
from ..records import CompletedGroup, MixedBatch, Question, RolloutGroup, Trajectory, mean
from ..rounding import are_equal
from .buffer import ReplayBuffer

_NONE = np.empty(0, np.int32)


class FreshSource(Protocol):
    """Where fresh questions come from, and every question by its id."""

    def draw(self, n: int, exclude: Collection[str], retired: Collection[str], step: int) -> list[Question]: ...

    def fill(self, n: int, exclude: Collection[str], step: int) -> list[Question]: ...

    def question(self, question_id: str) -> Question: ...


@dataclass(frozen=True)
class Plan:
    """The questions of one step.

    stored: the trajectories of each replayed question
    round: of rollouts in this step, from 0; questions that take the place of others are sampled in later ones
    rollouts_per_replayed: fresh rollouts of a replayed question; None: K−1
    given: by question id, how many tokens its rollouts are given of the first of its `stored` (`Prefix`)
    """

    step: int
    fresh: list[Question]
    replayed: list[Question]
    stored: dict[Question, list[Trajectory]]
    round: int = 0
    rollouts_per_replayed: int | None = None
    given: Mapping[str, int] = field(default_factory=dict)

    @property
    def questions(self) -> int:
        return len(self.fresh) + len(self.replayed)

    def rollout_counts(self, group_size: int) -> list[int]:
        """Rollouts of each question, fresh ones first."""
        per_replayed = group_size - 1 if self.rollouts_per_replayed is None else self.rollouts_per_replayed
        return [group_size] * len(self.fresh) + [per_replayed] * len(self.replayed)

    def given_to(self, question: Question) -> npt.NDArray[np.int32]:
        """int32 (G,), the first tokens of a question's rollouts; most are given none."""
        return self.stored[question][0].token_ids[:given] if (given := self.given.get(question.id)) else _NONE

    def metrics(self) -> dict[str, float]:
        """What was mixed."""
        return {
            "replay/actual_share": len(self.replayed) / self.questions if self.questions else 0.0,
            "train/questions": float(self.questions),
        }

    def in_order(self, groups: Iterable[RolloutGroup]) -> list[RolloutGroup]:
        """The groups of its questions, of which none is in it twice: fresh ones first, whatever order they come in."""
        place = {question.id: i for i, question in enumerate((*self.fresh, *self.replayed))}
        return sorted(groups, key=lambda group: place[group.question.id])


@dataclass(frozen=True)
class SelectedBatch:
    """What a step has sampled.

    plan: the questions of the batch; groups: the batch; all_groups: with the groups that were left out
    rounds: of rollouts; None where groups are never replaced
    """

    plan: Plan
    groups: list[CompletedGroup]
    all_groups: list[CompletedGroup]
    rounds: int | None

    def metrics(self) -> dict[str, float]:
        """Of all fresh rollouts of the step but those of continued groups, which were given something; they count where
        something went wrong: among those that were cut off and those that could not be graded. `lucky_guess_rate`:
        correct answers whose reasoning does not hold, left out where the reasoning of none was checked."""
        all_groups = [completed for completed in self.all_groups if not completed.group.given]
        rollouts = [rollout for completed in all_groups for rollout in completed.group.rollouts]
        sampled = [rollout for completed in self.all_groups for rollout in completed.group.rollouts]
        verdicts = [rollout.grade.verdict for rollout in sampled if rollout.grade is not None]
        grades = [rollout.grade for rollout in rollouts if rollout.grade is not None]
        gradable = [grade for grade in grades if grade.reward is not None]
        soundness = [grade.sound for grade in gradable if grade.correct and grade.sound is not None]
        metrics = {
            "reward/mean": mean([grade.reward for grade in gradable if grade.reward is not None]),
            "reward/pass_at_1": mean([grade.correct for grade in gradable]),
            "reward/no_answer_share": mean([grade.verdict == "no_answer" for grade in grades]),
            "reward/timeout_share": mean([verdict == "timeout" for verdict in verdicts]),
            "reward/error_share": mean([verdict == "error" for verdict in verdicts]),
            "rollout/response_tokens": mean([rollout.length for rollout in rollouts]),
            "rollout/truncated_share": mean([rollout.finish == "length" for rollout in sampled]),
        }
        if turns := [rollout.turns for rollout in rollouts if rollout.actions is not None]:
            metrics["rollout/turns"] = mean(turns)
            metrics["rollout/episode_tokens"] = mean([len(rollout.token_ids) for rollout in rollouts])
        if soundness:
            metrics["reward/lucky_guess_rate"] = soundness.count(False) / len(soundness)
        logs: dict[str, list[float]] = {}
        for name, value in (pair for grade in gradable for pair in grade.logs):
            logs.setdefault(f"reward_log/{name}", []).append(value)
        metrics |= {name: mean(values) for name, values in logs.items()}
        part_rewards = [[dict(rollout.parts) for rollout in completed.group.rollouts] for completed in all_groups]
        for name in dict.fromkeys(name for group in part_rewards for parts in group for name in parts):
            groups = [[parts[name] for parts in group if name in parts] for group in part_rewards]
            metrics[f"reward_part/{name}"] = mean([reward for group in groups for reward in group])
            metrics[f"reward_part/{name}_groups_with_signal"] = mean([not are_equal(group) for group in groups])
        if self.rounds is not None:
            metrics["rollout/rounds"] = float(self.rounds)
            metrics["rollout/filtered_groups"] = float(len(self.all_groups) - len(self.groups))
        return metrics


@dataclass(frozen=True)
class DynamicSampling:
    """A group whose rows all have the same reward is replaced by the group of a newly drawn question, a fresh one. The
    rows are those that would be trained on: the stored one counts, a rollout that gave way to it does not.

    max_rounds: further rounds of rollouts in a step, at most; 0: none, and the batch is what was planned
    min_reward, max_reward: range of mean rewards of a group's graded rows, inclusive; a group outside it is replaced
        too: training on questions of one difficulty alone
    masks: a group outside that range is not replaced: it stays in the batch, and no token of it is in the loss. The
        normaliser counts its rows. With the paper's levels as the range this is its Table 9. max_rounds is 0

    With max_rounds > 0 this differs from DAPO, which samples until the batch is full: when the rounds or the questions
    run out, the batch is filled up to its size with groups that were to be left out, those without a gradient before
    others. The normaliser counts them all. A group whose rewards are equal has no gradient then, of
    Verifier.overlong_share neither: DAPO would not have it in the batch.
    """

    max_rounds: Natural = 0
    min_reward: float | None = None
    max_reward: float | None = None
    masks: bool = False

    def __post_init__(self) -> None:
        check_settings(DynamicSampling, vars(self))
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
        self, plan: Plan, groups: Sequence[CompletedGroup], rounds: int, fresh: FreshSource, buffer: ReplayBuffer
    ) -> Plan | None:
        """Newly drawn questions in place of those without a signal, no question twice; None where sampling is done.

        groups: what the step has sampled so far; rounds: of rollouts so far
        """
        if rounds > self.max_rounds:
            return None
        missing = plan.questions - sum(self._rank(completed) == 0 for completed in groups)
        retired = buffer.retired if buffer.retirement.leaves_fresh else ()
        drawn = fresh.draw(missing, {completed.group.question.id for completed in groups}, retired, plan.step)
        return Plan(plan.step, drawn, [], {}, rounds) if drawn else None

    def select(self, plan: Plan, groups: list[CompletedGroup], rounds: int) -> SelectedBatch:
        """The batch: as many groups as were planned, those to be trained on before others."""
        counted = rounds if self.max_rounds else None
        if len(groups) == plan.questions:
            return SelectedBatch(plan, groups, groups, counted)
        best = {completed.group.question.id for completed in sorted(groups, key=self._rank)[: plan.questions]}
        batch = [completed for completed in groups if completed.group.question.id in best]
        of_batch = replace(
            plan,
            fresh=[completed.group.question for completed in batch if not completed.group.planned_replay],
            replayed=[completed.group.question for completed in batch if completed.group.planned_replay],
        )
        return SelectedBatch(of_batch, batch, groups, counted)

    def masked(self, batch: MixedBatch) -> MixedBatch:
        """The batch with the groups outside the range out of the loss, where `masks` is set. With max_rounds > 0, a
        group whose rewards are equal has no advantage, of the length penalty neither. Added rows stay as they are."""
        if not (self.masks or self.max_rounds):
            return batch
        groups = []
        for all_rows in batch.rows:
            rows, added = all_rows[: batch.group_size], all_rows[batch.group_size :]
            rewards = [row.response.reward for row in rows if row.response.reward is not None]
            if are_equal(rewards) if self.max_rounds else not self.in_range(rewards):
                rows = [replace(row, advantage=0.0, in_loss=row.in_loss and not self.masks) for row in rows]
            groups.append([*rows, *added])
        return replace(batch, rows=groups)

    def in_range(self, rewards: Sequence[float]) -> bool:
        """Whether the mean of these rewards lies between the bounds; of none it is 0."""
        low, high = self.min_reward, self.max_reward
        value = sum(rewards) / len(rewards) if rewards else 0.0
        return (low is None or value >= low) and (high is None or value <= high)

    def _rank(self, completed: CompletedGroup) -> int:
        """0: to be trained on; 1: all rewards are equal; 2: they are not, of a difficulty that is not asked for."""
        rewards = completed.rewards
        if are_equal(rewards):
            return 1
        return 0 if self.in_range(rewards) else 2
