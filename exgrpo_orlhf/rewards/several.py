"""Several rewards for the same response: each graded by its own verifier, and their weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..metric_names import allowed_name
from ..records import Grade, Question, Verdict
from .answer import Written
from .grading import Answers, Graders, fits_format
from .sandbox.function import NAME, named


def name_of(reward: str) -> str:
    """Of a kind its name; of "file.py:name" name, of "file.py" the file's stem."""
    if not is_function(reward):
        return reward
    file, name = named(reward)
    return allowed_name(file.stem if name == NAME else name) or "reward"


def is_function(reward: str) -> bool:
    return reward.rpartition(":")[0].endswith(".py") or Path(reward).suffix == ".py"


class SeveralAnswers:
    """As `Answers`, for a verifier with several rewards."""

    def __init__(
        self,
        parts: Mapping[str, Graders],
        weights: Mapping[str, float],
        decides: str,
        required: str | None,
        pairs: Sequence[tuple[Question, Written | str]] = (),
        progress: tuple[int, int] = (0, 0),
    ) -> None:
        """parts, weights: of the verifier, by name; decides: which decides on success; required: the format"""
        self.answers = {name: Answers(part, pairs, progress, may_abstain=True) for name, part in parts.items()}
        self.weights, self.decides, self.required = weights, decides, required

    def add(self, pairs: Sequence[tuple[Question, Written | str]]) -> None:
        for each in self.answers.values():
            each.add(pairs)

    def grades(self) -> list[Grade]:
        columns = {name: each.grades() for name, each in self.answers.items()}
        first = next(iter(self.answers.values()))
        return [
            self._sum({name: own[i] for name, own in columns.items()}, fits_format(self.required, written))
            for i, (_, written) in enumerate(first.pairs)
        ]

    def _sum(self, grades: Mapping[str, Grade], fits: bool) -> Grade:
        """Σ w·r over the rewards that do not abstain. Not gradable where one fails, or all abstain; where the one that
        decides on success abstains, it is none."""
        failed = [grade for grade in grades.values() if grade.reward is None and not grade.abstains]
        rewards = {name: grade.reward for name, grade in grades.items() if grade.reward is not None}
        if failed or not rewards:
            return replace((failed or [*grades.values()])[0], logs=())
        decides = grades[self.decides]
        verdict: Verdict = "no_answer" if decides.abstains else decides.verdict
        total = sum(self.weights[name] * reward for name, reward in rewards.items())
        if not fits:
            verdict, total = "wrong" if verdict == "correct" else verdict, 0.0
        logs = tuple(pair for grade in grades.values() for pair in grade.logs)
        return Grade(verdict, total, decides.sound, decides.extracted, logs, tuple(rewards.items()))

    def give_up(self) -> None:
        for each in self.answers.values():
            each.give_up()
