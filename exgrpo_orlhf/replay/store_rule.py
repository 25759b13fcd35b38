"""Which of a step's fresh rollouts become experience: one class for each rule, bound as `ReplayMixer.store_rule`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ..checks import PositiveShare, check_settings, require
from ..records import MixedBatch, Rollout, RolloutGroup, Trajectory
from ..rounding import are_equal
from .buffer import ReplayBuffer
from .difficulty import as_fraction, is_above_mean
from .injection import Injection

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, repr=False)
class StoreRule:
    """A rule says which groups are looked at, and which graded rollouts of them are stored; those that did not finish
    never are.

    stores_failures: whether it may store a rollout that is no success
    """

    stores_failures: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_settings(type(self), vars(self))

    def __repr__(self) -> str:
        return f"@{type(self).__name__}()"  # as in a gin file

    def admits(self, group: RolloutGroup) -> bool:
        """Of a group enough of whose rollouts could be graded."""
        return True

    def stores(self, rollout: Rollout, group: RolloutGroup) -> bool:
        """rollout: finished and graded, of this group, which is admitted"""
        return rollout.grade is not None and rollout.grade.correct

    def check(self, buffer: ReplayBuffer, injection: Injection) -> None:
        """Raises ValueError for a buffer or an injection that cannot obey what is stored."""

    def experience(
        self, batch: MixedBatch, logprobs: Sequence[Floats], step: int, keeps_advantages: bool = False
    ) -> list[tuple[str, Trajectory]]:
        """The step's new experience: finished fresh rollouts with the log-probs measured in this step.

        logprobs: of the policies that sampled them, per row of the flattened batch, float32 (A,)
        Raises ValueError for another number of log-probs than rows.
        """
        return finished(batch, logprobs, step, self.stores, self.admits, keeps_advantages)


def finished(
    batch: MixedBatch,
    logprobs: Sequence[Floats],
    step: int,
    stores: Callable[[Rollout, RolloutGroup], bool],
    admits: Callable[[RolloutGroup], bool] = lambda group: True,
    keeps_advantages: bool = False,
) -> list[tuple[str, Trajectory]]:
    """A step's finished rollouts that are stored, of groups that are admitted, as `StoreRule.experience` returns them.
    Of a continued group none is: its policy did not begin the response."""
    groups = (group for group in batch.groups if not group.given and group.accuracy is not None)
    graded = {group.question.id: group for group in groups if admits(group)}
    experience = []
    for row, behaviour in zip(batch.flat_rows(), logprobs, strict=True):
        rollout, group = row.response, graded.get(row.question.id)
        if isinstance(rollout, Trajectory) or group is None or rollout.finish != "stop":
            continue
        grade = rollout.grade
        if grade is None or grade.reward is None or not stores(rollout, group):
            continue
        trajectory = Trajectory(
            rollout.token_ids,
            behaviour,
            grade.reward,
            step if rollout.policy_step is None else rollout.policy_step,
            "stop",
            grade.sound if grade.correct else None,
            rollout.actions,
            rollout.seed,
            grade.parts,
            grade.correct,
            row.advantage if keeps_advantages else None,
        )
        experience.append((row.question.id, trajectory))
    return experience


def is_failure(rollout: Rollout, group: RolloutGroup) -> bool:
    return rollout.grade is not None and not rollout.grade.correct


@dataclass(frozen=True, repr=False)
class Successes(StoreRule):
    """Successes are stored (the paper).

    up_to: only those of groups whose accuracy, over their graded fresh rollouts, is at most this, in (0, 1]; None: of
        every group (the paper). What is stored stays when its question is solved more often later
    """

    up_to: PositiveShare | None = None

    def admits(self, group: RolloutGroup) -> bool:
        assert group.accuracy is not None
        return self.up_to is None or group.accuracy <= as_fraction(self.up_to)


@dataclass(frozen=True, repr=False)
class OneSuccess(StoreRule):
    """The success of a group with exactly one is stored, whatever K is (SU-01, arXiv 2605.13301)."""

    def admits(self, group: RolloutGroup) -> bool:
        return group.correct == 1


@dataclass(frozen=True, repr=False)
class AboveMean(StoreRule):
    """Fresh rollouts whose reward is above the mean of their group's fresh rollouts are stored, where rewards lie
    between 0 and 1."""

    stores_failures = True

    def stores(self, rollout: Rollout, group: RolloutGroup) -> bool:
        return rollout.reward is not None and is_above_mean(rollout.reward, group)

    def check(self, buffer: ReplayBuffer, injection: Injection) -> None:
        require(
            not (buffer.counts_stored or (injection.replaces and not buffer.by_spread)),
            f"ReplayMixer.store_rule = {self} stores failures too, which ReplayBuffer.counts_stored would count as "
            f"successes; and without ReplayBuffer.difficulty = 'reward_spread', ReplayMixer.injection = {injection} "
            "would put them where a success belongs",
        )


@dataclass(frozen=True, repr=False)
class AllFinished(StoreRule):
    """All that finished is stored, failures too (RePO, arXiv 2506.09340)."""

    stores_failures = True

    def stores(self, rollout: Rollout, group: RolloutGroup) -> bool:
        return True

    def check(self, buffer: ReplayBuffer, injection: Injection) -> None:
        require(
            not injection.replaces,
            f"ReplayMixer.store_rule = {self} stores failures, which ReplayMixer.injection = {injection} would put "
            "where a success belongs",
        )
        bounded = buffer.per_question is not None or buffer.max_bytes is not None
        require(
            bounded and not buffer.counts_stored and not buffer.by_spread,
            f"ReplayMixer.store_rule = {self} needs ReplayBuffer.per_question or .max_bytes, because failures are "
            "many, and neither .counts_stored, which takes what is stored for a success, nor .difficulty = "
            "'reward_spread', by which only what is above the mean stays",
        )


@dataclass(frozen=True, repr=False)
class WithSignal(AllFinished):
    """All that finished of groups whose rewards differ is stored (Advantage-PER, arXiv 2606.04560)."""

    def admits(self, group: RolloutGroup) -> bool:
        return not are_equal(group.rewards)
