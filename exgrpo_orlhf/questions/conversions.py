"""Conversions of public sets: from a row to the question and its gold answer, one for each layout of such sets.

A conversion returns (question, answer); the answer is '' where the row has none. Questions get no instructions on how
to answer: the template adds them (prompts.py). Choices follow the question as `A) …` lines, and the answer is the label
of the right one.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..grader.boxes import last_box
from ..grader.options import options_of
from .text import without_thousands

Row = Mapping[str, Any]
Convert = Callable[[Row], tuple[str, str]]


@dataclass(frozen=True)
class Conversion:
    """columns: the columns of a row that `convert` reads; convert: row → (question, answer)
    meta: row → what a verifier reads of the question's meta"""

    columns: tuple[str, ...]
    convert: Convert
    meta: Callable[[Row], dict[str, Any]] = lambda row: {}

    def __call__(self, row: Row) -> tuple[str, str]:
        return self.convert(row)


def _reads(*columns: str) -> Callable[[Convert], Conversion]:
    return lambda convert: Conversion(columns, convert)


# The instructions around DAPO's questions.
_DAPO = re.compile(
    r"\ASolve the following math problem step by step\..*?is the answer to the problem\.\s*|"
    r'\s*Remember to put your answer on its own line after "Answer:"\.?\s*\Z',
    re.DOTALL,
)


def columns(question: str, answer: str) -> Conversion:
    """Two plain columns. 142.0 is written as 142."""
    return Conversion((question, answer), lambda row: (row[question], _text(row[answer])))


def tests(question: str, answer: str) -> Conversion:
    """Two columns, the second with a program's tests: text, or lists and records, which are written as JSON."""

    def convert(row: Row) -> tuple[str, str]:
        return row[question], row[answer] if isinstance(row[answer], str) else json.dumps(row[answer])

    return Conversion((question, answer), convert)


def choice(question: str, options: str, answer: str) -> Conversion:
    """Multiple choice with a list of the options' texts in a column.

    The answer is a number, which counts from 0; or text: a label, an option's text, or digits for a number. Raises
    ValueError where it is none of these, or where these readings name different options.
    """

    def convert(row: Row) -> tuple[str, str]:
        if not isinstance(row[options], list):
            raise ValueError(f"{options!r} is no list of texts but {row[options]!r:.60}")
        texts, right = [str(text) for text in row[options]], _text(row[answer])
        labels = string.ascii_uppercase[: len(texts)]
        number = int(right) if right.isdecimal() and int(right) < len(texts) else None
        if not isinstance(row[answer], str):
            named = [] if number is None else [labels[number]]
        else:
            named = [label for label, text in zip(labels, texts, strict=True) if text == right]
            named += [right] if len(right) == 1 and right in labels else []
            named += [] if number is None else [labels[number]]
        if len(set(named)) != 1:
            which = "none" if not named else f"{' and '.join(sorted(set(named)))}: more than one"
            raise ValueError(f"the answer {row[answer]!r} names {which} of the {len(texts)} options {texts!r:.120}")
        return _with_choices(row[question], labels, texts), named[0]

    def by_label(row: Row) -> dict[str, Any]:
        texts = options_of([*map(str, row[options])]).values()  # without labels of their own
        return {"options": dict(zip(string.ascii_uppercase, texts, strict=False))}

    return Conversion((question, options, answer), convert, by_label)


def boxed(question: str, solution: str) -> Conversion:
    """The answer is the content of the solution's last box."""
    return Conversion((question, solution), lambda row: (row[question], last_box(row[solution]) or ""))


@_reads("question", "answer")
def after_hashes(row: Row) -> tuple[str, str]:
    """GSM8K: the answer follows ####, thousands separated by commas."""
    return row["question"], without_thousands(row["answer"].rpartition("####")[2].strip())


def own_system(row: Row) -> list[Any]:
    """The system message of a row in verl's layout, in a list; [] if there is none."""
    messages = row.get("prompt")
    return [message for message in messages[:1] if message["role"] == "system"] if isinstance(messages, list) else []


@_reads("prompt", "reward_model")
def verl_messages(row: Row) -> tuple[str, str]:
    """verl's layout: the last user message (see `own_system` for the system message)."""
    contents = [message["content"] for message in row["prompt"] if message["role"] == "user"]
    return contents[-1] if contents else "", _text(row["reward_model"]["ground_truth"])


@_reads("prompt", "solution")
def dapo(row: Row) -> tuple[str, str]:
    """DAPO: the question without the instructions around it, if there are any."""
    return _DAPO.sub("", row["prompt"]), _text(row["solution"])


@_reads("context", "question", "final_answer")
def olympiad(row: Row) -> tuple[str, str]:
    """OlympiadBench: some questions have a text before them, and several answers."""
    context = (row["context"] or "").strip()
    question = f"{context}\n{row['question']}" if context else row["question"]
    return question, ", ".join(answer.strip() for answer in row["final_answer"] or [])


@_reads("question", "choices", "answerKey")
def arc(row: Row) -> tuple[str, str]:
    """ARC: the choices carry their labels, letters or digits."""
    choices = row["choices"]
    return _with_choices(row["question"], choices["label"], choices["text"]), row["answerKey"]


@_reads("question", "options", "answer")
def mmlu_pro(row: Row) -> tuple[str, str]:
    """MMLU-Pro: up to ten options. The answer is the letter (in one row the index names another option)."""
    return _with_choices(row["question"], string.ascii_uppercase, row["options"]), row["answer"]


@_reads("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
def gpqa(row: Row) -> tuple[str, str]:
    """GPQA lists the right answer first: the options are shuffled by a hash of the question, the same every time."""
    question = row["Question"].strip()
    options = [row["Correct Answer"], *(row[f"Incorrect Answer {n}"] for n in (1, 2, 3))]
    seed = int.from_bytes(hashlib.blake2b(question.encode(), digest_size=8).digest(), "big")
    order = np.random.default_rng(seed).permutation(4).tolist()
    return _with_choices(question, "ABCD", [options[i].strip() for i in order]), "ABCD"[order.index(0)]


def _with_choices(question: str, labels: Iterable[str], options: Iterable[str]) -> str:
    lines = "\n".join(f"{label}) {option}" for label, option in zip(labels, options, strict=False))
    return f"{question}\n\n{lines}"


def _text(value: Any) -> str:
    if type(value) is float and value.is_integer():  # a JSON number is as it is written
        value = int(value)
    if isinstance(value, list | dict):
        raise ValueError(f"the gold answer is {value!r:.80}; it must be one text or number: give each row one answer")
    return "" if value is None else str(value).strip()
