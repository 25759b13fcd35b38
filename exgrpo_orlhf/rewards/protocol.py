"""How users' functions and reward servers are spoken to: OpenRLHF's lists, and what comes back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..grader.answer import Answer
from ..io.metric_names import allowed_name


def openrlhf_lists(answers: Sequence[Answer]) -> dict[str, list[Any]]:
    """What OpenRLHF hands to a reward function, and to a server: a query is prompt and response."""
    prompts, queries = zip(*(answer.as_read for answer in answers), strict=True)
    return {"queries": [*queries], "prompts": [*prompts], "labels": [answer.gold for answer in answers]}


Logs = list[tuple[tuple[str, float], ...]]  # of each answer names and numbers


def logs_of(extra: Any, count: int, source: str = "extra_logs") -> tuple[Logs, str | None]:
    """OpenRLHF's extra_logs: by name a list, array or tensor with a number for each of `count` queries.

    Returns the names and numbers of each query, and which names have something else and are left out. source: where the
    logs are from, for that message
    """
    logs: Logs = [()] * count
    bad = [] if isinstance(extra, Mapping) or extra is None else [f"{extra!r:.80}"]
    for name, values in extra.items() if isinstance(extra, Mapping) else ():
        values = values.tolist() if hasattr(values, "tolist") else values
        values = values if isinstance(values, list | tuple) else [values]
        if len(values) == count and all(isinstance(value, int | float) and math.isfinite(value) for value in values):
            metric = allowed_name(str(name), most=200) or "unnamed"
            logs = [(*pairs, (metric, float(value))) for pairs, value in zip(logs, values, strict=True)]
        else:
            bad.append(str(name))
    return logs, f"{source} without a finite number for each query: {', '.join(bad)}" if bad else None


def single(value: Any) -> Any:
    """What a tensor, an array or a list of one element holds; of anything else the value, a tensor as a list."""
    value = value.tolist() if hasattr(value, "tolist") else value
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    return value
