"""The kinds that compare texts. What grades mathematics is loaded in grading processes alone: sympy takes a second."""

from __future__ import annotations

from typing import Any

from .grade import Grade
from .kind import Kind


def _exact(question: Any, response: str) -> Grade:
    """The response must equal the gold answer, white space around it aside. An empty response is no answer."""
    text = response.strip()
    if not text:
        return Grade("no_answer", 0.0)
    return Grade("correct", 1.0) if text == question.answer.strip() else Grade("wrong", 0.0)


EXACT = Kind(here=_exact)
MATH = Kind(loads=f"{__package__}.math:warm_grader", once=True, as_text=True, takes_list=True, meta=("options",))
MATH_VERIFY = Kind(loads=f"{__package__}.math:plain_grader", once=True, as_text=True, takes_list=True)
CHOICE = Kind(loads=f"{__package__}.choice:grader", once=True, meta=("options",))
