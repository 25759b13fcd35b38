"""The kinds of verifiers by name, and the grader of each that is graded in workers, as their server loads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import Any

from ..checks import require
from ..grader.answer import Answer, Grading
from ..grader.grade import SHOWN, Grade
from ..grader.kind import Kind
from ..io.entry_points import entry_points_of, loaded
from ..workers.forking import check_memory

GROUP = "exgrpo_orlhf.graders"


@cache
def kind_named(name: str) -> Kind:
    """Raises ValueError with the names that there are."""
    points = entry_points_of(GROUP)
    require(name in points, f"Verifier.kind must be one of {', '.join(map(repr, points))}; got {name!r}")
    kind: Kind = loaded(points[name])
    return kind


def load(settings: Mapping[str, Any]) -> Grading:
    """The grader of a kind. Imports happen here, outside every answer's limit. Raises whatever is wrong with it."""
    kind = kind_named(settings["kind"])
    module, _, function = (kind.loads or "").partition(":")
    columns = {"columns": settings.get("columns")} if kind.whole else {}
    grader = getattr(import_module(module), function)(*(settings.get(name) for name in kind.settings), **columns)
    if not isinstance(grader, Grading):
        one = grader
        grader = Grading("response", lambda answers: [one(answer) for answer in answers])
    return grader._replace(grade=partial(_shortened, grader.grade, kind.whole))


def _shortened(grade: Callable[[Sequence[Answer]], list[Grade]], own: bool, answers: Sequence[Answer]) -> list[Grade]:
    """The grades, their texts cut off. own: of a user's function

    Where memory was nearly used up, a MemoryError may have been swallowed, as sympy does. Then no answer is taken for
    wrong; nor is a user's reward taken, whatever it is: else high rewards alone would be left of a group.
    """
    grades = grade(answers)
    if own or not all(item.correct for item in grades):
        check_memory()
    return [
        replace(item, extracted=item.extracted and item.extracted[:SHOWN], reason=item.reason and item.reason[:SHOWN])
        for item in grades
    ]
