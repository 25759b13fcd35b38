"""What the campaign does to a process, and how it compares two runs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file


def wrapped(names: tuple[str, ...], before: Callable[[], None], after: Callable[[], None]) -> None:
    """Have these functions of os call `before` and `after`, in this process, from now on."""

    def calling(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before()
        result = function(*args, **kwargs)
        after()
        return result

    for name in names:
        setattr(os, name, partial(calling, getattr(os, name)))


def count_calls(path: Path, calls: Mapping[str, tuple[str, ...]]) -> None:
    """Write how often this process has called functions of os, by kind."""
    counts = dict.fromkeys(calls, 0)

    def one_more(kind: str) -> None:
        counts[kind] += 1
        path.write_text(json.dumps(counts))

    for kind, names in calls.items():
        wrapped(names, lambda: None, partial(one_more, kind))


def kill_at_call(names: tuple[str, ...], number: int, after: bool) -> None:
    """Kill this process at its n-th call of these functions of os, before or after it took effect."""
    seen = {True: 0, False: 0}

    def die(now: bool) -> None:
        seen[now] += 1
        if now == after and seen[now] == number:
            os.kill(os.getpid(), signal.SIGKILL)

    wrapped(names, partial(die, False), partial(die, True))


def first_difference(run: Path, straight: Path, steps: int) -> str | None:
    """What differs between the ends of two runs of that many steps, or None."""
    ours, theirs = (folder / f"checkpoint-{steps}" for folder in (run, straight))
    weights, expected = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    if weights.keys() != expected.keys() or not all(torch.equal(weights[name], expected[name]) for name in expected):
        return "weights"
    saved, wanted = (torch.load(folder / "trainer" / "optimizer.pt") for folder in (ours, theirs))
    states = [one["optimizer"].pop("state") for one in (saved, wanted)]
    if saved != wanted or states[0].keys() != states[1].keys():
        return "optimizer"
    for i, state in states[1].items():
        if not all(torch.equal(value, states[0][i][name]) for name, value in state.items()):
            return "optimizer"
    tables = {path.relative_to(theirs) for path in theirs.rglob("*.parquet")}
    if tables != {path.relative_to(ours) for path in ours.rglob("*.parquet")}:
        return "tables"
    for table in tables:  # of the buffer, and of the batch that was generated ahead
        if not pq.read_table(ours / table).equals(pq.read_table(theirs / table)):
            return str(table)
    if timeless(run) != timeless(straight):
        return "metrics.jsonl"
    plain = ("trainer/state.json", *(path.relative_to(theirs) for path in theirs.glob("adapter/*")))
    for name in ("decisions.jsonl", "rollouts.jsonl", *(f"{ours.name}/{name}" for name in plain)):
        if (run / name).read_bytes() != (straight / name).read_bytes():
            return name
    return None if (run / "best").resolve().name == (straight / "best").resolve().name else "best"


def timeless(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith("time")} for row in rows]
