"""The grader of each kind that is graded in workers, as their server loads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..grader.answer import Answer, Grader, Grading
from ..grader.grade import SHOWN, Grade
from ..workers.forking import check_memory


def load(settings: Mapping[str, Any]) -> Grading:
    """The grader of a kind. Imports happen here, outside every answer's limit. Raises whatever is wrong with it."""
    if settings["kind"] == "function":
        from . import function

        options = [settings.get(name) for name in ("tool", "gets", "columns")]
        calls, grade = function.grading(settings["function"], settings["success_at"], *options)
        return Grading(calls, partial(_shortened, grade))
    grader = _text_grader(settings)
    return Grading("response", partial(_shortened, lambda answers: [grader(answer) for answer in answers]))


def _text_grader(settings: Mapping[str, Any]) -> Grader:
    kind = settings["kind"]
    if kind in ("math", "math_verify"):
        from ..grader import math

        return math.warm_grader() if kind == "math" else math.grade_by_math_verify
    if kind == "choice":
        from ..grader import choice

        return choice.grade
    if kind == "reasoning_gym":
        from ..testbed import gym_grader as gym

        return gym.grader(settings["success_at"], settings["memory"])
    from ..sandbox import code

    return code.grader(settings["timeout"], settings["memory"])


def _shortened(grade: Callable[[Sequence[Answer]], list[Grade]], answers: Sequence[Answer]) -> list[Grade]:
    """The grades, their texts cut off."""
    grades = grade(answers)
    if not all(item.correct for item in grades):
        check_memory()
    return [
        replace(item, extracted=item.extracted and item.extracted[:SHOWN], reason=item.reason and item.reason[:SHOWN])
        for item in grades
    ]
