"""What a step is made of: fresh questions, and replayed ones with what is stored of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..records import Question, RolloutGroup, Trajectory

_NONE = np.empty(0, np.int32)


class FreshSource(Protocol):
    """Where fresh questions come from, and every question by its id."""

    def draw(self, n: int, exclude: Collection[str], retired: Collection[str], step: int) -> list[Question]: ...

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
