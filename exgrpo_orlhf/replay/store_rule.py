"""Which of a step's fresh rollouts become experience."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..checks import require
from ..records import MixedBatch, RolloutGroup, Trajectory
from ..rounding import less_rounding
from .difficulty import as_fraction

Floats = npt.NDArray[np.float32]


class StoreRule:
    """Settings as in `ReplayMixer`."""

    def __init__(
        self,
        store_up_to: float | Literal["one_success"] | None,
        stores: Literal["successes", "above_mean", "all"],
    ) -> None:
        """Raises ValueError for store_up_to outside (0, 1]."""
        require(
            store_up_to in (None, "one_success") or (not isinstance(store_up_to, str) and 0 < store_up_to <= 1),
            "ReplayMixer.store_up_to must be an accuracy in (0, 1], 'one_success' (groups with exactly one success) or "
            f"None; got {store_up_to!r}",
        )
        self.up_to = store_up_to if isinstance(store_up_to, str | None) else as_fraction(store_up_to)
        self.stores = stores

    def experience(self, batch: MixedBatch, logprobs: Sequence[Floats], step: int) -> list[tuple[str, Trajectory]]:
        """The step's new experience: correct (or as `stores` says), finished fresh rollouts with the log-probs measured
        in this step, of groups that `store_up_to` admits.

        logprobs: of the policies that sampled them, per row of the flattened batch, float32 (A,)
        Raises ValueError for another number of log-probs than rows.
        """
        admitted = {group.question.id: group for group in batch.groups if self._admits(group)}
        experience = []
        for row, behaviour in zip(batch.flat_rows(), logprobs, strict=True):
            rollout = row.response
            if isinstance(rollout, Trajectory) or row.question.id not in admitted:
                continue
            grade = rollout.grade
            if grade is None or grade.reward is None:
                continue
            if self.stores == "above_mean" and less_rounding(grade.reward) <= admitted[row.question.id].mean_reward:
                continue
            if self.stores == "successes" and not grade.correct:
                continue
            if rollout.finish == "stop":
                version = step if rollout.policy_step is None else rollout.policy_step
                ids, sound = rollout.token_ids, grade.sound if grade.correct or self.stores != "all" else None
                episode = rollout.actions, rollout.seed
                trajectory = Trajectory(ids, behaviour, grade.reward, version, "stop", sound, *episode, grade.parts)
                experience.append((row.question.id, trajectory))
        return experience

    def _admits(self, group: RolloutGroup) -> bool:
        """Whether a group's successes are stored; never where too few of its rollouts could be graded."""
        if group.accuracy is None or self.up_to is None:
            return group.accuracy is not None
        if isinstance(self.up_to, str):
            return group.correct == 1
        return group.accuracy <= self.up_to
