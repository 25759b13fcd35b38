"""Word problems: short stories in plain English whose answer takes one to four calculations.

A worked solution states each calculation and then the answer: `4 * 12 = 48. 48 - 9 = 39. The answer is 39.` Every
result is a whole number from 1 to 999. The most frequent answer to training questions with the same number of steps is
rarer than one in a hundred, so a guess is hardly ever right.

A response's answer is graded, and its calculations are checked: where the answer is right, and a calculation is wrong,
uses a number that is neither given nor calculated before, or has a result that is not used, the answer is a lucky
guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ..checks import Count, Natural, require
from ..grader.grade import SHOWN, Grade
from ..grader.kind import Kind
from ..records import Question
from .made_questions import MadeQuestions, Split, Steps
from .stories import MOST_STEPS, Step, tell

SOURCE = "word_problems"
MOST_QUESTIONS = 100_000  # with the same number of steps; in the smaller split there are a few times as many

_DIGITS = 12  # a number with more of them is in no right calculation, and converting a very long one takes long
# Groups are atomic, (?>…), not possessive: those are matched wrongly by Python before 3.11.5 (gh-106052).
_NUMBER = r"[0-9]++(?>(?:,[0-9]{3}(?![0-9]))*)(?>(?:\.[0-9]++)?)"
_SIGNS = str.maketrans("×·÷−", "**/-")
_ANSWER = re.compile(r"answer\s+is\b", re.IGNORECASE)
_STATED = re.compile(rf"[\s:]*+[*$]*+\s*+(-?{_NUMBER})")
# The stated number is only a part of what is stated. All is possessive or atomic, so a match takes linear time.
_GOES_ON = re.compile(
    r"""
      (?:[.]|[^\S\n]*+(?:[.]{2,}+|…)[^\S\n]*+) \d                     # 39.5.1, 39...40
    | e[-+]?+\d                                                       # 39e2
    | [^\S\n]*+[*$)]*+[^\S\n]*+ (?:                                   # after the end of **39** or $39$
          \\?+[%‰] | [¹²³⁰-⁹¼-¾⅐-⅞]                                   # 39%, 39½
        | (?:per[ ]?cent|hundred|thousand|million|billion|k)\b
        | and[ ]a[ ](?:half|third|quarter)\b
        | [a-z]++[*)]*+,?+[^\S\n]++or[^\S\n]++[*$]*+\d                # 39 apples or 40
        | (?>(?:dollars?\b)?)[^\S\n]*+(?>(?:                          # 39, or 40; 39 (or 40); 39 plus 1; 39 x 2; 39 40
              [,;(]?+[^\S\n]*+(?:or|to|and|but|plus|minus|times|divided[ ]by)\b
            | \\[a-z]++
            | [-–—+*/=^,;:|~x<>≠≈'’_({]++
          )?)[^\S\n]*+[*$({]*+\d
      )
    """,
    re.IGNORECASE | re.VERBOSE,
)
_BULLET = re.compile(r"^[ \t]*+[-*][ \t]++", re.MULTILINE)
_TOKEN = re.compile(rf"({_NUMBER}|[-+*/=])|(?<=[0-9 ])([xX])(?=[0-9 ])|[ \t$]++|(.)", re.DOTALL)


def write_solution(steps: Sequence[Step], calls: bool) -> str:
    """The worked solution, without end token. calls: as in `WordProblems`"""
    begin, end = ("<calc>", "</calc>") if calls else ("", "")
    stated = "".join(f"{begin}{left} {operator} {right}{end} = {result}. " for left, operator, right, result in steps)
    return f"{stated}The answer is {steps[-1][3]}."


def grade(question: Question, response: str) -> Grade:
    """Compare the number after the last `answer is` with the gold answer, and check the calculations before it.

    The response is the decoded text without its end token. The number may have a dollar sign before it and a unit
    after it; 39.0 and 039 are 39, and 1,024 is one number. A number that goes on (39/2, 39 or 40, 39 thousand) is a
    wrong answer; no number directly after the last `answer is` is no answer.

    The reasoning is sound if every equation is one calculation (`4 * 12 = 48`; × and x are * too, ÷ is /, decimals and
    thousands separators are read) with the right result, each of its operands is a number of the question or an earlier
    result, all numbers of the question are used, every result but the last is used later, and the last one is the
    answer. A chain (4 * 12 = 48 - 9 = 39) says something false, so it is not sound. Words between equations and
    bullets of a list are ignored; words within an equation make it unreadable, and so not sound.

    Never raises on a response; raises ValueError if the question is not a word problem.
    """
    numbers = _numbers(question)
    response = response.translate(_SIGNS)
    matches = [*_ANSWER.finditer(response)]
    number = _STATED.match(response, matches[-1].end()) if matches else None
    if not number:
        return Grade("no_answer", 0.0, sound=False)
    extracted, gold = number[1][:SHOWN], Fraction(question.answer)
    if _GOES_ON.match(response, number.end()) or _value(number[1]) != gold:
        return Grade("wrong", 0.0, sound=False, extracted=extracted)
    sound = _is_sound(numbers, response[: matches[-1].start()], gold)
    return Grade("correct", 1.0, sound=sound, extracted=extracted)


@dataclass(frozen=True)
class WordProblems(MadeQuestions):
    """A set of distinct word problems; the other fields are those of `MadeQuestions`.

    Training and validation questions have no name, thing or sentence in common, and no list of calculations.

    steps: the numbers of calculations that occur, 1 to 4, each in an equal share of the questions
    calls: whether the worked solutions, from which a supervised start learns, call for each result:
        `<calc>4 * 12</calc> = 48.` (docs/episodes.md)
    """

    UNIT = "calculations"
    count: Count = 2000
    steps: Steps = (1, 2)
    seed: Natural = 0
    split: Split = "train"
    calls: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(max(self.steps) <= MOST_STEPS, f"WordProblems.steps must be at most {MOST_STEPS}, got {self.steps!r}")
        most = MOST_QUESTIONS * len(self.steps)
        require(
            self.count <= most,
            f"WordProblems.count must be at most {most:,} ({MOST_QUESTIONS:,} for each of WordProblems.steps), "
            f"got {self.count:,}",
        )

    @property
    def levels(self) -> tuple[int, ...]:
        return self.steps

    def _draw(self, rng: np.random.Generator, level: int) -> tuple[Question, str]:
        prompt, steps = tell(rng, level, self.split)
        question = Question.make(SOURCE, prompt, str(steps[-1][3]), {"steps": level})
        return question, write_solution(steps, self.calls)


def _numbers(question: Question) -> set[Fraction]:
    """The numbers of the question."""
    prompt = question.prompt
    numbers = {Fraction(number) for number in re.findall("[0-9]+", prompt)} if isinstance(prompt, str) else set()
    if not numbers or not re.fullmatch("[0-9]{1,3}", question.answer):
        raise ValueError(f"not a word problem with numbers and an answer from 1 to 999: {prompt!r:.200}")
    return numbers


def _value(number: str) -> Fraction | None:
    """None for a sign, and for a number with too many digits."""
    return Fraction(number.replace(",", "")) if number not in "+-*/=" and len(number) <= _DIGITS else None


def _is_sound(numbers: set[Fraction], reasoning: str, answer: Fraction) -> bool:
    operands, used = set(numbers), set[Fraction]()  # operands: the question's numbers and the results so far
    unused = set[Fraction]()  # results that no later calculation has used; the last result is always among them
    for equation in _equations(reasoning):
        match equation:
            case [first, ("+" | "-" | "*" | "/") as operator, second, "=", third]:
                left, right, result = _value(first), _value(second), _value(third)
            case _:
                return False
        if left not in operands or right not in operands or result is None:
            return False
        if _calculate(left, operator, right) != result:
            return False
        used |= {left, right}
        unused = (unused - {left, right}) | {result}
        operands.add(result)
    return unused == {answer} and numbers <= used


def _equations(text: str) -> Iterator[list[str]]:
    """The numbers and signs of each stretch of text that has nothing else in it, if there is an equals sign. The bullet
    of a list is no minus, and its number is in no stretch: of `1. 4 * 12 = 48` the full stop ends one."""
    stretch: list[str] = []
    for sign, times, other in _TOKEN.findall(_BULLET.sub("", text)):
        if sign or times:
            stretch.append(sign or "*")
        elif other:
            if "=" in stretch:
                yield stretch
            stretch = []
    if "=" in stretch:
        yield stretch


def _calculate(left: Fraction, operator: str, right: Fraction) -> Fraction | None:
    """None for a division by 0."""
    if operator == "/":
        return left / right if right else None
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


KIND = Kind(here=grade)
