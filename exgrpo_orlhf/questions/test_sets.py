"""Test questions, on which no checkpoint may be chosen: a door for the parts and distributions that have some.

An entry point of the group `exgrpo_orlhf.test_sets` is a function: the name of a suite → its sets. It raises ValueError
for a suite that it does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from ..io.entry_points import entry_points_of, loaded
from ..records import Question


class TestSet(NamedTuple):
    """source: where the questions are; questions: None: they are not there"""

    title: str
    source: str
    questions: Sequence[Question] | None


def sets_of(suite: str) -> Iterator[TestSet]:
    """All sets of a suite, each read when it is its turn. Raises ValueError at once if there is no such suite."""
    return chain(*[loaded(point)(suite) for point in entry_points_of("exgrpo_orlhf.test_sets").values()])
