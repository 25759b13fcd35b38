"""The input and the result of a grader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..records import Message, Verdict


class Answer(NamedTuple):
    """An answer to grade. gold, prompt, meta, source: the question's; some kinds need fields of its meta (options,
    tests), and a user's function may need all of them."""

    gold: Any
    response: str
    prompt: str | tuple[Message, ...] = ""
    meta: Mapping[str, Any] = {}
    source: str = ""


class Graded(NamedTuple):
    """A grader's result. reason: why the answer could not be graded (verdict 'error' or 'timeout')"""

    verdict: Verdict
    reward: float | None
    extracted: str | None = None
    reason: str | None = None


Grader = Callable[[Answer], Graded]
