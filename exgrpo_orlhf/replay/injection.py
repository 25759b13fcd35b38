"""Which stored trajectory of a question is chosen, and how it enters a group: one class for each way, bound as
`ReplayMixer.injection`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from ..checks import Count, Positive, check_settings, require
from ..records import Measured, Question, RolloutGroup, Trajectory
from .buffer import ReplayBuffer
from .sampling import IndexedSet


class Choice(NamedTuple):
    """Which of a question's stored trajectories is replayed. measured: of each, or empty where the choice needed no
    forward pass; place: of the chosen one among them"""

    stored: Sequence[Trajectory]
    measured: Sequence[Measured]
    place: int

    @property
    def trajectory(self) -> Trajectory:
        return self.stored[self.place]


@dataclass(frozen=True)
class TrajectorySelector:
    """Picks one stored trajectory per replayed question.

    by: the score:
        'entropy'     mean token entropy over exactly the response tokens under the *current* policy, temperature 1
        'perplexity'  exp(mean of −log π) of the response tokens under the current policy, sampling temperature
        'length'      response tokens
        'recency'     training step of the stored log-probs: 'highest' is the newest
        'random'      no score: each is as likely, whatever `prefer` says
        'priority'    |r − accuracy| · exp(−age/τ): how far its reward is from its question's latest accuracy, which is
                      its advantage beside such a group, and how many steps old its log-probs are; the highest, whatever
                      `prefer` says
    prefer: 'lowest' (the paper: o* = argmin of the entropy) or 'highest' score
    decay_steps: τ of 'priority'
    """

    by: Literal["entropy", "perplexity", "length", "recency", "random", "priority"] = "entropy"
    prefer: Literal["lowest", "highest"] = "lowest"
    decay_steps: Positive = 20.0

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown choice."""
        check_settings(TrajectorySelector, vars(self))
        require(
            self.by == "priority" or self.decay_steps == TrajectorySelector.decay_steps,
            f"TrajectorySelector.decay_steps is of TrajectorySelector.by = 'priority', not {self.by!r}",
        )

    def to_score(self, stored: Mapping[Question, Sequence[Trajectory]]) -> dict[Question, Sequence[Trajectory]]:
        """Those whose score takes a forward pass and can change the choice: of questions with several."""
        if self.by not in ("entropy", "perplexity"):
            return {}
        return {question: several for question, several in stored.items() if len(several) > 1}

    def choose(
        self,
        stored: Mapping[Question, Sequence[Trajectory]],
        scores: Mapping[Question, Sequence[Measured]],
        rng: np.random.Generator,
        accuracies: Mapping[str, float] = {},
        step: int = 0,
    ) -> dict[str, Choice]:
        """One trajectory per question id. scores: for each question of `to_score`, what was measured of each
        trajectory, in order. accuracies, step: for 'priority', the latest of each question, and the step under way; a
        question without one has been mastered since

        Equal scores are decided by the newer step, then by the token hash, so that the choice is the same on every
        machine. Raises ValueError unless each trajectory of a question that needs scores has one finite score.
        """
        chosen = {}
        for question, options in stored.items():
            if not options:
                raise ValueError(f"question {question.id} has no stored trajectory to choose from")
            measured, place = scores.get(question, ()), 0
            if len(options) > 1 and self.by == "random":
                place = int(rng.integers(len(options)))
            elif len(options) > 1:
                values = self._scores(options, measured, accuracies.get(question.id, 1.0), step)
                if len(values) != len(options) or not all(map(math.isfinite, values)):
                    raise ValueError(
                        f"question {question.id}: needs {len(options)} finite scores, one a trajectory, got {values}"
                    )
                sign = 1 if self.prefer == "lowest" and self.by != "priority" else -1
                place = min(range(len(options)), key=lambda i: (sign * values[i], -options[i].step, options[i].key))
            chosen[question.id] = Choice(options, measured, place)
        return chosen

    def _scores(
        self, stored: Sequence[Trajectory], measured: Sequence[Measured], accuracy: float, step: int
    ) -> list[float]:
        if self.by == "priority":
            return [
                abs(trajectory.reward - accuracy) * math.exp((trajectory.step - step) / self.decay_steps)
                for trajectory in stored
            ]
        if self.by == "length":
            return [trajectory.length for trajectory in stored]
        if self.by == "recency":
            return [trajectory.step for trajectory in stored]
        if self.by == "entropy":
            return [result.entropy for result in measured]
        return [float(np.exp(-result.logprobs.mean(dtype=np.float64))) for result in measured]


NEWEST = TrajectorySelector("recency", "highest")


