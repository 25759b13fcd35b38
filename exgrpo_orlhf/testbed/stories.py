"""The stories of word problems, told from the sentences of scenes.toml.

A scene is a kind of story. It follows one quantity: a beginning gives its value, events change it, and an ending asks
for it or for something calculated from it. Within a scene every beginning fits every event and every ending, and the
things that occur there.

A sentence is a template. {name} is the person the story is about, with the pronouns {she}, {her} (possessive) and
{to_her} ({She} and {Her} at the beginning of a sentence). {friend}, {helper} and {rival} are others, who have the other
pronouns, so that it is clear who is meant. {value}, {a}, {b} and {c} are numbers; what else stands in braces is a word
of the scene. Names, words and sentences each belong to one split.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .made_questions import OPERATIONS, Split, split_by_hash

MOST_STEPS = 4
LARGEST_RESULT = 999
Step = tuple[int, str, int, int]  # left operand, operator, right operand, result
Numbers = npt.NDArray[np.integer[Any]]
Plot = tuple[str, ...]  # a beginning, events, an ending
Ranges = dict[str, tuple[int, int]]  # number → its smallest and largest value

# Calculations, separated by ; → the values of each number. `value` is the quantity so far and `last` the result of the
# calculation before. The last result is the new quantity.
BEGINNINGS: dict[str, Ranges] = {
    "": {"value": (11, 699)},
    "a + b": {"a": (11, 599), "b": (2, 500)},
    "a - b": {"a": (21, 899), "b": (2, 500)},
    "a * b": {"a": (2, 5), "b": (10, 444)},
    "a + b; a + last": {"a": (11, 244), "b": (2, 200)},
    "a - b; a + last": {"a": (21, 444), "b": (2, 200)},
    "a * b; a + last": {"a": (11, 244), "b": (2, 4)},
    "a * b; c + last": {"a": (2, 5), "b": (10, 122), "c": (10, 299)},
    "a * b; c * last": {"a": (2, 4), "b": (10, 122), "c": (2, 4)},
}
EVENTS: dict[str, Ranges] = {
    "value + a": {"a": (2, 500)},
    "value - a": {"a": (2, 500)},
    "value * a": {"a": (2, 4)},
    "a * b; value + last": {"a": (2, 4), "b": (10, 122)},
    "a * b; value - last": {"a": (2, 4), "b": (10, 122)},
}
ENDINGS: dict[str, Ranges] = {
    "": {},
    "value * a": {"a": (2, 3)},
    "value / a": {"a": (2, 4)},
    "value - a": {"a": (2, 500)},
    "a - value": {"a": (60, 799)},
}

# (pronouns, names)
NAMES: dict[Split, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "train": (
        ("Anna", "Carla", "Emma", "Grace", "Ines", "Lena", "Maria", "Olga", "Rosa", "Tara", "Yuki", "Zoe"),
        ("Ben", "David", "Farid", "Hugo", "Jack", "Kenji", "Noah", "Paul", "Sam", "Victor", "Omar", "Luis"),
    ),
    "validation": (
        ("Clara", "Fiona", "Greta", "Mei", "Priya", "Nadia"),
        ("Amir", "Diego", "Ivan", "Oscar", "Tom", "Kofi"),
    ),
}  # fmt: skip
PRONOUNS = (
    {"she": "she", "her": "her", "to_her": "her", "She": "She", "Her": "Her"},
    {"she": "he", "her": "his", "to_her": "him", "She": "He", "Her": "His"},
)

_TRIES = 200  # of a plot with other numbers, before another plot
_FEWEST_DIFFERENCES = 6  # that numbers of a part must allow


@dataclass(frozen=True)
class Scene:
    """A kind of story.

    words: names of its words; things: what they can stand for together, by split
    beginnings, events, endings: calculations (keys of BEGINNINGS, EVENTS, ENDINGS) → their sentences by split; those of
        an ending hold the question
    """

    words: list[str]
    things: dict[Split, list[list[str]]]
    beginnings: dict[str, dict[Split, list[str]]]
    events: dict[str, dict[Split, list[str]]]
    endings: dict[str, dict[Split, list[str]]]

    def sentences(self, plot: Plot, split: Split) -> list[list[str]]:
        """The sentences to choose from, for each part of a plot."""
        parts = [self.beginnings[plot[0]], *(self.events[event] for event in plot[1:-1]), self.endings[plot[-1]]]
        return [part[split] for part in parts]


@cache
def scenes() -> dict[str, Scene]:
    """All scenes by name."""
    texts = tomllib.loads(Path(__file__).with_name("scenes.toml").read_text(encoding="utf-8"))
    return {name: Scene(**scene) for name, scene in texts.items()}


@cache
def plots(name: str, steps: int) -> list[Plot]:
    """All plots of a scene with this many calculations. No event occurs twice."""
    scene = scenes()[name]
    return [
        plot
        for count in range(steps + 1)
        for events in itertools.permutations(scene.events, count)
        for plot in itertools.product(scene.beginnings, *([event] for event in events), scene.endings)
        if sum(len(calculations(part)) for part in plot) == steps
    ]


@cache
def calculations(part: str) -> list[tuple[str, ...]]:
    """(left operand, operator, right operand), by name, for each calculation of a part."""
    return [tuple(calculation.split()) for calculation in part.split(";") if calculation]


def is_plain(left: Numbers, operator: str, right: Numbers) -> npt.NDArray[np.bool_]:
    """Whether each calculation with numbers up to 999 is done digit by digit, (N,) bool: a sum carries nothing, a
    difference borrows nothing, a product has a factor of one digit and carries nothing, a quotient times its divisor
    is such a product.

    All calculations are plain, because SmolLM2-135M hardly knows arithmetic: with carries, half of its samples to
    one-step questions stated the right calculation with a wrong result, and RL hardly changed that.
    """
    if operator == "/":
        return np.asarray(is_plain(left // right, "*", right) & (left % right == 0), bool)
    if operator == "*":
        left, right = np.maximum(left, right), np.minimum(left, right)
        return np.asarray((right <= 9) & (_digits(left) * right[:, None] <= 9).all(-1), bool)
    upper, lower = _digits(left), _digits(right)
    digitwise = upper >= lower if operator == "-" else upper + lower <= 9
    return np.asarray(digitwise.all(-1), bool)


def _digits(numbers: Numbers) -> Numbers:
    """(N, 3): ones, tens and hundreds"""
    digits: Numbers = numbers[:, None] // np.array([1, 10, 100]) % 10
    return digits


def split_of(calculated: Sequence[Step]) -> Split:
    """The split that a story with these calculations belongs to, whatever its words. 4 * 12 and 12 * 4 are the same."""
    numbers = [(op, *(sorted((left, right)) if op in "+*" else (left, right))) for left, op, right, _ in calculated]
    return split_by_hash(repr(numbers), b"word problems")


def tell(rng: np.random.Generator, steps: int, split: Split) -> tuple[str, list[Step]]:
    """A random story of the split with this many calculations: its text, and the calculations in order.

    The split has its own names, words, sentences and calculations. Scenes are equally frequent, and so are the plots
    of a scene, as far as numbers are found for them.
    """
    while True:
        name = str(rng.choice([*scenes()]))
        possible = plots(name, steps)
        plot = possible[rng.integers(len(possible))]
        for _ in range(_TRIES):
            if (drawn := _draw_numbers(rng, plot)) and split_of(drawn[1]) == split:
                numbers, calculated = drawn
                return _write(rng, scenes()[name], plot, numbers, split), calculated


def _draw_numbers(rng: np.random.Generator, plot: Plot) -> tuple[list[dict[str, int]], list[Step]] | None:
    """The numbers of each part, and the calculations; None where a part has no numbers for the quantity it gets."""
    value, numbers, calculated = 0, [], list[Step]()
    for part, kinds in zip(plot, [BEGINNINGS, *[EVENTS] * (len(plot) - 2), ENDINGS], strict=True):
        possible = _possible_numbers(part, tuple(kinds[part].items()), value)
        if len(possible) == 0:
            return None
        named = {"value": value} | dict(zip(kinds[part], possible[rng.integers(len(possible))].tolist(), strict=True))
        numbers.append(dict(named))
        value = named["value"]
        for first, operator, second in calculations(part):
            value = OPERATIONS[operator](named[first], named[second])
            calculated.append((named[first], operator, named[second], value))
            named["last"] = value
    return numbers, calculated


@cache
def _possible_numbers(part: str, ranges: tuple[tuple[str, tuple[int, int]], ...], value: int) -> Numbers:
    """All numbers within their ranges with plain calculations and results from 11 to LARGEST_RESULT, (N, numbers).

    What is added or taken away has one digit that is not 0, as far as it can be chosen. Left out are answers that would
    be frequent: round hundreds, repeated digits, the thirds of 399 and 699, and subtractions where few are possible.
    """
    grid = np.meshgrid(*(np.arange(least, most + 1) for _, (least, most) in ranges))
    numbers = np.stack([axis.ravel() for axis in grid], -1) if grid else np.zeros((1, 0), int)
    named = {"value": np.full(len(numbers), value)} | {name: numbers[:, i] for i, (name, _) in enumerate(ranges)}
    fit = np.ones(len(numbers), bool)
    for first, operator, second in calculations(part):
        left, right = named[first], named[second]
        result = named["last"] = OPERATIONS[operator](left, right)
        fit &= is_plain(left, operator, right) & (result >= 11) & (result <= LARGEST_RESULT)
        if operator in "+-" and second in dict(ranges):
            fit &= (_digits(right) > 0).sum(-1) == 1
        fit &= (result % 100 > 0) & (result % np.where(result < 100, 11, 111) > 0)
        if operator == "/":
            fit &= result % 100 != 33
    possible: Numbers = numbers[fit].astype(np.int16)
    return possible[:0] if "-" in part and len(possible) < _FEWEST_DIFFERENCES else possible


def _write(rng: np.random.Generator, scene: Scene, plot: Plot, numbers: list[dict[str, int]], split: Split) -> str:
    things = scene.things[split]
    words: dict[str, Any] = dict(zip(scene.words, things[rng.integers(len(things))], strict=True))
    gender = int(rng.integers(2))
    names, others = NAMES[split][gender], NAMES[split][1 - gender]
    words |= PRONOUNS[gender] | {"name": str(rng.choice(names))}
    words |= zip(("friend", "helper", "rival"), rng.choice(others, 3, replace=False).tolist(), strict=True)
    parts = zip(scene.sentences(plot, split), numbers, strict=True)
    return " ".join(choices[rng.integers(len(choices))].format(**words, **of_part) for choices, of_part in parts)
