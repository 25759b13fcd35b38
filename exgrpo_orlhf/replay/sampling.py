"""Which stored questions are replayed: a Gaussian over difficulty, or uniform."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Literal

import numpy as np

from .buffer import IndexedSet
from .difficulty import LEVELS, DifficultyBuckets


class QuestionSampler:
    """Draws distinct questions from the buffer's candidates.

    Candidates are partitioned into buckets, one per exact accuracy (`partition='accuracy'`, what runs in practice) or
    one per difficulty level (`partition='level'`, the paper's three). A bucket at x has the density N(x; mu, sigma); a
    level lies at the mean accuracy of its candidates when the draw begins.

    method: 'gaussian', or 'uniform' (the density is the same everywhere: the ablation of difficulty)
    mu, sigma: in `unit`
    unit: 'accuracy', x = k/n in [0, 1]: σ = 1 is what the paper states and is nearly flat;
        'successes', x = K·k/n in [0, K]: σ = 1 is what the official code runs, and is sharp (σ = 1/K in accuracy)
    weight: 'bucket', P(bucket) ∝ density, then uniform inside: a question in a small bucket is drawn more often
        (paper and official code); 'question', P(question) ∝ density of its bucket
    """

    def __init__(
        self,
        method: Literal["gaussian", "uniform"] = "gaussian",
        mu: float = 0.5,
        sigma: float = 1.0,
        unit: Literal["accuracy", "successes"] = "accuracy",
        weight: Literal["bucket", "question"] = "bucket",
        partition: Literal["accuracy", "level"] = "accuracy",
    ) -> None:
        """Raises ValueError for an unknown choice, σ ≤ 0, or a mean outside the unit's range."""
        for name, value, allowed in (
            ("method", method, ("gaussian", "uniform")),
            ("unit", unit, ("accuracy", "successes")),
            ("weight", weight, ("bucket", "question")),
            ("partition", partition, ("accuracy", "level")),
        ):
            if value not in allowed:
                raise ValueError(
                    f"QuestionSampler.{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}"
                )
        if not (math.isfinite(sigma) and sigma >= 1e-6):
            raise ValueError(
                f"QuestionSampler.sigma must be a positive number (at least 1e-6, in {unit}), got {sigma!r}"
            )
        if not math.isfinite(mu) or mu < 0 or (unit == "accuracy" and mu > 1):
            allowed_mu = "[0, 1] for unit 'accuracy'" if unit == "accuracy" else "[0, K] for unit 'successes'"
            raise ValueError(f"QuestionSampler.mu must lie in {allowed_mu}, got {mu!r}")
        self.method, self.mu, self.sigma = method, mu, sigma
        self.unit, self.weight, self.partition = unit, weight, partition

    def log_density(self, accuracy: Fraction | float, group_size: int) -> float:
        """log N(x; mu, sigma) up to a constant, for an accuracy in [0, 1]; 0 everywhere for 'uniform'."""
        if self.method == "uniform":
            return 0.0
        x = float(accuracy) * (group_size if self.unit == "successes" else 1)
        return -0.5 * ((x - self.mu) / self.sigma) ** 2

    def sample(
        self,
        candidates: Mapping[Fraction, IndexedSet],
        n: int,
        group_size: int,
        buckets: DifficultyBuckets,
        rng: np.random.Generator,
    ) -> list[str]:
        """n distinct question ids, drawn one after the other without replacement. O(n · buckets), whatever is stored.

        Raises ValueError if there are fewer than n candidates.
        """
        cells = self._cells(candidates, buckets)
        if n > (available := sum(cell.remaining for cell in cells)):
            raise ValueError(f"cannot draw {n} distinct questions from {available} candidates")
        drawn: list[str] = []
        while len(drawn) < n:
            live = [cell for cell in cells if cell.remaining]
            weights = self._weights(live, group_size)
            cell = live[int(rng.choice(len(live), p=weights))]
            drawn.append(cell.draw(rng))
        return drawn

    def _weights(self, cells: list[_Cell], group_size: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        logs = np.array([self.log_density(cell.accuracy, group_size) for cell in cells])
        # The maximum is taken over the cells that are left: with a narrow σ the others would all underflow to 0.
        weights = np.exp(logs - logs.max())
        if self.weight == "question":
            weights = weights * [cell.remaining for cell in cells]
        return np.asarray(weights / weights.sum())

    def _cells(self, candidates: Mapping[Fraction, IndexedSet], buckets: DifficultyBuckets) -> list[_Cell]:
        by_accuracy = sorted(candidates.items())
        if self.partition == "accuracy":
            return [_Cell([(accuracy, members)]) for accuracy, members in by_accuracy]
        levels = [[(a, m) for a, m in by_accuracy if buckets.level(a) == level] for level in LEVELS]
        return [_Cell(members) for members in levels if members]


class _Cell:
    """One bucket while it is being drawn from: a Fisher-Yates shuffle that touches only the positions it draws."""

    def __init__(self, parts: list[tuple[Fraction, IndexedSet]]) -> None:
        self.parts = [members for _, members in parts]
        self.remaining = sum(map(len, self.parts))
        # Where the density of a bucket of several accuracies is taken: at the mean accuracy of its questions.
        self.accuracy = float(sum(accuracy * len(members) for accuracy, members in parts) / self.remaining)
        self._moved: dict[int, int] = {}

    def draw(self, rng: np.random.Generator) -> str:
        position = int(rng.integers(self.remaining))
        self.remaining -= 1
        index = self._moved.get(position, position)
        self._moved[position] = self._moved.get(self.remaining, self.remaining)
        for members in self.parts:
            if index < len(members):
                return members[index]
            index -= len(members)
        raise AssertionError("a position beyond the bucket")