@dataclass(frozen=True, repr=False)
class Injection:
    """A way of injecting. The mixer asks it three things, in this order:

    fresh_rollouts: before sampling, how many rollouts a question gets that was planned for replay
    late_stored: after grading, which other groups may get a stored trajectory, and of which ones; one of them is
        chosen by `late_selector`
    stored_for: which of the chosen trajectories becomes a row of a group (`RolloutGroup.with_stored`)

    plans: whether questions are planned for replay, ρ·B of a batch
    replaces: whether a stored trajectory takes a rollout's place as the better one, so that it must be a success
    always: whether every group that is planned gets its stored trajectory
    """

    plans: ClassVar[bool] = True
    replaces: ClassVar[bool] = False
    always: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_settings(type(self), vars(self))

    def __repr__(self) -> str:
        return f"@{type(self).__name__}()"  # as in a gin file

    @property
    def prefix(self) -> Any:
        """The `Prefix`, where planned groups continue a stored response instead of having it as a row; else None."""
        return None

    @property
    def added_rows(self) -> Any:
        """The `AddedRows`, where stored rows are added to whole groups of fresh rollouts; else None."""
        return None

    def candidates(self, buffer: ReplayBuffer) -> Mapping[Fraction, IndexedSet]:
        """What questions are drawn from for replay, by accuracy."""
        return buffer.candidates

    def stored_of(self, question_id: str, buffer: ReplayBuffer) -> list[Trajectory]:
        """Of a candidate: what may enter its group, oldest first; nothing where none is chosen beforehand."""
        return buffer.trajectories(question_id)

    @property
    def late_injection(self) -> LateInjection | None:
        """The one that acts on groups that were not planned; None: nothing enters them."""
        return None

    def fresh_rollouts(self, group_size: int) -> int:
        """Of a planned question, in [1, K]. Raises ValueError for a bound number that does not fit K."""
        return group_size

    def late_stored(self, groups: Iterable[RolloutGroup], buffer: ReplayBuffer) -> dict[Question, list[Trajectory]]:
        """groups: graded, of K rollouts, or planned. Returns what may enter by question, never an empty list."""
        return {}

    def late_selector(self, bound: TrajectorySelector) -> TrajectorySelector:
        """What chooses one of `late_stored`. bound: in the run's gin files"""
        return bound

    def stored_for(self, group: RolloutGroup, choices: Mapping[str, Choice]) -> Trajectory | None:
        """The stored trajectory that enters a graded group; None: its rollouts stay as they are.

        choices: by id, one of each planned question and of each of `late_stored`
        Raises KeyError for a planned group without one.
        """
        choice = choices[group.question.id] if group.planned_replay else choices.get(group.question.id)
        return None if choice is None else choice.trajectory

    def metrics(self, groups: Iterable[RolloutGroup], choices: Mapping[str, Choice]) -> dict[str, float]:
        """`injected`, where the rollouts decide which groups get a stored trajectory. As `stored_for`, of a batch."""
        if self.always and self.late_injection is None:
            return {}
        return {"replay/injected": float(sum(self.stored_for(group, choices) is not None for group in groups))}


@dataclass(frozen=True, repr=False)
class Beside(Injection):
    """A stored trajectory stands beside the fresh rollouts of its question, as the last row (the paper).

    rollouts: how many fresh ones, from 1 to K−1; None: K−1, a whole group (the paper). A known success needs fewer
        fresh rollouts around it for a signal than a question of which nothing is known, and what is not generated is
        saved. The question's accuracy is then that of fewer rollouts
    """

    rollouts: Count | None = None

    def fresh_rollouts(self, group_size: int) -> int:
        require(
            self.rollouts is None or self.rollouts < group_size,
            f"Beside.rollouts must lie in [1, train.group_size − 1] = [1, {group_size - 1}], or be None; got "
            f"{self.rollouts!r}",
        )
        return self.rollouts or group_size - 1


@dataclass(frozen=True, repr=False)
class InPlace(Injection):
    """All K rollouts of a planned question are generated, and after grading the stored success takes the place of the
    one with the lowest reward (`RolloutGroup.with_stored`); the accuracy is that of the K."""

    replaces = True


@dataclass(frozen=True, repr=False)
class LateInjection(Injection):
    """After grading, a group of fresh rollouts without a success (its accuracy is 0) gets a stored trajectory of its
    question, where the buffer has one, instead of a rollout (`RolloutGroup.with_stored`). Nothing more is generated,
    and no question gives way to a replayed one: ReplayMixer.rho is 0. The delayed start holds for it too.

    choice: 'newest': the one whose log-probs are the newest; 'selected': the one that `TrajectorySelector` chooses,
        which may have to be scored
    """

    choice: Literal["newest", "selected"] = "newest"

    plans = False
    replaces = True

    @property
    def late_injection(self) -> LateInjection:
        return self

    def late_stored(self, groups: Iterable[RolloutGroup], buffer: ReplayBuffer) -> dict[Question, list[Trajectory]]:
        others = [group for group in groups if not group.planned_replay]
        return {group.question: stored for group in others if (stored := buffer.for_injection(group))}

    def late_selector(self, bound: TrajectorySelector) -> TrajectorySelector:
        return NEWEST if self.choice == "newest" else bound


@dataclass(frozen=True, repr=False)
class UnlessSolved(Injection):
    """Planned revisits: all K rollouts of a planned question are generated, and only where none of them is a success
    does the stored one take a place.

    late: `@LateInjection()`: it does the same for the groups that were not planned; None: these stay as they are
    """

    late: LateInjection | None = None

    replaces = True
    always = False

    @property
    def late_injection(self) -> LateInjection | None:
        return self.late

    def late_stored(self, groups: Iterable[RolloutGroup], buffer: ReplayBuffer) -> dict[Question, list[Trajectory]]:
        return self.late.late_stored(groups, buffer) if self.late else {}

    def late_selector(self, bound: TrajectorySelector) -> TrajectorySelector:
        return self.late.late_selector(bound) if self.late else bound

    def stored_for(self, group: RolloutGroup, choices: Mapping[str, Choice]) -> Trajectory | None:
        return None if group.planned_replay and group.accuracy != 0 else super().stored_for(group, choices)
