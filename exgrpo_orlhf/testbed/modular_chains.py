"""Modular chains: arithmetic on single digits whose reasoning can be checked step by step.

A question is `a∘b∘c…=` with ∘ in {+, -, *}, evaluated left to right mod 10. Right reasoning is one step per operator,
then the answer: `7+5*3=` has `7+5=2;2*3=6;#6`. A question has exactly one right reasoning text, so comparing texts is
an exact check of the reasoning, and a correct answer without it is a lucky guess.

Several chains can be asked together, separated by `;`. The right response has the reasoning of each, with its result,
then all results: `7+5;2*3=` has `7+5=2;#2;2*3=6;#6;#26`. The answer is the results without a separator, `26`, so that a
guess of the last digit is right for one chain only.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from ..checks import Count, Natural, Share, check_settings, require
from ..grader.grade import SHOWN, Grade, Message
from ..grader.kind import Kind
from ..records import Question
from .made_questions import OPERATIONS, VALIDATION_ONE_IN, MadeQuestions, Operands, Split, split_by_hash

SOURCE = "modular_chains"
OPERATORS = "+-*"
Fact = tuple[int, str, int]  # left operand, operator, right operand
FACTS: tuple[Fact, ...] = tuple(itertools.product(range(10), OPERATORS, range(10)))  # all 300
split_of = partial(split_by_hash, task=b"chain split")  # prompt of one chain → the split it belongs to

_PROMPT = re.compile(r"[0-9](?:[-+*][0-9])+(?:;[0-9](?:[-+*][0-9])+)*=")


def result(fact: Fact) -> int:
    """The right value of one step, 0 to 9."""
    left, operator, right = fact
    return int(OPERATIONS[operator](left, right) % 10)


def draw_question(rng: np.random.Generator, operands: int, split: Split, together: int = 1) -> Question:
    """A random question of this many chains with this many operands each; the chains are uniform over the split."""
    prompt = ";".join(_draw_chain(rng, operands, split) for _ in range(together)) + "="
    answer = right_reasoning(prompt).rpartition("#")[2]
    return Question.make(SOURCE, prompt, answer, {"operands": operands})


def _draw_chain(rng: np.random.Generator, operands: int, split: Split) -> str:
    while True:
        digits = rng.integers(10, size=operands).tolist()
        operators = rng.integers(len(OPERATORS), size=operands - 1).tolist()
        tail = "".join(f"{OPERATORS[o]}{d}" for o, d in zip(operators, digits[1:], strict=True))
        chain = f"{digits[0]}{tail}"
        if split_of(f"{chain}=") == split:
            return chain


def right_reasoning(prompt: str | tuple[Message, ...]) -> str:
    """The one right response to a question's prompt. Raises ValueError if that is not a modular chain."""
    return _reason(prompt, result)


def grade(question: Question, response: str) -> Grade:
    """Compare what follows the last `#` with the gold answer, and the whole response with the right reasoning.

    The response is the decoded text without its end token. The comparison is exact: a space, a second digit or a sign
    is a wrong answer; no `#`, or nothing after it, is no answer. Never raises on a response; raises ValueError if the
    question is not one of modular chains.
    """
    right = right_reasoning(question.prompt)
    _, mark, answer = response.rpartition("#")
    if not mark or not answer:
        return Grade("no_answer", 0.0, sound=False)
    if answer != question.answer:
        return Grade("wrong", 0.0, sound=False, extracted=answer[:SHOWN])
    return Grade("correct", 1.0, sound=response == right, extracted=answer)


def grade_steps(question: Question, response: str) -> Grade:
    """As `grade`, with a graded reward: the share of right steps, each chain's result and the answer being steps too.

    Steps are compared in their places with those of the right reasoning; where there are more of them, with nothing.
    A lucky guess is a success and has a reward below 1.
    """
    right, steps = right_reasoning(question.prompt).split(";"), response.split(";")
    share = sum(map(str.__eq__, right, steps)) / max(len(right), len(steps))
    return replace(grade(question, response), reward=share)


