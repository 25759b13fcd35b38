"""The input and the result of a grader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..records import Verdict


class Answer(NamedTuple):
    """An answer to grade. meta: the question's fields that some kinds need (options, tests)."""

    gold: Any
    response: str
    prompt: str = ""
    meta: Mapping[str, Any] = {}


class Graded(NamedTuple):
    """A grader's result. reason: why the answer could not be graded (verdict 'error' or 'timeout')."""

    verdict: Verdict
    reward: float | None
    extracted: str | None = None
    reason: str | None = None


Grader = Callable[[Answer], Graded]
