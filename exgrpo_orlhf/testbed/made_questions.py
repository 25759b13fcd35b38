"""What the tasks share: operations, sets of questions made here, their two splits, and checks of settings."""

from __future__ import annotations

import hashlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from ..checks import Constraint, check_settings
from ..records import Question

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv
}  # fmt: skip
_DRAWS = 20_000  # after that many draws without a new question (about two seconds) there are taken to be no more
VALIDATION_ONE_IN = 10  # about one question in ten is a validation question


def _levels(least: int) -> Constraint:
    holds = lambda levels: (
        0 < len(levels) == len({*levels}) and all(type(level) is int and level >= least for level in levels)
    )
    return Constraint(f"must be a non-empty tuple of distinct integers of at least {least}", holds)


# What the fields of questions made here, and of the models that learn them, may be; `check_settings` reads it.
Split = Literal["train", "validation"]
Operands = Annotated[tuple[int, ...], _levels(2)]
Steps = Annotated[tuple[int, ...], _levels(1)]


def split_by_hash(prompt: str, task: bytes) -> Split:
    """The split a question belongs to, by a hash of its text alone: no seed or size can make the splits overlap."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8, person=task).digest()
    return "validation" if int.from_bytes(digest, "big") % VALIDATION_ONE_IN == 0 else "train"


class MadeQuestions(ABC):
    """A set of distinct questions, an equal share of them (to one question) on each level of difficulty.

    A subclass is a frozen dataclass with these fields, and with one for its levels (`levels`).

    UNIT: what the levels count, for messages
    count: number of questions
    seed: which questions of the split are drawn, and their order
    split: training or validation; every possible question belongs to exactly one of the two, whatever the other fields
    """

    UNIT: ClassVar[str]
    count: int
    seed: int
    split: Split

    def __post_init__(self) -> None:
        check_settings(type(self), vars(self))

    def load(self) -> list[Question]:
        """The questions in a shuffled order: the same list in every process and on every machine.

        Raises ValueError if there are fewer than asked for.
        """
        return [question for question, _ in self.examples()]

    def examples(self) -> list[tuple[Question, str]]:
        """The questions of `load`, in the same order, each with a right response, without end token.

        Raises ValueError as `load`.
        """
        rng = np.random.default_rng(self.seed)
        examples: list[tuple[Question, str]] = []
        for level, share in self._shares():
            examples += self._draw_all(rng, level, share)
        return [examples[i] for i in rng.permutation(len(examples))]

    def _shares(self) -> list[tuple[int, int]]:
        """(level, how many questions have it)"""
        share, rest = divmod(self.count, len(self.levels))
        return [(level, share + (i < rest)) for i, level in enumerate(self.levels)]

    def _draw_all(self, rng: np.random.Generator, level: int, share: int) -> list[tuple[Question, str]]:
        drawn: dict[str, tuple[Question, str]] = {}
        in_vain = 0
        while len(drawn) < share:
            example = self._draw(rng, level)
            if example is not None and example[0].id not in drawn:
                drawn[example[0].id] = example
                in_vain = 0
            elif (in_vain := in_vain + 1) == _DRAWS:
                raise ValueError(
                    f"{type(self).__name__}.count = {self.count} asks for {share} distinct {self.split} questions with "
                    f"{level} {self.UNIT}, and only {len(drawn)} came up in {_DRAWS} draws after the last"
                )
        return list(drawn.values())

    @property
    @abstractmethod
    def levels(self) -> tuple[int, ...]:
        """The levels of difficulty, such as the numbers of operands."""

    @abstractmethod
    def _draw(self, rng: np.random.Generator, level: int) -> tuple[Question, str] | None:
        """A random question of this level with a right response; None if it belongs to the other split."""
