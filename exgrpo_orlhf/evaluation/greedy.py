"""Greedy accuracy on validation questions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from ..replay import Question, Rollout
from ..rewards import Verifier


def greedy_accuracy(
    questions: Sequence[Question],
    answer: Callable[[Sequence[Question]], list[Rollout]],
    decode: Callable[[np.ndarray], str],
    verifier: Verifier,
) -> dict[str, float]:
    """Share of questions that the greedy response solves, in all and by number of operands where questions have one.

    lucky_guess_rate: of the correct responses whose reasoning was checked, those in which it does not hold
    """
    correct: dict[str, list[bool]] = defaultdict(list)
    sound: list[bool] = []
    responses = [decode(rollout.token_ids) for rollout in answer(questions)]
    grades = verifier.grade_all(list(zip(questions, responses, strict=True)))
    for question, grade in zip(questions, grades, strict=True):
        correct["eval/greedy_accuracy"].append(grade.correct)
        if "operands" in question.meta:
            correct[f"eval/greedy_accuracy_{question.meta['operands']}_operands"].append(grade.correct)
        if grade.correct and grade.sound is not None:
            sound.append(grade.sound)
    metrics = {name: float(np.mean(values)) for name, values in sorted(correct.items())}
    metrics["eval/lucky_guess_rate"] = sound.count(False) / len(sound) if sound else 0.0
    return metrics
