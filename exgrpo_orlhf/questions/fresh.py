"""Fresh questions: epoch by epoch, in an order that a checkpoint can continue, or drawn by their latest accuracy.

What Prompt Replay (arXiv 2603.21177), VCRL (arXiv 2509.19803), GRESO (arXiv 2506.02177) and SPO (arXiv 2509.13232) have
in common: a question whose answers were all right or all wrong gives no gradient, so questions with an accuracy between
are asked more often, the others now and then, and none twice in a short time.
"""

from __future__ import annotations

import base64
import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..checks import Natural, Positive, check_settings, require
from ..records import Question, RolloutGroup
from . import fingerprint

log = logging.getLogger(__name__)
_REST = 1e6  # above the logarithm of any weight with its noise


@dataclass(frozen=True)
class FreshSampler:
    """How fresh questions are drawn.

    by: 'epoch': every question once, then again in another order. 'accuracy': each batch anew, without repetition, with
        weights p(1−p) + floor, where p is the question's latest accuracy over its fresh rollouts; a question without
        one yet counts as p = 1/2
    floor: above 0, so that a question that was always or never solved is asked again
    cooldown: steps for which a question rests after one in which it was asked. If too few others are left, those that
        have rested longest come
    """

    by: Literal["epoch", "accuracy"] = "epoch"
    floor: Positive = 0.05
    cooldown: Natural = 0

    def __post_init__(self) -> None:
        check_settings(FreshSampler, vars(self))
        require(
            self.by == "accuracy" or self.cooldown == 0,
            f"FreshSampler.cooldown belongs to FreshSampler.by = 'accuracy', got {self.cooldown!r} with {self.by!r}",
        )

    def over(self, questions: Sequence[Question], rng: np.random.Generator) -> FreshQuestions:
        """The source of fresh questions. Raises ValueError for an empty set or an id that occurs twice."""
        if self.by == "epoch":
            return FreshQuestions(questions, rng)
        return WeightedQuestions(questions, rng, self.floor, self.cooldown)


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

    def fill(self, n: int, exclude: Collection[str], step: int) -> list[Question]:
        """n questions more, retired ones too, for a batch that must be whole. The epoch, which leaves these out, stays
        as it is."""
        order = self._rng.permutation(len(self)).tolist()
        questions = [self._questions[place] for place in order if self._questions[place].id not in exclude][:n]
        self.drawn += len(questions)
        return questions

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
                f"{self._fingerprint}): its cursor of consumed questions would point to other ones; "
                "bring them back, or begin a new run with its weights: --from CHECKPOINT"
            )


class WeightedQuestions(FreshQuestions):
    """Draws questions by their latest accuracy (`FreshSampler`). The epoch is the number of draws over that of
    questions, rounded down."""

    def __init__(self, questions: Sequence[Question], rng: np.random.Generator, floor: float, cooldown: int) -> None:
        super().__init__(questions, rng)
        self._place = {question.id: i for i, question in enumerate(questions)}
        self._floor, self._cooldown = floor, cooldown
        self._accuracy = np.full(len(questions), np.nan, np.float16)  # (Q,) the latest; NaN: not known yet
        self._resting: dict[int, int] = {}  # place → the last step of its rest

    def draw(self, n: int, exclude: Collection[str], retired: Collection[str], step: int) -> list[Question]:
        """n questions for that step, no two the same and none of `exclude` or `retired`; fewer if the set has no more.

        Retired questions return where all are. The rest of a question begins when it is drawn: with
        train.generate_ahead the next step's are drawn before this step's are observed.
        """
        # Gumbel noise on the logarithms: the n largest are a draw without replacement in proportion to the weights.
        p = np.where(np.isnan(self._accuracy), 0.5, self._accuracy.astype(np.float64))  # (Q,)
        keys = np.log(p * (1 - p) + self._floor) + self._rng.gumbel(size=len(p))
        if self._resting:
            places, until = (np.fromiter(x, np.int64) for x in (self._resting.keys(), self._resting.values()))
            keys[places] -= _REST * np.maximum(until - step + 1, 0)
        if retired and len(retired) >= len(self) and all(question in retired for question in self._place):
            self._warn_that_all_are_retired(f"step {step}")
            retired = ()
        out = [self._place[question] for group in (exclude, retired) for question in group if question in self._place]
        keys[out] = -np.inf
        n = min(n, int(np.isfinite(keys).sum()))
        first = np.argpartition(-keys, n - 1)[:n] if n else np.zeros(0, np.int64)
        positions = first[np.argsort(-keys[first], kind="stable")].tolist()
        self.drawn += len(positions)
        self.epoch = self.drawn // len(self)
        self._rest(positions, step)
        return [self._questions[place] for place in positions]

    def fill(self, n: int, exclude: Collection[str], step: int) -> list[Question]:
        return self.draw(n, exclude, (), step)

    def observe(self, groups: Sequence[RolloutGroup], step: int) -> None:
        """Take note of a step's accuracies. A group in which too little could be graded leaves the last one, and so
        does one that was given its beginning."""
        places = [self._place[group.question.id] for group in groups]
        for place, group in zip(places, groups, strict=True):
            if group.accuracy is not None and not group.given:
                self._accuracy[place] = float(group.accuracy)
        self._rest(places, step)  # replayed questions too
        self._resting = {place: until for place, until in self._resting.items() if until > step}

    def _rest(self, places: Sequence[int], step: int) -> None:
        if self._cooldown:
            self._resting |= {place: max(step + self._cooldown, self._resting.get(place, 0)) for place in places}

    def metrics(self) -> dict[str, float]:
        between = (self._accuracy > 0) & (self._accuracy < 1)  # NaN is neither
        shares = {"known": ~np.isnan(self._accuracy), "between": between}
        return super().metrics() | {f"train/fresh_{name}": float(share.mean()) for name, share in shares.items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "fingerprint": self._fingerprint,
            "accuracy": base64.b64encode(self._accuracy.astype("<f2").tobytes()).decode("ascii"),  # 2 bytes each
            "resting": [[place, until] for place, until in self._resting.items()],
            "drawn": self.drawn,
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if the state belongs to another question set, KeyError for a missing or unknown entry."""
        self._check(state)
        self._accuracy = np.frombuffer(base64.b64decode(state["accuracy"]), "<f2").astype(np.float16)
        self._resting = {place: until for place, until in state["resting"]}
        self.drawn = state["drawn"]
        self.epoch = self.drawn // len(self)
        self._rng.bit_generator.state = state["rng"]
