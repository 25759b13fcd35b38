"""The divisors of a batch with rows that are added to its groups."""

from __future__ import annotations

from dataclasses import replace

from ..records import MixedBatch, Row
from .loss import MixedPolicyLoss


def weighted(batch: MixedBatch, loss: MixedPolicyLoss, steps: int = 1) -> MixedBatch:
    """A batch with added rows, with each row's weight beside `MixedPolicyLoss.row_weights`, as `.divisors` says.

    steps: optimiser steps, each of which has every steps-th group and divides by what it has itself
    """
    rows, steps = [*batch.rows], min(steps, len(batch.rows))
    for part in range(steps):
        rows[part::steps] = _weighted(replace(batch, rows=batch.rows[part::steps]), loss)
    return replace(batch, rows=rows)


def _weighted(batch: MixedBatch, loss: MixedPolicyLoss) -> list[list[Row]]:
    """The rows of one optimiser step's groups."""
    sums = {"rows": [0, 0], "tokens": [0, 0]}  # of fresh rows and of added ones
    for row in batch.flat_rows():
        sums["rows"][row.trajectory is not None] += 1
        sums["tokens"][row.trajectory is not None] += row.length
    if loss.normalizer == "tokens":
        total, apart, together = sum(sums["tokens"]), sums["tokens"], sum(sums["tokens"])
    else:
        total = len(batch.rows) * batch.group_size  # what `row_weights` counts
        apart, together = [total, len(batch.rows) * batch.added_size], total + sums["rows"][1]
    factors = [total / max(n, 1) for n in (apart if loss.divisors == "apart" else [together] * 2)]
    return [[replace(row, weight=factors[row.trajectory is not None]) for row in members] for members in batch.rows]
