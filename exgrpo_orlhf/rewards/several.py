"""Several rewards for the same response: each graded by its own verifier, and their weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..metric_names import allowed_name
from ..records import Grade, Question, Verdict
from .answer import Written
from .grading import Answers, fits_format
from .sandbox.function import NAME, named

if TYPE_CHECKING:
    from .verifier import Verifier


def name_of(reward: str) -> str:
    """Of a kind its name; of "file.py:name" name, of "file.py" the file's stem."""
    if not _is_function(reward):
        return reward
    file, name = named(reward)
    return allowed_name(file.stem if name == NAME else name) or "reward"


def _is_function(reward: str) -> bool:
    return reward.rpartition(":")[0].endswith(".py") or Path(reward).suffix == ".py"


def parts(verifier: Verifier) -> dict[str, Verifier]:
    """By name what gives each of its rewards, in their order. Raises ValueError for what is no reward."""
    own: dict[str, Verifier] = {}
    if verifier.rewards is None:
        return own
    alone = replace(verifier, rewards=None, success_by=None, format=None, overlong_share=None, kind="exact", url=None)
    alone = replace(alone, max_failed_share=1.0)
    for reward in verifier.rewards:
        if name_of(reward) in own:
            raise ValueError(f"Verifier.rewards: two rewards are called {name_of(reward)!r}; rename a function")
        if _is_function(reward):
            part = replace(alone, kind="function", function=reward, tool=verifier.tool, gets=verifier.gets)
        else:
            part = replace(alone, kind=reward, url=verifier.url if reward == "http" else None)  # type: ignore[arg-type]
        own[name_of(reward)] = part
    return own


class SeveralAnswers:
    """As `Answers`, for a verifier with several rewards."""

    def __init__(
        self,
        verifier: Verifier,
        pairs: Sequence[tuple[Question, Written | str]] = (),
        progress: tuple[int, int] = (0, 0),
    ) -> None:
        self.verifier = verifier
        self.answers = {name: Answers(part, pairs, progress, may_abstain=True) for name, part in verifier.parts.items()}
        self.weights = verifier.weights
        self.decides = verifier.success_by or next(iter(self.answers))

    def add(self, pairs: Sequence[tuple[Question, Written | str]]) -> None:
        for each in self.answers.values():
            each.add(pairs)

    def grades(self) -> list[Grade]:
        columns = {name: each.grades() for name, each in self.answers.items()}
        abstained = {name: each.abstained for name, each in self.answers.items()}
        first = next(iter(self.answers.values()))
        return [
            self._sum(
                {name: own[i] for name, own in columns.items()},
                {name for name, own in abstained.items() if own[i]},
                fits_format(self.verifier.format, written),
            )
            for i, (_, written) in enumerate(first.pairs)
        ]

    def _sum(self, grades: Mapping[str, Grade], abstained: set[str], fits: bool) -> Grade:
        """Σ w·r over the rewards that do not abstain. Not gradable where one fails, or all abstain; where the one that
        decides on success abstains, it is none."""
        failed = [grade for name, grade in grades.items() if grade.reward is None and name not in abstained]
        rewards = {name: grade.reward for name, grade in grades.items() if grade.reward is not None}
        if failed or not rewards:
            return replace((failed or [*grades.values()])[0], logs=())
        decides = grades[self.decides]
        verdict: Verdict = "no_answer" if self.decides in abstained else decides.verdict
        total = sum(self.weights[name] * reward for name, reward in rewards.items())
        if not fits:
            verdict, total = "wrong" if verdict == "correct" else verdict, 0.0
        logs = tuple(pair for grade in grades.values() for pair in grade.logs)
        return Grade(verdict, total, decides.sound, decides.extracted, logs, tuple(rewards.items()))

    def give_up(self) -> None:
        for each in self.answers.values():
            each.give_up()
