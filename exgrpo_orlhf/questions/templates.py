"""The built-in templates of prompts (docs/prompts.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    """How a prompt is written.

    turns: role → the format of its message, with {} for the content; None: only the tokenizer's chat template writes
    between: separates the turns, and the last turn from `answer`
    answer: the text that the response continues
    system: the system message for a question that has none; None: no system message
    chat: use the tokenizer's chat template if it has one
    tokens: special tokens in the text, which the tokenizer must have
    """

    turns: Mapping[str, str] | None
    between: str = "\n"
    answer: str = ""
    system: str | None = None
    chat: bool = False
    tokens: tuple[str, ...] = ()


_ROLES = ("system", "user", "assistant")
_TEXT = {"system": "{}\n", "user": "Question: {}", "assistant": "Answer: {}\n"}

TEMPLATES: dict[str, Template] = {
    "plain": Template({role: "{}" for role in _ROLES}, between="\n\n"),
    "chat": Template(None, chat=True),
    "qwen_math": Template(
        {role: f"<|im_start|>{role}\n{{}}<|im_end|>" for role in _ROLES},
        answer="<|im_start|>assistant\n",
        system="Solve the problem one step at a time and say why each step holds. Close with the final answer, written "
        "once, in \\boxed{}.",
        tokens=("<|im_start|>", "<|im_end|>"),
    ),
    "simplerl": Template(
        _TEXT, answer="The answer is worked out step by step, and its result stands in \\boxed{}.\nAnswer:"
    ),
    "think_answer": Template(
        _TEXT,
        answer="Answer:",
        system="Think before you answer. Put all of your reasoning between <think> and </think>: take the problem "
        "apart, try another way where one leads nowhere, and check what you found. After </think> write a short "
        "solution and give the final answer in \\boxed{}.",
        chat=True,
    ),
}