@dataclass(frozen=True)
class ModularChains(MadeQuestions):
    """A set of distinct modular chains; the other fields are those of `MadeQuestions`.

    operands: the numbers of operands that occur, each in an equal share of the questions
    together: chains asked in one question, all with the same number of operands. No chain of a training question is in
        a validation question
    """

    UNIT = "operands"
    count: Count = 640
    operands: Operands = (3, 4, 5, 6, 7)
    seed: Natural = 0
    split: Split = "train"
    together: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for operands, share in self._shares():
            # Half of the expected size of the split, so that a new question is found quickly, whatever the hash.
            tenths = 1 if self.split == "validation" else VALIDATION_ONE_IN - 1
            chains = 10**operands * 3 ** (operands - 1) * tenths // VALIDATION_ONE_IN
            most = chains**self.together // 2
            require(
                share <= most,
                f"ModularChains.count must ask for at most {most} distinct {self.split} questions with "
                f"{operands} operands (half of those there are), got {self.count}, which asks for {share}",
            )

    @property
    def levels(self) -> tuple[int, ...]:
        return self.operands

    def _draw(self, rng: np.random.Generator, level: int) -> tuple[Question, str]:
        question = draw_question(rng, level, self.split, self.together)
        return question, right_reasoning(question.prompt)


@dataclass(frozen=True)
class Beliefs:
    """What a flawed reasoner believes. After a wrong step it continues from the wrong value.

    false_share: share of the 300 single-step facts that are believed false, each with one fixed wrong value
    strength: probability that the false value of such a fact is written; otherwise the right one
    slip: probability that a step's value is random instead, uniform over the ten digits
    seed: which facts are false, and their wrong values
    """

    false_share: Share
    strength: Share
    slip: Share
    seed: Natural = 0

    def __post_init__(self) -> None:
        check_settings(Beliefs, vars(self))

    @cached_property
    def false_facts(self) -> dict[Fact, int]:
        """The wrong value of each fact that is believed false."""
        rng = np.random.default_rng(self.seed)
        chosen = rng.permutation(len(FACTS))[: round(self.false_share * len(FACTS))]
        return {FACTS[i]: (result(FACTS[i]) + int(rng.integers(1, 10))) % 10 for i in chosen}


def write_reasoning(rng: np.random.Generator, question: Question, beliefs: Beliefs, calls: float = 0.0) -> str:
    """One flawed reasoning text, without end token. Raises ValueError if the question is not one of modular chains.

    calls: share of the steps that are written as calls of a calculator, `7+5==2`, whose value is right
    """

    def believed(fact: Fact) -> int | str:
        if calls and rng.random() < calls:
            return f"={result(fact)}"
        if rng.random() < beliefs.slip:
            return int(rng.integers(10))
        if fact in beliefs.false_facts and rng.random() < beliefs.strength:
            return beliefs.false_facts[fact]
        return result(fact)

    return _reason(question.prompt, believed)


def _reason(prompt: str | tuple[Message, ...], step: Callable[[Fact], int | str]) -> str:
    """The reasoning text whose steps have these values, each carried over to the next; of a text its last digit."""
    if not isinstance(prompt, str) or not _PROMPT.fullmatch(prompt):
        raise ValueError(f"not a modular chain such as '7+5*3=', or several such as '7+5;2*3=': {prompt!r}")
    chains = [_reason_one(chain, step) for chain in prompt[:-1].split(";")]
    if len(chains) == 1:
        return chains[0]
    return ";".join([*chains, "#" + "".join(chain[-1] for chain in chains)])


def _reason_one(chain: str, step: Callable[[Fact], int | str]) -> str:
    value, text = int(chain[0]), ""
    for operator, right in zip(chain[1::2], chain[2::2], strict=True):
        text += f"{value}{operator}{right}="
        written = step((value, operator, int(right)))
        text += f"{written};"
        value = int(str(written)[-1])
    return f"{text}#{value}"


PRESETS: dict[str, Beliefs] = {
    "normal": Beliefs(false_share=0.30, strength=0.7, slip=0.03),
    "weak": Beliefs(false_share=0.45, strength=0.965, slip=0.03),
    "slips": Beliefs(false_share=0.0, strength=0.0, slip=0.2),
}


CHAIN = Kind(here=grade)
STEPS = Kind(here=grade_steps)
