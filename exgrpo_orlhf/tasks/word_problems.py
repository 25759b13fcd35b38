"""Word problems: short stories in plain English whose answer takes one to four calculations.

A worked solution states each calculation and then the answer: `4 * 12 = 48. 48 - 9 = 39. The answer is 39.` Answers lie
between 1 and 999 and the most frequent one is rarer than one in a hundred, so a guess is hardly ever right.

A response's answer is graded, and its calculations are checked: where the answer is right, and a calculation is wrong, uses
a number from nowhere, or leads nowhere, the answer is a lucky guess.
"""

# No postponed annotations: those of inherited fields would be looked up in the module of the class that inherits them.
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..records import Grade, Message, Question
from .made_questions import SHOWN, Split, split_by_hash
from .stories import BEGINNINGS, ENDINGS, EVENTS, NAMES, THINGS, Kind

SOURCE = "word_problems"
LARGEST_VALUE = 999  # of a result
MOST_STEPS = 4

Step = tuple[int, str, int, int]  # left operand, operator, right operand, result

_NUMBER = re.compile(r"[0-9]+")
_STATED = re.compile(r"([0-9]{1,9}) *([-+*/]) *([0-9]{1,9}) *= *([0-9]{1,9})(?![0-9])")
_ANSWER = re.compile(r"answer is +([0-9]+)", re.IGNORECASE)


def calculate(left: int, operator: str, right: int) -> int | None:
    """The result, or None where it is no whole number from 0 on."""
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right if left >= right else None
        case "*":
            return left * right
        case "/":
            return left // right if right and left % right == 0 else None
    raise ValueError(f"operator must be one of '+-*/', got {operator!r}")


def draw_problem(rng: np.random.Generator, steps: int, split: Split) -> tuple[Question, str]:
    """A random question of the split with this many calculations, and its worked solution.

    The split has its own things, names and sentences, and its own numbers: a hash of the calculations decides.
    """
    while True:
        kinds = _draw_plot(rng, steps)
        told = _tell(rng, kinds, split)
        if told is None:
            continue
        prompt, done = told
        calculations = " ".join(f"{left}{operator}{right}" for left, operator, right, _ in done)
        if split_by_hash(calculations, b"word problems") == split:
            answer = str(done[-1][3])
            return Question.make(SOURCE, prompt, answer, {"steps": steps}), write_solution(done)


def write_solution(steps: list[Step]) -> str:
    """The worked solution, without end token."""
    stated = "".join(f"{left} {operator} {right} = {result}. " for left, operator, right, result in steps)
    return f"{stated}The answer is {steps[-1][3]}."


def grade(question: Question, response: str) -> Grade:
    """Compare the number after the last `answer is` with the gold answer, and check the calculations before it.

    The reasoning is sound if there is at least one calculation, each is right, each number in it stands in the question
    or is the result of one before, every result but the last is used later, and the last one is the answer. Never raises
    on a response.
    """
    stated = list(_ANSWER.finditer(response))
    if not stated:
        return Grade("no_answer", 0.0, sound=False)
    answer = stated[-1].group(1).lstrip("0") or "0"
    if answer != question.answer:
        return Grade("wrong", 0.0, sound=False, extracted=answer[:SHOWN])
    sound = _is_sound(_text_of(question.prompt), response[: stated[-1].start()], int(answer))
    return Grade("correct", 1.0, sound=sound, extracted=answer)


def _is_sound(prompt: str, reasoning: str, answer: int) -> bool:
    given = {int(number) for number in _NUMBER.findall(prompt)}
    unused: list[int] = []  # results that no later calculation has used
    known = set(given)
    for match in _STATED.finditer(reasoning):
        left, right, result = int(match[1]), int(match[3]), int(match[4])
        if calculate(left, match[2], right) != result or not {left, right} <= known:
            return False
        unused = [value for value in unused if value not in (left, right)] + [result]
        known.add(result)
    return unused == [answer]


def _text_of(prompt: str | tuple[Message, ...]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(content for _, content in prompt)


def _draw_plot(rng: np.random.Generator, steps: int) -> list[Kind]:
    """A beginning, events and an ending whose calculations are this many."""
    plots = _PLOTS[steps]
    return plots[rng.integers(len(plots))]


def _plots(steps: int) -> Iterator[list[Kind]]:
    def events(left: int) -> Iterator[list[Kind]]:
        if left == 0:
            yield []
        for event in EVENTS:
            if len(event.steps) <= left:
                yield from ([event, *more] for more in events(left - len(event.steps)))

    for beginning in BEGINNINGS:
        for ending in ENDINGS:
            left = steps - len(beginning.steps) - len(ending.steps)
            if left >= 0:
                yield from ([beginning, *middle, ending] for middle in events(left))


_PLOTS = {steps: list(_plots(steps)) for steps in range(1, MOST_STEPS + 1)}


def _tell(rng: np.random.Generator, kinds: list[Kind], split: Split) -> tuple[str, list[Step]] | None:
    """The text and its calculations; None where a result is no whole number from 1 to LARGEST_VALUE."""
    thing, box, boxes = THINGS[split][rng.integers(len(THINGS[split]))]
    name, other = (NAMES[split][i] for i in rng.choice(len(NAMES[split]), 2, replace=False))
    words: dict[str, Any] = {"thing": thing, "box": box, "boxes": boxes, "name": name, "other": other}
    value, sentences, done = 0, [], list[Step]()
    for kind in kinds:
        numbers = {"value": value} | {
            number: int(rng.integers(least, most + 1)) for number, (least, most) in kind.numbers.items()
        }
        for first, operator, second in kind.steps:
            left, right = numbers[first], numbers[second]
            result = calculate(left, operator, right)
            if result is None or not 1 <= result <= LARGEST_VALUE or right == 1:
                return None
            done.append((left, operator, right, result))
            numbers["last"] = result
        value = numbers["last"] if kind.steps else numbers["value"]
        sentences.append(kind.told[split][rng.integers(len(kind.told[split]))].format(**words, **numbers))
    return " ".join(sentences), done
