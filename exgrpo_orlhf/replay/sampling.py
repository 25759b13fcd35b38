"""Which stored questions are replayed: a Gaussian over difficulty, or uniform."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Annotated, Literal

import numpy as np

from ..checks import Constraint, check_settings, require
from .difficulty import LEVELS, DifficultyBuckets

SIGMA = Constraint("must be a positive number (at least 1e-6)", lambda value: 1e-6 <= value < math.inf)


class IndexedSet:
    """A set of question ids that also knows its members by position: add, remove and draw by index are all O(1).

    The order is part of the state: a sampler draws by index, so a resumed run must see the same order.
    """

    def __init__(self, members: Iterable[str] = ()) -> None:
        self._members = list(members)
        self._position = {member: i for i, member in enumerate(self._members)}

    def add(self, member: str) -> None:
        if member not in self._position:
            self._position[member] = len(self._members)
            self._members.append(member)

    def remove(self, member: str) -> None:
        """Raises KeyError if absent. The last member takes the freed position."""
        position = self._position.pop(member)
        last = self._members.pop()
        if last != member:
            self._members[position] = last
            self._position[last] = position

    def __getitem__(self, position: int) -> str:
        return self._members[position]

    def __contains__(self, member: object) -> bool:
        return member in self._position

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


@dataclass(frozen=True)
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
    partition: one bucket per exact 'accuracy', or per difficulty 'level'
    """

    method: Literal["gaussian", "uniform"] = "gaussian"
    mu: float = 0.5
    sigma: Annotated[float, SIGMA] = 1.0
    unit: Literal["accuracy", "successes"] = "accuracy"
    weight: Literal["bucket", "question"] = "bucket"
    partition: Literal["accuracy", "level"] = "accuracy"

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown choice, σ ≤ 0, or a mean outside the unit's range."""
        check_settings(QuestionSampler, vars(self))
        largest = 1 if self.unit == "accuracy" else math.inf  # of success counts: K, which ReplayMixer knows
        allowed = "[0, 1] for unit 'accuracy'" if self.unit == "accuracy" else "[0, K] for unit 'successes'"
        require(0 <= self.mu <= largest, f"QuestionSampler.mu must lie in {allowed}, got {self.mu!r}")

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
        """n distinct question ids, drawn one after the other without replacement.

        O(n · buckets) whatever is stored. Raises ValueError if there are fewer than n candidates.
        """
        if n > (available := sum(map(len, candidates.values()))):
            raise ValueError(f"cannot draw {n} distinct questions from {available} candidates")
        if n == 0:
            return []
        parts = [[pair] for pair in sorted(candidates.items())]
        if self.partition == "level":
            levels = [[pair for (pair,) in parts if buckets.level(pair[0]) == level] for level in LEVELS]
            parts = [part for part in levels if part]
        cells: list[_Cell] = []
        for part in parts:
            sets = [members for _, members in part]
            # Where the density of a bucket of several accuracies is taken: at the mean accuracy of its questions.
            accuracy = sum(accuracy * len(members) for accuracy, members in part) / sum(map(len, sets))
            cells.append(_Cell(sets, self.log_density(accuracy, group_size)))
        drawn: list[str] = []
        cumulative: list[float] = []
        for which, member in rng.random((n, 2)).tolist():
            if not cumulative or self.weight == "question" or not all(map(len, cells)):
                cells = [cell for cell in cells if len(cell)]
                logs = [cell.log_density + (cell.log_mass() if self.weight == "question" else 0.0) for cell in cells]
                # The maximum is over the cells that are left: with a narrow σ the others would all underflow to 0.
                peak = max(logs)
                cumulative = list(accumulate(math.exp(value - peak) for value in logs))
            chosen = min(bisect_right(cumulative, which * cumulative[-1]), len(cells) - 1)
            drawn.append(cells[chosen].draw(member))
        return drawn


class _Cell:
    """One bucket while it is being drawn from: a Fisher-Yates shuffle that touches only the positions it draws."""

    def __init__(self, parts: list[IndexedSet], log_density: float) -> None:
        self.parts, self.log_density = parts, log_density
        self._left = sum(map(len, parts))
        self._moved: dict[int, int] = {}

    def __len__(self) -> int:
        return self._left

    def log_mass(self) -> float:
        """log of the summed weights of the members that are left."""
        return math.log(self._left)

    def draw(self, uniform: float) -> str:
        """uniform: in [0, 1), picks among the members that are left."""
        position = int(uniform * self._left)
        self._left -= 1
        index = self._moved.get(position, position)
        self._moved[position] = self._moved.get(self._left, self._left)
        for members in self.parts:
            if index < len(members):
                return members[index]
            index -= len(members)
        raise AssertionError("a position beyond the bucket")
