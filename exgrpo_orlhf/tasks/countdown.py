"""Countdown: reach a target with given numbers, each of them used exactly once.

A question is `2,3,7>19=`: the numbers in ascending order, then the target. An answer is a chain of operations from
{+, -, *}, evaluated left to right, with the value after each: `3*7=21-2=19`. Many answers can be right, and finding one
takes a search, where a modular chain takes a calculation.

The operations are the answer and are evaluated here. The values are the reasoning: where the operations reach the
target and a stated value is false, the answer is a lucky guess.

`Hunches` says for which targets a flawed searcher chooses the operators before it looks at the numbers.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np

from ..records import Grade, Message, Question
from ..settings import Bound, check, require
from .made_questions import (
    OPERATIONS,
    OPERATORS,
    SHOWN,
    MadeQuestions,
    Number,
    Operands,
    Probability,
    Seed,
    Split,
    split_by_hash,
)

SOURCE = "countdown"
LARGEST_VALUE = 99  # that a drawn answer passes through; a response may pass through any
MOST_OPERANDS = 6
Largest = Annotated[
    int, Bound("must be an integer from 2 to 20", lambda value: type(value) is int and 2 <= value <= 20)
]
split_of = partial(split_by_hash, task=b"countdown split")  # prompt → the split it belongs to

_PROMPT = re.compile(r"[1-9][0-9]*(?:,[1-9][0-9]*)+>[1-9][0-9]*=")
_RESPONSE = re.compile(r"[0-9]+(?:[-+*][0-9]+=-?[0-9]+)+")
_STATED = re.compile(r"=-?[0-9]+")


def draw_question(rng: np.random.Generator, operands: int, largest: int) -> tuple[Question, str]:
    """A random question with this many numbers from 1 to `largest`, of either split, and one answer to it.

    The answer is uniform over those of the same numbers whose values lie from 0 to LARGEST_VALUE and end above 0: a
    target that more of them reach is asked for more often.
    """
    numbers = sorted(rng.integers(1, largest + 1, size=operands).tolist())
    answer = None
    while answer is None:
        operators = [OPERATORS[i] for i in rng.integers(len(OPERATORS), size=operands - 1).tolist()]
        answer = _write(rng.permutation(numbers).tolist(), operators)
    target = answer.rpartition("=")[2]
    prompt = f"{','.join(map(str, numbers))}>{target}="
    return Question.make(SOURCE, prompt, target, {"operands": operands}), answer


def grade(question: Question, response: str) -> Grade:
    """Evaluate the operations of a response, and compare the values it states with theirs.

    The response is the decoded text without its end token. Anything but operations with a value after each is no
    answer, and each number must occur as often as in the question. Never raises on a response; raises ValueError if the
    question is not a countdown question.
    """
    numbers, target = _parse(question.prompt)
    if not _RESPONSE.fullmatch(response):
        return Grade("no_answer", 0.0, sound=False)
    operations = _STATED.sub("", response)
    shown = operations[:SHOWN]
    used = re.split(r"[-+*]", operations)
    if sorted(used) != sorted(map(str, numbers)):  # as text, so that no long run of digits is ever converted
        return Grade("wrong", 0.0, sound=False, extracted=shown)
    value, right = int(used[0]), []
    for operator, number in zip(re.findall(r"[-+*]", operations), used[1:], strict=True):
        value = OPERATIONS[operator](value, int(number))
        right.append(f"={value}")
    if value != target:
        return Grade("wrong", 0.0, sound=False, extracted=shown)
    return Grade("correct", 1.0, sound=_STATED.findall(response) == right, extracted=shown)


@dataclass(frozen=True)
class Countdown(MadeQuestions):
    """A set of distinct countdown questions; the other fields are those of `MadeQuestions`.

    operands: how many numbers a question gives; each in an equal share of the questions
    largest: the numbers are from 1 to this
    """

    count: Number = 1600
    operands: Operands = (3, 4)
    seed: Seed = 0
    split: Split = "train"
    largest: Largest = 9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_operands("Countdown", self.operands)

    @property
    def levels(self) -> tuple[int, ...]:
        return self.operands

    def _named(self, level: int) -> str:
        return f"{level} numbers up to {self.largest}"

    def _draw(self, rng: np.random.Generator, level: int) -> tuple[Question, str] | None:
        question, answer = draw_question(rng, level, self.largest)
        return (question, answer) if split_of(str(question.prompt)) == self.split else None


@dataclass(frozen=True)
class Hunches:
    """The operators that a flawed searcher believes in.

    share: share of the pairs of a target and a number of operands for which one sequence of operators is believed right
    strength: probability that such a hunch is followed, with the numbers in a random order and the target ignored
    seed: which pairs, and their operators
    """

    share: Probability
    strength: Probability
    seed: Seed = 0

    def __post_init__(self) -> None:
        check(Hunches, vars(self))

    def operators(self, operands: int, target: int) -> str | None:
        """The operators believed right, one fewer than operands; None without a hunch."""
        digest = hashlib.blake2b(f"{self.seed} {operands} {target}".encode(), digest_size=16, person=b"hunch").digest()
        chance, which = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")
        if chance >= self.share * 2**64:
            return None
        return "".join(OPERATORS[which // len(OPERATORS) ** i % len(OPERATORS)] for i in range(operands - 1))


def write_attempt(rng: np.random.Generator, question: Question, answer: str, hunches: Hunches) -> str:
    """One flawed attempt, without end token: the answer, unless a hunch is followed that the numbers allow.

    Every stated value is true; values stay within those of `draw_question`. Raises ValueError if the question is not a
    countdown question.
    """
    numbers, target = _parse(question.prompt)
    operators = hunches.operators(len(numbers), target)
    if operators is not None and rng.random() < hunches.strength:
        for order in rng.permutation(list(itertools.permutations(numbers))).tolist():
            if attempt := _write(order, operators):
                return attempt
    return answer


def check_operands(owner: str, operands: tuple[int, ...]) -> None:
    """Raises ValueError unless questions can be drawn with these numbers of operands."""
    require(max(operands) <= MOST_OPERANDS, f"{owner}.operands must be at most {MOST_OPERANDS}, got {operands!r}")


def _write(order: Sequence[int], operators: Sequence[str]) -> str | None:
    """The operations with their values; None where one lies outside 0 to LARGEST_VALUE or the last is 0."""
    value, text = order[0], str(order[0])
    for operator, number in zip(operators, order[1:], strict=True):
        value = OPERATIONS[operator](value, number)
        if not 0 <= value <= LARGEST_VALUE:
            return None
        text += f"{operator}{number}={value}"
    return text if value else None


def _parse(prompt: str | tuple[Message, ...]) -> tuple[list[int], int]:
    """The numbers and the target."""
    if not isinstance(prompt, str) or not _PROMPT.fullmatch(prompt):
        raise ValueError(f"not a countdown question such as '2,3,7>19=': {prompt!r}")
    numbers, _, target = prompt[:-1].partition(">")
    return [int(number) for number in numbers.split(",")], int(target)
