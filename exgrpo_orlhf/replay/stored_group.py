"""Stored rows that are added to whole groups of fresh rollouts: a second group of the same question."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from ..checks import Count, require
from ..records import MixedBatch, Question, RolloutGroup, Row, Trajectory, mean
from .buffer import ReplayBuffer
from .injection import Choice, Injection

Drawn = Sequence[tuple[str, Trajectory]]  # rows by the id of their question
Relative = Callable[[Sequence[Sequence[Trajectory]], int], Any]  # groups of at most this many rows → (G, rows)


@dataclass(frozen=True, repr=False)
class AddedRows(Injection, ABC):
    """Stored rows are added behind the K fresh rollouts of a group, which keep their accuracy and their advantages.

    rows: at most this many are added to a group; with fewer, the loss's divisor counts this many
    """

    rows: Count = 8

    always: ClassVar[bool] = False
    keeps_advantages: ClassVar[bool] = False  # with what is stored

    @property
    def added_rows(self) -> AddedRows:
        return self

    def check(self, buffer: ReplayBuffer, stores_failures: bool) -> None:
        """Raises ValueError for a buffer or a store rule (whether it stores failures) that has not what is drawn."""

    def check_stored(self, stored: Iterable[Trajectory], where: str) -> None:
        """Raises ValueError for what another run has stored and this one cannot use. where: for the message"""

    @abstractmethod
    def draw(
        self, groups: Sequence[RolloutGroup], buffer: ReplayBuffer, step: int, rng: np.random.Generator
    ) -> list[Drawn]:
        """Of each graded group of a batch, the rows that are added. The step's own rollouts are not stored yet."""

    @abstractmethod
    def advantages(self, rows: Sequence[Sequence[Trajectory]], relative: Relative) -> Any:
        """(G, rows) of the rows that are added to each group. relative: advantages of each group by itself"""

    def joined(
        self,
        batch: MixedBatch,
        stored_rows: Sequence[Sequence[tuple[Question, Trajectory]]],
        relative: Relative,
        encode: Callable[[Question], Sequence[int]],
    ) -> MixedBatch:
        """The batch with the stored rows drawn for each of its groups. encode: as in `ReplayMixer.assemble`"""
        values = self.advantages([[trajectory for _, trajectory in rows] for rows in stored_rows], relative)
        rows = [
            [
                *fresh,
                *(
                    Row(question, trajectory, float(value), True, encode(question))
                    for (question, trajectory), value in zip(added, of_group, strict=False)
                ),
            ]
            for fresh, added, of_group in zip(batch.rows, stored_rows, values, strict=True)
        ]
        return replace(batch, rows=rows, added_size=self.rows)

    def stored_of(self, question_id: str, buffer: ReplayBuffer) -> list[Trajectory]:
        return []  # none of a planned question is chosen before its group is graded

    def stored_for(self, group: RolloutGroup, choices: Mapping[str, Choice]) -> None:
        """None: no stored row takes the place of a rollout."""

    def metrics(self, groups: Iterable[RolloutGroup], choices: Mapping[str, Choice]) -> dict[str, float]:
        return {}  # of a batch: `batch_metrics`

    def batch_metrics(self, batch: MixedBatch) -> dict[str, float]:
        """How many rows were added, and which groups have as many as are asked for."""
        added = [rows[batch.group_size :] for rows in batch.rows]
        return {
            "replay/added_rows": float(sum(map(len, added))),
            "replay/added_whole": mean([len(rows) == self.rows for rows in added]),
            "replay/added_with_signal": mean([row.advantage != 0 for rows in added for row in rows]),
        }


@dataclass(frozen=True, repr=False)
class StoredGroup(AddedRows):
    """Old outputs of a question are a second group beside its K fresh rollouts, with advantages of their own (RePO,
    arXiv 2506.09340).

    Every group of the batch gets one whose question has enough stored, whether it was drawn for replay
    (`ReplayMixer.rho`; 0 in RePO) or not. Rewards and advantages are as of a fresh group; the ratio of a token is to
    the policy that sampled it, and with `MixedPolicyLoss.clips_replayed` it is clipped as a fresh one.

    rows: of a stored group, at most
    choice: of a question's stored outputs the 'newest'; the 'best', of the largest rewards; the 'spread', of the
        largest variance of rewards; or 'all'. Of equal ones the newer
    least: outputs that must be stored of a question
    """

    choice: Literal["all", "newest", "best", "spread"] = "newest"
    least: Count = 16

    def check(self, buffer: ReplayBuffer, stores_failures: bool) -> None:
        kept = buffer.per_question
        require(
            stores_failures,
            "ReplayMixer.injection = @StoredGroup() needs failures too, as ReplayMixer.store_rule = @AllFinished() "
            "stores them: of successes alone all rewards are equal and all advantages 0",
        )
        require(self.rows > 1, f"StoredGroup.rows must be at least 2: one row has the advantage 0; got {self.rows}")
        require(
            kept is None or kept >= self.least,
            f"StoredGroup.least = {self.least} is never reached with ReplayBuffer.per_question = {kept}",
        )
        require(
            self.choice != "all" or (kept is not None and kept <= self.rows),
            f"StoredGroup.choice = 'all' needs StoredGroup.rows, got {self.rows}, of at least "
            f"ReplayBuffer.per_question, got {kept}",
        )

    def draw(
        self, groups: Sequence[RolloutGroup], buffer: ReplayBuffer, step: int, rng: np.random.Generator
    ) -> list[Drawn]:
        records = [buffer.records.get(group.question.id) for group in groups]
        stored = [[entry.trajectory for entry in record.stored] if record else [] for record in records]
        return [
            [(group.question.id, chosen) for chosen in self.chosen(outputs)] if len(outputs) >= self.least else []
            for group, outputs in zip(groups, stored, strict=True)
        ]

    def chosen(self, stored: Sequence[Trajectory]) -> list[Trajectory]:
        """A question's stored outputs, oldest first → those that are replayed, in the same order."""
        n = min(self.rows, len(stored))
        order = range(len(stored))
        if self.choice in ("all", "newest"):
            return [*stored[len(stored) - n :]]
        by_reward = sorted(order, key=lambda i: (-stored[i].reward, -i))
        if self.choice == "best":
            return [stored[i] for i in sorted(by_reward[:n])]
        # The variance is convex in each reward: its largest subset is some of the largest and some of the smallest.
        lowest = sorted(order, key=lambda i: (stored[i].reward, -i))
        subsets = [by_reward[:high] + lowest[: n - high] for high in range(n, -1, -1)]
        rewards = [np.array([stored[i].reward for i in subset]) for subset in subsets]
        best = max(range(n + 1), key=lambda s: (round(float(rewards[s].var()), 12), float(rewards[s].sum()), -s))
        return [stored[i] for i in sorted(subsets[best])]

    def advantages(self, rows: Sequence[Sequence[Trajectory]], relative: Relative) -> Any:
        return relative(rows, self.rows)
