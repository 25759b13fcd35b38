"""How a row of a public set becomes question and gold answer: one function for each way such sets are written.

A conversion returns (question, answer); the answer is '' where the row has none. Questions stay as they are, without
instructions: how to answer is the template's to say (prompts.py). Choices stand below the question as `A) …` lines,
the answer is the label of the right one.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Row = Mapping[str, Any]
Conversion = Callable[[Row], tuple[str, str]]

# What DAPO's questions are wrapped in.
_DAPO = re.compile(
    r"\ASolve the following math problem step by step\..*?is the answer to the problem\.\s*|"
    r'\s*Remember to put your answer on its own line after "Answer:"\.?\s*\Z',
    re.DOTALL,
)


def columns(question: str, answer: str) -> Conversion:
    """Two plain columns. A whole number that is stored as a decimal one is written as a whole one."""

    def convert(row: Row) -> tuple[str, str]:
        return row[question], _text(row[answer])

    return convert


def choice(question: str, options: str, answer: str) -> Conversion:
    """Multiple choice with a list of the options' texts in a column.

    The answer is a number, which counts from 0; or text: a label, an option's text, or digits for a number. Raises
    ValueError where it is none of these, or where it names one option in one way and another in another.
    """

    def convert(row: Row) -> tuple[str, str]:
        if not isinstance(row[options], list):
            raise ValueError(f"{options!r} is no list of texts but {row[options]!r:.60}")
        texts, right = [str(text) for text in row[options]], _text(row[answer])
        labels = string.ascii_uppercase[: len(texts)]
        number = int(right) if right.isdecimal() and int(right) < len(texts) else None
        if type(row[answer]) is not str:  # a number of the file's own, in JSONL as it is written
            named = [] if number is None else [labels[number]]
        else:
            named = [label for label, text in zip(labels, texts, strict=True) if text == right]
            named += [right] if len(right) == 1 and right in labels else []
            named += [] if number is None else [labels[number]]
        if len(set(named)) != 1:
            what = "none" if not named else f"{' and '.join(sorted(set(named)))}: more than one"
            raise ValueError(f"the answer {row[answer]!r} names {what} of the {len(texts)} options {texts!r:.120}")
        return _with_choices(row[question], labels, texts), named[0]

    return convert


def boxed(question: str, solution: str) -> Conversion:
    """The answer is what the solution boxes last."""

    def convert(row: Row) -> tuple[str, str]:
        return row[question], last_boxed(row[solution])

    return convert


def after_hashes(row: Row) -> tuple[str, str]:
    """GSM8K: the answer follows ####, thousands separated by commas."""
    return row["question"], row["answer"].rpartition("####")[2].strip().replace(",", "")


def verl_messages(row: Row) -> tuple[str, str]:
    """verl's layout: the last user message; the system's, which says how to answer, stays behind."""
    asked = [message["content"] for message in row["prompt"] if message["role"] == "user"]
    return asked[-1] if asked else "", _text(row["reward_model"]["ground_truth"])


def dapo(row: Row) -> tuple[str, str]:
    """The question without the instructions around it, where they are."""
    return _DAPO.sub("", row["prompt"]), _text(row["solution"])


def olympiad(row: Row) -> tuple[str, str]:
    """OlympiadBench: some questions have a text before them, and several answers."""
    context = (row["context"] or "").strip()
    question = f"{context}\n{row['question']}" if context else row["question"]
    return question, ", ".join(answer.strip() for answer in row["final_answer"] or [])


def arc(row: Row) -> tuple[str, str]:
    """ARC: the choices carry their labels, letters or digits."""
    choices = row["choices"]
    return _with_choices(row["question"], choices["label"], choices["text"]), row["answerKey"]


def mmlu_pro(row: Row) -> tuple[str, str]:
    """MMLU-Pro: up to ten options. The letter is the answer (in one row the index says another one)."""
    return _with_choices(row["question"], string.ascii_uppercase, row["options"]), row["answer"]


def gpqa(row: Row) -> tuple[str, str]:
    """GPQA names the right answer first: options in an order of their own for each question, the same every time."""
    question = row["Question"].strip()
    options = [row["Correct Answer"], *(row[f"Incorrect Answer {n}"] for n in (1, 2, 3))]
    seed = int.from_bytes(hashlib.blake2b(question.encode(), digest_size=8).digest(), "big")
    order = np.random.default_rng(seed).permutation(4).tolist()
    return _with_choices(question, "ABCD", [options[i].strip() for i in order]), "ABCD"[order.index(0)]


def last_boxed(text: str) -> str:
    """What the last \\boxed{…} of a text holds, braces balanced; '' if there is none or it is empty."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return ""
    rest = text[start:].removeprefix("\\boxed").removeprefix("\\fbox").lstrip()
    if not rest.startswith("{"):  # \boxed 7
        return rest.split("$")[0].split()[0] if rest.split("$")[0].strip() else ""
    depth = 0
    for i, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:i].strip()
    return ""


def _with_choices(question: str, labels: Any, options: list[str]) -> str:
    lines = "\n".join(f"{label}) {option}" for label, option in zip(labels, options, strict=False))
    return f"{question}\n\n{lines}"


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value).strip()
