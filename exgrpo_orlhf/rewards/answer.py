"""What a grader is given and what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """What is graded. meta: the question's own fields a kind looks at (options, tests)."""

    gold: Any
    response: str
    prompt: str = ""
    meta: Mapping[str, Any] = {}


class Graded(NamedTuple):
    """What a grader says. reason: why it could not be graded (verdict 'error')."""

    verdict: str
    reward: float | None
    extracted: str | None = None
    reason: str | None = None


Grader = Callable[[Answer], Graded]
