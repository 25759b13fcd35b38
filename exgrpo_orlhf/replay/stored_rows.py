"""Stored rows of any question that are added to the fresh groups of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from ..checks import Count, NotNegative, Positive, ShareBelowOne, require
from ..records import RolloutGroup, Trajectory
from .buffer import ReplayBuffer
from .difficulty import as_fraction
from .stored_group import AddedRows, Drawn, Relative

SMALLEST = 1e-6  # added to every |x|


@dataclass(frozen=True, repr=False)
class StoredRows(AddedRows):
    """Single stored rows, drawn over all questions, are trained on beside whole fresh groups, each with the advantage
    that it had when it was stored (Advantage-PER, arXiv 2606.04560). A draw has a row once; it may come again:

        p ∝ ((|x| + 1e-6) · exp(−age/τ))^alpha,   x = A or the reward

    rows: for each question of the batch; with `share`, at most
    share: of the batch's rows, fresh and stored, that are stored ones, rounded down; None: by `rows`
    by: x: the stored 'advantage' or the 'reward'
    alpha: 0 is uniform
    decay_steps: τ; None: priorities do not decay (`ReplayBuffer.max_age` ends them)
    first_step: of the run, that adds rows; what it stored before fills the buffer
    """

    rows: Count = 4
    share: ShareBelowOne | None = None
    by: Literal["advantage", "reward"] = "advantage"
    alpha: NotNegative = 0.5
    decay_steps: Positive | None = None
    first_step: Count = 1

    keeps_advantages: ClassVar[bool] = True

    def fresh_rollouts(self, group_size: int) -> int:
        least = math.ceil(self._added(group_size))
        require(
            least <= self.rows,
            f"StoredRows.rows must be at least {least} for StoredRows.share = {self.share} with train.group_size = "
            f"{group_size}, got {self.rows}",
        )
        return group_size

    def _added(self, fresh: int) -> Fraction:
        """To this many fresh rows by `share`."""
        share = as_fraction(self.share or 0)
        return fresh * share / (1 - share)

    def check_stored(self, stored: Iterable[Trajectory], where: str) -> None:
        """Raises ValueError for rows of another run that kept no advantages. where: for the message"""
        require(
            all(trajectory.advantage is not None for trajectory in stored),
            f"{where}: its rows have no advantages, which ReplayMixer.injection = @StoredRows() trains with; take the "
            "buffer of a run with the same injection",
        )

    def draw(
        self, groups: Sequence[RolloutGroup], buffer: ReplayBuffer, step: int, rng: np.random.Generator
    ) -> list[Drawn]:
        rows = [(entry.sequence, id_, entry.trajectory) for id_, r in buffer.records.items() for entry in r.stored]
        rows.sort(key=lambda row: row[0])  # in the order of storing, also after a resume
        if step < self.first_step or not rows:
            return [[] for _ in groups]
        count = self.rows * len(groups)
        if self.share is not None:
            count = math.floor(self._added(sum(len(group.rollouts) for group in groups)))
        # The n largest of log p + Gumbel noise are a draw without replacement.
        keys = self.log_priorities([trajectory for *_, trajectory in rows], step) + rng.gumbel(size=len(rows))
        best = np.argsort(-keys, kind="stable")[:count].tolist()
        return [[rows[i][1:] for i in best[g :: len(groups)]] for g in range(len(groups))]

    def log_priorities(self, stored: Sequence[Trajectory], step: int) -> npt.NDArray[np.float64]:
        """(N,), up to a constant: log p of each stored row."""
        values = [one.reward if self.by == "reward" else one.advantage or 0.0 for one in stored]
        logs: npt.NDArray[np.float64] = np.log(np.abs(np.array(values)) + SMALLEST)
        if self.decay_steps is not None:
            logs -= np.array([step - one.step for one in stored]) / self.decay_steps
        return np.asarray(self.alpha * logs)

    def advantages(self, rows: Sequence[Sequence[Trajectory]], relative: Relative) -> Any:
        return [[one.advantage for one in of_group] for of_group in rows]
