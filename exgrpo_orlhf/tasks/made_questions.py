"""What both tasks share: operations, sets of questions made here, their two splits, and checks of settings."""

# No postponed annotations: those of inherited fields would be looked up in the module of the class that inherits them.
import hashlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..records import Question
from ..settings import require

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERATORS = "".join(OPERATIONS)
SHOWN = 200  # characters of an extracted answer
VALIDATION_ONE_IN = 10  # about one question in ten is a validation question
Split = Literal["train", "validation"]


def split_by_hash(prompt: str, task: bytes) -> Split:
    """The split a question belongs to, by a hash of its text alone: no seed or size can make the splits overlap."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8, person=task).digest()
    return "validation" if int.from_bytes(digest, "big") % VALIDATION_ONE_IN == 0 else "train"


@dataclass(frozen=True)
class MadeQuestions(ABC):
    """A set of distinct questions.

    count: number of questions
    operands: the numbers of operands that occur, each for an equal share of the questions (to one question)
    seed: which questions of the split are drawn, and their order
    split: training or validation; every possible question belongs to exactly one of the two, whatever the other fields
    """

    count: int
    operands: tuple[int, ...]
    seed: int = 0
    split: Split = "train"

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_operands(owner, self.operands)
        check_seed(owner, self.seed)
        known = self.split in ("train", "validation")
        require(known, f"{owner}.split must be 'train' or 'validation', got {self.split!r}")
        sound = type(self.count) is int and self.count >= 1
        require(sound, f"{owner}.count must be an integer of at least 1, got {self.count!r}")

    def load(self) -> list[Question]:
        """The questions in a shuffled order: the same list in every process and on every machine.

        Raises ValueError if there are fewer than asked for.
        """
        rng = np.random.default_rng(self.seed)
        questions: list[Question] = []
        for operands, share in self._shares():
            questions += self._draw(rng, operands, share)
        return [questions[i] for i in rng.permutation(len(questions))]

    def _shares(self) -> list[tuple[int, int]]:
        """(number of operands, how many questions have it)"""
        each, rest = divmod(self.count, len(self.operands))
        return [(operands, each + (i < rest)) for i, operands in enumerate(self.operands)]

    @abstractmethod
    def _draw(self, rng: np.random.Generator, operands: int, share: int) -> list[Question]:
        """Draw this many distinct questions of the split."""


def check_operands(owner: str, operands: tuple[int, ...]) -> None:
    """Raises ValueError unless these are distinct numbers of operands, each at least 2."""
    numbers = isinstance(operands, tuple) and all(type(n) is int and n >= 2 for n in operands)
    require(
        numbers and len(operands) > 0 and len(set(operands)) == len(operands),
        f"{owner}.operands must be a non-empty tuple of distinct integers of at least 2, got {operands!r}",
    )


def check_seed(owner: str, seed: int) -> None:
    """Raises ValueError unless the seed is a non-negative integer."""
    require(type(seed) is int and seed >= 0, f"{owner}.seed must be an integer of at least 0, got {seed!r}")


def check_shares(owner: str, **shares: float) -> None:
    """Raises ValueError unless all of these are numbers from 0 to 1."""
    for name, value in shares.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        require(number and 0 <= value <= 1, f"{owner}.{name} must be a number from 0 to 1, got {value!r}")
