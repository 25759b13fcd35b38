"""Which stored trajectories are scored again, and which scores of earlier steps are good enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..records import Trajectory
from .selection import TrajectorySelector


@dataclass(frozen=True)
class ScoreRequest:
    """What has to be scored in this step.

    candidates: of each question whose choice needs scores, its stored trajectories
    positions: which of them go through a forward pass now
    checked: questions of which all do, to see what reuse would have chosen
    """

    candidates: Mapping[str, Sequence[Trajectory]]
    positions: dict[str, list[int]]
    checked: frozenset[str]

    @property
    def trajectories(self) -> dict[str, Sequence[Trajectory]]:
        """What the engine is asked to score."""
        return {
            question_id: [self.candidates[question_id][i] for i in positions]
            for question_id, positions in self.positions.items()
            if positions
        }


class ScoreReuse:
    """Saves forward passes of candidate trajectories.

    Scores are measured in every step when `max_age` is None, as the method says. Otherwise a trajectory keeps the score
    of the pass in which it was last seen (its own update is one, so a new trajectory has one), and that is reused while
    it is not older than `max_age` steps; of the reused ones the `refresh` best of each question are measured again.

    max_age: steps
    refresh: trajectories per question
    check_share: share of the questions that are scored in full all the same; on them the metric counts how often reuse
        would have chosen another trajectory
    """

    def __init__(self, max_age: int | None = None, refresh: int = 1, check_share: float = 0.05) -> None:
        """Raises ValueError for a value out of range."""
        if max_age is not None and max_age < 1:
            raise ValueError(f"ScoreReuse.max_age must be at least 1 step, or None for no reuse; got {max_age!r}")
        if refresh < 0:
            raise ValueError(f"ScoreReuse.refresh must be at least 0, got {refresh!r}")
        if not 0 <= check_share <= 1:
            raise ValueError(f"ScoreReuse.check_share must lie in [0, 1], got {check_share!r}")
        self.max_age, self.refresh, self.check_share = max_age, refresh, check_share

    def request(
        self,
        candidates: Mapping[str, Sequence[Trajectory]],
        selector: TrajectorySelector,
        step: int,
        rng: np.random.Generator,
    ) -> ScoreRequest:
        """candidates: `TrajectorySelector.to_score` of the step's candidates"""
        if self.max_age is None:
            return ScoreRequest(
                candidates, {q: list(range(len(stored))) for q, stored in candidates.items()}, frozenset()
            )
        draws = rng.random(len(candidates)) < self.check_share
        checked = frozenset(question_id for question_id, check in zip(candidates, draws, strict=True) if check)
        positions = {}
        for question_id, stored in candidates.items():
            if question_id in checked:
                positions[question_id] = list(range(len(stored)))
            else:
                positions[question_id] = self._to_measure(stored, selector, step)
        return ScoreRequest(candidates, positions, checked)

    def complete(
        self, request: ScoreRequest, measured: Mapping[str, Sequence[float]], selector: TrajectorySelector, step: int
    ) -> tuple[dict[str, list[float]], dict[str, float]]:
        """Scores of all candidates, measured now or earlier, and the step's metrics of scoring."""
        scores: dict[str, list[float]] = {}
        differs = total = 0
        for question_id, stored in request.candidates.items():
            now = dict(zip(request.positions[question_id], measured.get(question_id, ()), strict=True))
            scores[question_id] = [now[i] if i in now else _known(stored[i]) for i in range(len(stored))]
            total += len(stored)
            if question_id in request.checked:
                partly = set(self._to_measure(stored, selector, step))
                reused = [now[i] if i in partly else _known(stored[i]) for i in range(len(stored))]
                differs += selector.best(question_id, stored, reused) is not selector.best(
                    question_id, stored, scores[question_id]
                )
        done = sum(map(len, request.positions.values()))
        return scores, {
            "replay/candidates_scored": float(done),
            "replay/candidates_reused": float(total - done),
            "replay/choices_checked": float(len(request.checked)),
            "replay/choices_differing": float(differs),
        }

    def _to_measure(self, stored: Sequence[Trajectory], selector: TrajectorySelector, step: int) -> list[int]:
        assert self.max_age is not None
        reusable = [i for i, t in enumerate(stored) if t.score is not None and step - t.scored_step <= self.max_age]
        best = sorted(reusable, key=lambda i: selector.rank(stored[i], _known(stored[i])))[: self.refresh]
        return sorted({*range(len(stored))} - {*reusable} | {*best})


def _known(trajectory: Trajectory) -> float:
    if trajectory.score is None:
        raise ValueError("a trajectory without a score has to be measured")
    return trajectory.score
