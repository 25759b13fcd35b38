"""Fresh questions: endless epochs over the question set, in an order that a checkpoint can continue."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..records import Question, RolloutGroup
from . import fingerprint

log = logging.getLogger(__name__)


class FreshQuestions:
    """Draws questions epoch by epoch, each epoch in an order of its own from one seeded generator."""

    def __init__(self, questions: Sequence[Question], rng: np.random.Generator) -> None:
        """Raises ValueError for an empty set or an id that occurs twice."""
        if not questions:
            raise ValueError("the question set is empty: there is nothing to train on")
        self._questions = list(questions)
        self._by_id = {question.id: question for question in questions}
        if len(self._by_id) < len(questions):
            raise ValueError("the question set holds the same question twice")
        self._fingerprint = fingerprint(questions)
        self._rng = rng
        self._queue: deque[int] = deque()  # positions in the question set, still to come in this epoch
        self.epoch = -1
        self.drawn = 0

    def __len__(self) -> int:
        return len(self._questions)

    def question(self, question_id: str) -> Question:
        """Raises KeyError for a question that is not in the set."""
        return self._by_id[question_id]

    def draw(self, n: int, exclude: Collection[str], retired: Collection[str], step: int) -> list[Question]:
        """The next n questions for that step, no two the same and none of `exclude`; fewer if the set has no more.

        An excluded question (it is replayed in this batch) is not lost: it stays at the head of the queue. Questions
        in `retired` are left out of the epochs that begin from now on.
        """
        questions: dict[str, Question] = {}
        positions: list[int] = []
        epoch_begun = False
        while len(questions) < n:
            if not self._queue and not epoch_begun:
                self._begin_epoch(retired, waiting=set(positions))
                epoch_begun = True
            if not self._queue:  # every question has been looked at: the rest of this batch would be repetitions
                break
            position = self._queue.popleft()
            question = self._questions[position]
            if question.id in exclude or question.id in questions:
                positions.append(position)
            else:
                questions[question.id] = question
        self._queue.extendleft(reversed(positions))
        self.drawn += len(questions)
        return list(questions.values())

    def _begin_epoch(self, retired: Collection[str], waiting: set[int]) -> None:
        """waiting: positions left over from the last epoch; they come once in this one, not twice."""
        order = self._rng.permutation(len(self._questions)).tolist()
        active_positions = [position for position in order if self._questions[position].id not in retired]
        if not active_positions:
            self._warn_that_all_are_retired(f"epoch {self.epoch + 1}")
        queued = [position for position in active_positions or order if position not in waiting]
        self.epoch += bool(queued)  # where all are excluded there is nothing to go through
        self._queue.extend(queued)

    def _warn_that_all_are_retired(self, when: str) -> None:
        log.warning(
            "%s: all %d questions are retired from fresh sampling; they return to it, or the run would end here "
            "(RetirementPolicy.leaves_fresh)",
            *(when, len(self)),
        )

    def observe(self, groups: Sequence[RolloutGroup], step: int) -> None:
        """Nothing: the order of an epoch does not depend on what was sampled."""

    def metrics(self) -> dict[str, float]:
        return {"train/epoch": float(self.epoch), "train/fresh_drawn": float(self.drawn)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "fingerprint": self._fingerprint,
            "queue": list(self._queue),
            "epoch": self.epoch,
            "drawn": self.drawn,
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if the state belongs to another question set, KeyError for a missing or unknown entry."""
        self._check(state)
        self._queue = deque(state["queue"])
        self.epoch, self.drawn = state["epoch"], state["drawn"]
        self._rng.bit_generator.state = state["rng"]

    def _check(self, state: Mapping[str, Any]) -> None:
        if set(state) != set(self.state_dict()):
            raise KeyError(f"the state of fresh questions has other entries than expected: {sorted(state)}")
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(
                f"the checkpoint was made with another question set (fingerprint {state['fingerprint']}, now "
                f"{self._fingerprint}): its cursor of consumed questions would point to other ones"
            )
