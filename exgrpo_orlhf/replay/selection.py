"""Which of a question's stored trajectories is replayed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from ..records import Trajectory

PolicyScore = Literal["entropy", "perplexity"]  # takes a forward pass of the current policy
By = Literal[PolicyScore, "length", "recency", "random"]


class TrajectorySelector:
    """Picks one stored trajectory per replayed question.

    by: the score:
        'entropy'     mean token entropy over exactly the response tokens under the *current* policy, temperature 1
        'perplexity'  exp(mean of −log π) of the response tokens under the current policy, sampling temperature
        'length'      response tokens
        'recency'     training step of the stored log-probs: 'highest' is the newest
        'random'      no score: each is as likely, whatever `prefer` says
    prefer: 'lowest' (the paper: o* = argmin of the entropy) or 'highest' score
    """

    def __init__(
        self,
        by: By = "entropy",
        prefer: Literal["lowest", "highest"] = "lowest",
    ) -> None:
        """Raises ValueError for an unknown choice."""
        if by not in get_args(By):
            raise ValueError(f"TrajectorySelector.by must be one of {', '.join(map(repr, get_args(By)))}; got {by!r}")
        if prefer not in ("lowest", "highest"):
            raise ValueError(f"TrajectorySelector.prefer must be 'lowest' or 'highest', got {prefer!r}")
        self.by, self.prefer = by, prefer

    @property
    def needs_policy(self) -> bool:
        """Whether the score takes a forward pass of the current policy."""
        return self.by in get_args(PolicyScore)

    def to_score(self, candidates: Mapping[str, Sequence[Trajectory]]) -> dict[str, Sequence[Trajectory]]:
        """The candidates whose score takes a forward pass and can change the choice: none that stand alone."""
        if not self.needs_policy:
            return {}
        return {question_id: stored for question_id, stored in candidates.items() if len(stored) > 1}

    def choose(
        self,
        candidates: Mapping[str, Sequence[Trajectory]],
        scores: Mapping[str, Sequence[float]],
        rng: np.random.Generator,
    ) -> dict[str, Trajectory]:
        """One trajectory per question id. scores: for each question of `to_score`, a score per trajectory, in order.

        Equal scores are decided by the newer step, then by the token hash, so that the choice is the same on every
        machine. Raises ValueError unless each trajectory of a question that needs scores has one finite score.
        """
        chosen = {}
        for question_id, stored in candidates.items():
            if not stored:
                raise ValueError(f"question {question_id} has no stored trajectory to choose from")
            if len(stored) == 1:
                chosen[question_id] = stored[0]
            elif self.by == "random":
                chosen[question_id] = stored[int(rng.integers(len(stored)))]
            elif self.by == "length":
                chosen[question_id] = self.best(question_id, stored, [len(trajectory) for trajectory in stored])
            elif self.by == "recency":
                chosen[question_id] = self.best(question_id, stored, [trajectory.step for trajectory in stored])
            else:
                chosen[question_id] = self.best(question_id, stored, scores.get(question_id, ()))
        return chosen

    def score(self, entropy: float, logprobs: npt.NDArray[np.float32]) -> float:
        """The score of a trajectory that a forward pass has just gone through, where the score is one of those.

        entropy: mean over the response tokens; logprobs (T,): of the response tokens
        """
        return float(np.exp(-logprobs.mean(dtype=np.float64))) if self.by == "perplexity" else entropy

    def rank(self, trajectory: Trajectory, score: float) -> tuple[float, int, bytes]:
        """Sorts trajectories, the one to choose first."""
        return (score if self.prefer == "lowest" else -score, -trajectory.step, trajectory.key)

    def best(self, question_id: str, stored: Sequence[Trajectory], scores: Sequence[float]) -> Trajectory:
        """The trajectory of the question to replay, by a finite score for each. Raises ValueError otherwise."""
        if len(scores) != len(stored) or not all(map(math.isfinite, scores)):
            raise ValueError(
                f"question {question_id}: needs {len(stored)} finite scores, one a trajectory, got {list(scores)}"
            )
        return min(zip(stored, scores, strict=True), key=lambda pair: self.rank(*pair))[0]
