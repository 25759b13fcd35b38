"""Exact answers, and the format that a response must have (`Verifier.format`)."""

from __future__ import annotations

from collections.abc import Callable

from ...records import Grade, Question


def exact(question: Question, response: str) -> Grade:
    """The response must equal the gold answer, white space around it aside. An empty response is no answer."""
    given = response.strip()
    if not given:
        return Grade("no_answer", 0.0)
    return Grade("correct", 1.0) if given == question.answer.strip() else Grade("wrong", 0.0)


def _think_answer(response: str) -> bool:
    """One thought, then one answer and nothing else. The opening <think> may be part of the prompt."""
    thought, closed, rest = response.strip().partition("</think>")
    rest = rest.strip()
    answer = rest.removeprefix("<answer>").removesuffix("</answer>")
    return (
        bool(closed)
        and "<think>" not in thought.removeprefix("<think>")
        and len(rest) == len(answer) + len("<answer></answer>")
        and bool(answer.strip())
        and not any(tag in answer for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    )


def _boxed(response: str) -> bool:
    """A box after the thought, if there is one."""
    return "\\boxed{" in response.rpartition("</think>")[2]


FORMATS: dict[str, Callable[[str], bool]] = {"think_answer": _think_answer, "boxed": _boxed}
