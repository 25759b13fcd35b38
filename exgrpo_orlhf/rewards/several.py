"""Several rewards for the same response: each graded by its own verifier, and their weighted sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..metric_names import allowed_name
from ..records import Grade, Verdict
from .sandbox.function import NAME, named


def name_of(reward: str) -> str:
    """Of a kind its name; of "file.py:name" name, of "file.py" the file's stem."""
    if not is_function(reward):
        return reward
    file, name = named(reward)
    return allowed_name(file.stem if name == NAME else name) or "reward"


def is_function(reward: str) -> bool:
    return reward.rpartition(":")[0].endswith(".py") or Path(reward).suffix == ".py"


def weighted_sum(grades: Mapping[str, Grade], weights: Mapping[str, float], success_by: str | None) -> Grade:
    """Σ w·r over the rewards that do not abstain. Not gradable where one fails, or all abstain; where the one that
    decides on success abstains, it is none."""
    failed = [grade for grade in grades.values() if grade.reward is None and not grade.abstains]
    rewards = {name: grade.reward for name, grade in grades.items() if grade.reward is not None}
    if failed or not rewards:
        return replace((failed or [*grades.values()])[0], logs=())
    decides = grades[success_by or next(iter(grades))]
    verdict: Verdict = "no_answer" if decides.abstains else decides.verdict
    total = sum(weights[name] * reward for name, reward in rewards.items())
    logs = tuple(pair for grade in grades.values() for pair in grade.logs)
    return Grade(verdict, total, decides.sound, decides.extracted, logs, tuple(rewards.items()))
