"""Distributes forward passes over ranks. All ranks wait for the slowest one."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence, Sized

from ..rows import micro_batches


def passes_by_rank(rows: Sequence[Sized], token_budget: int, ranks: int, packed: bool) -> list[list[list[int]]]:
    """For each rank its forward passes, each a list of positions of rows. There must be at least one row.

    Under ZeRO-3 the ranks wait for one another in each pass. So all ranks make the same number of passes, the n-th
    passes of all ranks cost about the same, and so do the sums over a rank's passes. A pass costs at most the budget; a
    longer row gets a pass of its own. Every row comes once, except where each row has a pass of its own and a rank is
    still without one: then the shortest row is repeated.

    rows: of which only the lengths count
    packed: whether a pass costs the tokens of its rows. Otherwise it costs rows × the longest of them, because the
        other rows are padded to that length.
    """
    lengths = [len(row) for row in rows]

    def cost(part: list[int]) -> int:
        return sum(lengths[i] for i in part) if packed else len(part) * max(lengths[i] for i in part)

    parts = _packed(lengths, token_budget, ranks) if packed else _padded(rows, token_budget, ranks)
    while len(parts) % ranks:
        most = max(parts, key=lambda part: (len(part) > 1, cost(part)))
        if len(most) == 1:
            parts.append(min(parts, key=cost))
        else:
            parts.remove(most)
            parts += [most[: len(most) // 2], most[len(most) // 2 :]]
    parts.sort(key=cost, reverse=True)
    passes: list[list[list[int]]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for begin in range(0, len(parts), ranks):
        least_first = sorted(range(ranks), key=load.__getitem__)
        for rank, part in zip(least_first, parts[begin : begin + ranks], strict=True):
            passes[rank].append(part)
            load[rank] += cost(part)
    return passes


def _packed(lengths: Sequence[int], token_budget: int, ranks: int) -> list[list[int]]:
    """As few passes per rank as the budget allows, filled evenly: longest row first, each into the emptiest pass."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    passes = math.ceil(sum(lengths) / (ranks * token_budget))
    while True:
        filled: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(passes * ranks)]
        for i in order:
            tokens, number, part = filled[0]
            if part and tokens + lengths[i] > token_budget:
                break
            part.append(i)
            heapq.heapreplace(filled, (tokens + lengths[i], number, part))
        else:
            return [part for _, _, part in filled if part]
        passes += 1


def _padded(rows: Sequence[Sized], token_budget: int, ranks: int) -> list[list[int]]:
    """As few passes per rank as the budget and the limit on padding allow, cut with the smallest budget that gives no
    more of them."""

    def count(budget: int) -> int:
        return len(list(micro_batches(rows, budget)))

    passes = math.ceil(count(token_budget) / ranks)
    budgets = range(1, token_budget)
    enough = bisect_left(budgets, True, key=lambda budget: count(budget) <= passes * ranks)
    return list(micro_batches(rows, 1 + enough))
