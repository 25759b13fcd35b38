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

from .made_questions import OPERATIONS, Split, split_by_hash

MOST_STEPS = 4
LARGEST_RESULT = 999
Step = tuple[int, str, int, int]  # left operand, operator, right operand, result
Plot = tuple[str, ...]  # a beginning, events, an ending
Ranges = dict[str, tuple[int, int, int]]  # number → its smallest and largest value, and the distance between values

# Calculations, separated by ; → the values of each number. `value` is the quantity so far and `last` the result of the
# calculation before. The last result is the new quantity. Most of what is added or subtracted is a multiple of 10, and
# factors are small, because SmolLM2-135M hardly knows arithmetic: of one-step questions its samples answered 37 % after
# 800 worked solutions (docs/smollm2.md), and 24 % after 1,280 with any numbers up to 400.
BEGINNINGS: dict[str, Ranges] = {
    "": {"value": (11, 240, 1)},
    "a + b": {"a": (11, 120, 1), "b": (10, 180, 10)},
    "a - b": {"a": (61, 260, 1), "b": (10, 60, 10)},
    "a * b": {"a": (2, 9, 1), "b": (4, 39, 1)},
    "a + b; a + last": {"a": (5, 80, 1), "b": (10, 60, 10)},
    "a - b; a + last": {"a": (21, 120, 1), "b": (10, 60, 10)},
    "a * b; a + last": {"a": (4, 60, 1), "b": (2, 4, 1)},
    "a * b; c + last": {"a": (2, 9, 1), "b": (3, 12, 1), "c": (10, 150, 10)},
    "a * b; c * last": {"a": (2, 5, 1), "b": (2, 6, 1), "c": (2, 4, 1)},
}
EVENTS: dict[str, Ranges] = {
    "value + a": {"a": (10, 160, 10)},
    "value - a": {"a": (10, 90, 10)},
    "value * a": {"a": (2, 3, 1)},
    "a * b; value + last": {"a": (2, 6, 1), "b": (2, 10, 1)},
    "a * b; value - last": {"a": (2, 6, 1), "b": (2, 10, 1)},
}
ENDINGS: dict[str, Ranges] = {
    "": {},
    "value * a": {"a": (2, 3, 1)},
    "value / a": {"a": (2, 5, 1)},
    "value - a": {"a": (10, 120, 10)},
    "a - value": {"a": (60, 500, 10)},
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
        told = [self.beginnings[plot[0]], *(self.events[event] for event in plot[1:-1]), self.endings[plot[-1]]]
        return [part[split] for part in told]

    def plots(self, steps: int) -> list[Plot]:
        """All plots with this many calculations. No event occurs twice."""
        return [
            plot
            for count in range(steps + 1)
            for events in itertools.permutations(self.events, count)
            for plot in itertools.product(self.beginnings, *([event] for event in events), self.endings)
            if sum(len(calculations(part)) for part in plot) == steps
        ]


@cache
def scenes() -> dict[str, Scene]:
    """All scenes by name."""
    texts = tomllib.loads(Path(__file__).with_name("scenes.toml").read_text(encoding="utf-8"))
    return {name: Scene(**scene) for name, scene in texts.items()}


@cache
def _plots(name: str, steps: int) -> list[Plot]:
    return scenes()[name].plots(steps)


def calculations(part: str) -> list[tuple[str, ...]]:
    """(left operand, operator, right operand), by name, for each calculation of a part."""
    return [tuple(calculation.split()) for calculation in part.split(";") if calculation]


def calculate(left: int, operator: str, right: int) -> int | None:
    """The result; None where it is no whole number from 1 to LARGEST_RESULT."""
    if operator == "/":
        result, rest = divmod(left, right)
    else:
        result, rest = OPERATIONS[operator](left, right), 0
    return result if rest == 0 and 1 <= result <= LARGEST_RESULT else None


def split_of(done: Sequence[Step]) -> Split:
    """The split that a story with these calculations belongs to, whatever its words. 4 * 12 and 12 * 4 are the same."""
    numbers = [(op, *(sorted((left, right)) if op in "+*" else (left, right))) for left, op, right, _ in done]
    return split_by_hash(repr(numbers), b"word problems")


def tell(rng: np.random.Generator, steps: int, split: Split) -> tuple[str, list[Step]]:
    """A random story of the split with this many calculations: its text, and the calculations in order.

    The split has its own names, words, sentences and calculations. Scenes are equally frequent, and so are the plots
    of a scene, as far as numbers are found for them.
    """
    while True:
        name = str(rng.choice([*scenes()]))
        plots = _plots(name, steps)
        plot = plots[rng.integers(len(plots))]
        for _ in range(_TRIES):
            if (drawn := _draw_numbers(rng, plot)) and split_of(drawn[1]) == split:
                numbers, done = drawn
                return _write(rng, scenes()[name], plot, numbers, split), done


def _draw_numbers(rng: np.random.Generator, plot: Plot) -> tuple[list[dict[str, int]], list[Step]] | None:
    """The numbers of each part, and the calculations; None where a result is not as `calculate` wants it."""
    value, numbers, done = 0, [], list[Step]()
    for part, kinds in zip(plot, [BEGINNINGS, *[EVENTS] * (len(plot) - 2), ENDINGS], strict=True):
        own = {"value": value}
        for number, (least, most, apart) in kinds[part].items():
            own[number] = least + apart * int(rng.integers((most - least) // apart + 1))
        numbers.append(dict(own))
        value = own["value"]
        for first, operator, second in calculations(part):
            result = calculate(own[first], operator, own[second])
            if result is None:
                return None
            done.append((own[first], operator, own[second], result))
            value = own["last"] = result
    return numbers, done


def _write(rng: np.random.Generator, scene: Scene, plot: Plot, numbers: list[dict[str, int]], split: Split) -> str:
    things = scene.things[split]
    words: dict[str, Any] = dict(zip(scene.words, things[rng.integers(len(things))], strict=True))
    who = int(rng.integers(2))
    own, others = NAMES[split][who], NAMES[split][1 - who]
    words |= PRONOUNS[who] | {"name": str(rng.choice(own))}
    words |= zip(("friend", "helper", "rival"), rng.choice(others, 3, replace=False).tolist(), strict=True)
    told = zip(scene.sentences(plot, split), numbers, strict=True)
    return " ".join(known[rng.integers(len(known))].format(**words, **own_numbers) for known, own_numbers in told)
