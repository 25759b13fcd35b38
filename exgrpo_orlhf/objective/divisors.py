"""The divisors of a batch with rows that are added to its groups."""

from __future__ import annotations

from dataclasses import replace

from ..records import MixedBatch
from .loss import MixedPolicyLoss


def weighted(batch: MixedBatch, loss: MixedPolicyLoss) -> MixedBatch:
    """A batch with added rows, with each row's weight beside `MixedPolicyLoss.row_weights`, as `.divisors` says."""
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
    rows = [[replace(row, weight=factors[row.trajectory is not None]) for row in members] for members in batch.rows]
    return replace(batch, rows=rows)
