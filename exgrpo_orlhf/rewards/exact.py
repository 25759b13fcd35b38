"""The response is the answer, letter for letter but for white space around it."""

from __future__ import annotations

from ..records import Grade, Question


def grade(question: Question, response: str) -> Grade:
    """An empty response is no answer."""
    given = response.strip()
    if not given:
        return Grade("no_answer", 0.0)
    return Grade("correct", 1.0) if given == question.answer.strip() else Grade("wrong", 0.0)
