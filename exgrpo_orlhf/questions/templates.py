"""The built-in templates of prompts (docs/prompts.md), and chat templates from elsewhere."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from jinja2 import TemplateError

from ..io import tokenizer_file


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


def template_kwargs(common: Mapping[str, Any], own: Any, tokenizer: Any, where: str) -> dict[str, Any]:
    """What a chat template takes besides the messages. own: a question's, which win but for a None, as Parquet
    writes it for what other rows have; or None

    Raises ValueError for one that the template does not read, which jinja would ignore."""
    if own is not None and not isinstance(own, Mapping):
        raise ValueError(f"{where}: chat_template_kwargs is {own!r:.80}, not an object with names and values")
    if not (kwargs := {**common, **{name: value for name, value in (own or {}).items() if value is not None}}):
        return kwargs
    decided_here = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} - {"tools", "documents"}
    for name in kwargs:
        if name in decided_here or not re.search(rf"\b{re.escape(str(name))}\b", str(tokenizer.chat_template)):
            raise ValueError(f"{where} does not take {name!r}; chat_template_kwargs are {kwargs}")
    return kwargs


def take_chat_template(source: str, tokenizer: Any) -> None:
    """Give a tokenizer the chat template of another one (folder or hub id), or a template's text. Raises ValueError."""
    binding, probe = f"Prompts.chat_template_from = {source!r:.200}", "What is 1 + 1?"
    user, is_text = {"role": "user", "content": probe}, "{" in source  # the text of a file
    try:
        other = tokenizer if is_text else tokenizer_file.load(source)
        template = source if is_text else other.chat_template
        write = partial(other.apply_chat_template, chat_template=template, tokenize=False)
        text = str(write([user], add_generation_prompt=True))
        with suppress(TemplateError):  # it takes no system message
            text += str(write([{"role": "system", "content": "1"}, user]))
    except (OSError, ValueError, KeyError, TemplateError) as error:
        raise ValueError(f"{binding}: no chat template from there ({' '.join(str(error).split()):.300})") from error
    if probe not in text:
        raise ValueError(f"{binding}: it leaves the question out")
    vocabulary, marks = tokenizer.get_vocab(), re.findall(r"<\|.+?\|>", text) if is_text else other.get_added_vocab()
    if missing := [token for token in dict.fromkeys(marks) if token in text and token not in vocabulary]:
        raise ValueError(
            f"{binding}: its chat template writes {' and '.join(missing)}, which the tokenizer of "
            f"{tokenizer.name_or_path} does not have; take one of the same family of models"
        )
    tokenizer.chat_template = template
