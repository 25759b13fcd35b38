"""Which of a question's stored trajectories is replayed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from ..checks import Positive, check_settings, require
from ..records import Measured, Question, Trajectory


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
            require(len(options) > 0, f"question {question.id} has no stored trajectory to choose from")
            measured, place = scores.get(question, ()), 0
            if len(options) > 1 and self.by == "random":
                place = int(rng.integers(len(options)))
            elif len(options) > 1:
                values = self._scores(options, measured, accuracies.get(question.id, 1.0), step)
                require(
                    len(values) == len(options) and all(map(math.isfinite, values)),
                    f"question {question.id}: needs {len(options)} finite scores, one a trajectory, got {values}",
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
