"""Whether a response has the shape its prompt asks for. The content is the verifiers' matter."""

from __future__ import annotations

from collections.abc import Callable


def think_answer(response: str) -> bool:
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


def boxed(response: str) -> bool:
    """A box after the thought, if there is one."""
    return "\\boxed{" in response.rpartition("</think>")[2]


SHAPES: dict[str, Callable[[str], bool]] = {"think_answer": think_answer, "boxed": boxed}
