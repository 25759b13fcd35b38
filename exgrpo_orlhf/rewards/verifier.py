"""Grades the fresh rollouts of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..replay import Grade, Question, RolloutGroup
from ..settings import require
from ..tasks import modular_chains
from . import exact

_GRADERS: dict[str, Callable[[Question, str], Grade]] = {
    "exact": exact.grade,
    "modular_chain": modular_chains.grade,
}


@dataclass(frozen=True)
class Verifier:
    """kind: 'exact' (the response is the answer) or 'modular_chain' (which also checks the reasoning)"""

    kind: Literal["exact", "modular_chain"] = "exact"

    def __post_init__(self) -> None:
        require(
            self.kind in _GRADERS, f"Verifier.kind must be one of {', '.join(map(repr, _GRADERS))}, got {self.kind!r}"
        )

    def grade(self, question: Question, response: str) -> Grade:
        """Raises ValueError if the question is not of this kind."""
        return _GRADERS[self.kind](question, response)

    def grade_groups(self, groups: Sequence[RolloutGroup], decode: Callable[[np.ndarray], str]) -> list[RolloutGroup]:
        """The same groups with every rollout graded. Stored trajectories are not in them: a success stays one."""
        return [
            replace(
                group,
                rollouts=tuple(
                    replace(rollout, grade=self.grade(group.question, decode(rollout.token_ids)))
                    for rollout in group.rollouts
                ),
            )
            for group in groups
        ]
