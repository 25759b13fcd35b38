"""The sentences of word problems: what a story is about, and how its steps are told.

A story follows one quantity of a thing. Sentences are templates: {name} is the person, {other} another one, {thing} the
thing in the plural, {box} and {boxes} what it is kept in, {a}, {b}, {c} numbers. Every sentence belongs to one split, so
that validation questions use things, names and sentences that no training question has.
"""

from __future__ import annotations

from dataclasses import dataclass

from .made_questions import Split

NAMES: dict[Split, tuple[str, ...]] = {
    "train": (
        "Anna", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jack",
        "Kenji", "Lena", "Maria", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tara", "Victor",
    ),
    "validation": ("Amir", "Clara", "Diego", "Fiona", "Greta", "Ivan", "Mei", "Oscar", "Priya", "Tom"),
}  # fmt: skip

# (thing, container, containers)
THINGS: dict[Split, tuple[tuple[str, str, str], ...]] = {
    "train": (
        ("apples", "basket", "baskets"),
        ("marbles", "bag", "bags"),
        ("books", "shelf", "shelves"),
        ("stickers", "sheet", "sheets"),
        ("eggs", "carton", "cartons"),
        ("pencils", "box", "boxes"),
        ("cookies", "tray", "trays"),
        ("flowers", "vase", "vases"),
        ("cards", "pack", "packs"),
        ("chairs", "row", "rows"),
        ("coins", "jar", "jars"),
        ("shells", "bucket", "buckets"),
    ),
    "validation": (
        ("stamps", "envelope", "envelopes"),
        ("bottles", "crate", "crates"),
        ("beads", "tube", "tubes"),
        ("lemons", "sack", "sacks"),
        ("candles", "drawer", "drawers"),
    ),
}


@dataclass(frozen=True)
class Kind:
    """One way a story can begin, go on or end.

    steps: the calculations it adds, each (left, operator, right); a name stands for one of its own numbers, 'value' for
        the quantity so far and 'last' for the result of the step before. The last result is the new quantity.
    numbers: name → smallest and largest value
    told: its sentences by split; those of an ending hold the story's question
    """

    steps: tuple[tuple[str, str, str], ...]
    numbers: dict[str, tuple[int, int]]
    told: dict[Split, tuple[str, ...]]


BEGINNINGS: tuple[Kind, ...] = (
    Kind(
        (),
        {"value": (5, 150)},
        {
            "train": (
                "{name} has {value} {thing}.",
                "There are {value} {thing} on {name}'s table.",
                "{name} collects {value} {thing} in the morning.",
            ),
            "validation": ("{name} starts the day with {value} {thing}.", "In {name}'s room there are {value} {thing}."),
        },
    ),
    Kind(
        (("a", "*", "b"),),
        {"a": (2, 15), "b": (3, 25)},
        {
            "train": (
                "{name} has {a} {boxes} with {b} {thing} in each.",
                "{name} fills {a} {boxes}. Each {box} holds {b} {thing}.",
                "There are {a} {boxes} in {name}'s shop, and every {box} has {b} {thing}.",
            ),
            "validation": (
                "{name} carries {a} {boxes}, each with {b} {thing}.",
                "A truck brings {a} {boxes} of {b} {thing} each to {name}.",
            ),
        },
    ),
    Kind(
        (("a", "+", "b"),),
        {"a": (5, 150), "b": (5, 150)},
        {
            "train": (
                "{name} has {a} red {thing} and {b} blue {thing}.",
                "{name} finds {a} {thing} on Monday and {b} {thing} on Tuesday.",
            ),
            "validation": ("{name} has {a} large {thing} and {b} small {thing}.",),
        },
    ),
    Kind(
        (("a", "+", "b"), ("a", "+", "last")),
        {"a": (5, 120), "b": (3, 80)},
        {
            "train": (
                "{name} has {a} {thing}. {other} has {b} more {thing} than {name}. They put all their {thing} together.",
                "On Monday {name} makes {a} {thing}. On Tuesday {name} makes {b} more than on Monday. "
                "All the {thing} are kept.",
            ),
            "validation": (
                "{name} brings {a} {thing}, and {other} brings {b} more {thing} than {name}. All of them go to {name}.",
            ),
        },
    ),
    Kind(
        (("a", "*", "b"), ("a", "+", "last")),
        {"a": (5, 80), "b": (2, 6)},
        {
            "train": (
                "{name} has {a} {thing}. {other} has {b} times as many {thing} and gives all of them to {name}.",
                "In May {name} sells {a} {thing}. In June {name} sells {b} times as many as in May.",
            ),
            "validation": (
                "{name} buys {a} {thing} in the first week and {b} times as many in the second week.",
            ),
        },
    ),
)

EVENTS: tuple[Kind, ...] = (
    Kind(
        (("value", "+", "a"),),
        {"a": (3, 150)},
        {
            "train": (
                "Then {name} gets {a} more {thing}.",
                "{other} gives {name} {a} more {thing}.",
                "Later {a} {thing} are added.",
            ),
            "validation": ("After lunch another {a} {thing} arrive.", "A friend adds {a} {thing}."),
        },
    ),
    Kind(
        (("value", "-", "a"),),
        {"a": (3, 150)},
        {
            "train": (
                "Then {name} gives away {a} {thing}.",
                "{other} takes {a} of the {thing}.",
                "{a} {thing} are lost on the way.",
            ),
            "validation": ("In the evening {a} {thing} are thrown away.", "{name} sends {a} of the {thing} to {other}."),
        },
    ),
    Kind(
        (("a", "*", "b"), ("value", "+", "last")),
        {"a": (2, 12), "b": (2, 15)},
        {
            "train": (
                "Then {name} buys {a} more {boxes} of {b} {thing} each.",
                "{other} brings {a} {boxes} with {b} {thing} in each.",
            ),
            "validation": ("{name} orders {a} extra {boxes}, with {b} {thing} in every {box}.",),
        },
    ),
    Kind(
        (("a", "*", "b"), ("value", "-", "last")),
        {"a": (2, 12), "b": (2, 15)},
        {
            "train": (
                "Then {name} gives {b} {thing} to each of {a} friends.",
                "{name} sells {a} {boxes} of {b} {thing} each.",
            ),
            "validation": ("Each of {a} visitors takes {b} {thing} home.",),
        },
    ),
)

ENDINGS: tuple[Kind, ...] = (
    Kind(
        (),
        {},
        {
            "train": ("How many {thing} are there now?", "How many {thing} is that in the end?"),
            "validation": ("What is the number of {thing} at the end?",),
        },
    ),
    Kind(
        (("value", "*", "a"),),
        {"a": (2, 9)},
        {
            "train": (
                "{name} sells all of the {thing} for {a} dollars each. How many dollars does {name} get?",
                "Each of the {thing} weighs {a} grams. How many grams do all of them weigh?",
            ),
            "validation": ("One of the {thing} costs {a} dollars. How many dollars do all of them cost?",),
        },
    ),
    Kind(
        (("value", "/", "a"),),
        {"a": (2, 12)},
        {
            "train": (
                "{name} shares the {thing} equally among {a} children. How many {thing} does each child get?",
                "All the {thing} are put into {boxes} of {a}. How many {boxes} are needed?",
            ),
            "validation": ("The {thing} are split equally between {a} teams. How many {thing} does one team get?",),
        },
    ),
)
