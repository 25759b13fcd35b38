"""Finds test questions that a training set holds: the same text (text.py), or a run of 13 words in common.

Texts are hashed, not compared pair by pair: every run of 13 words is one 64-bit number, computed for all questions at
once, so that comparing 46,000 questions with 15,000 takes seconds. Two different runs share a number about once in 10^7
checks of that size.

A run of words that more than 10 training questions share is a common phrase ("how many ways are there to choose …") or
a template's instruction, and does not count. A question of fewer than 13 words is compared only by its whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..records import Question
from .text import Prompt, normalised, words

WORDS = 13
COMMON = 10  # training questions


@dataclass(frozen=True)
class Hit:
    """A test question that the training set has too. Rows count from 0.

    share: the share of its runs of 13 words that the training set has; 1 for the same text
    """

    test_row: int
    train_row: int
    kind: str  # 'exact' or '13-gram'
    share: float


@dataclass(frozen=True)
class Overlap:
    """What a training set and one test set have in common.

    short: number of test questions with fewer than 13 words, which are compared only by their whole text
    train_rows: the training rows that overlap with this test set, by either comparison
    """

    questions: int
    hits: tuple[Hit, ...]
    short: int
    train_rows: frozenset[int]

    def count(self, kind: str) -> int:
        return sum(hit.kind == kind for hit in self.hits)


class TrainingTexts:
    """The training set, indexed once for any number of test sets."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._rng = np.random.default_rng(13)  # draws the numbers that stand for words; any seed will do
        self._factors = self._numbers(WORDS) | np.uint64(1)
        self._vocabulary: dict[str, int] = {}
        self._table = np.empty(0, np.uint64)
        self._rows: dict[str, list[int]] = {}
        for row, prompt in enumerate(prompts):
            self._rows.setdefault(normalised(prompt), []).append(row)
        # A repeated text counts once; otherwise a repeated question would be taken for a common phrase.
        self._same = list(self._rows.values())
        runs, owners, _ = self._runs([prompts[rows[0]] for rows in self._same])  # owners: positions in _same
        order = np.lexsort((owners, runs))
        runs, owners = runs[order], owners[order]
        first = np.ones(len(runs), bool)  # of each (run, question)
        first[1:] = (runs[1:] != runs[:-1]) | (owners[1:] != owners[:-1])
        runs, owners = runs[first], owners[first]
        self._known, start, count = np.unique(runs, return_index=True, return_counts=True)  # (distinct runs,)
        self._owners, self._start, self._count = owners, start, count
        self.common = int((count > COMMON).sum())

    def overlap(self, prompts: Sequence[Prompt]) -> Overlap:
        """Compare a test set's prompts with the training set."""
        runs, owners, lengths = self._runs(prompts)
        position = np.minimum(np.searchsorted(self._known, runs), max(len(self._known) - 1, 0))
        found = np.zeros(len(runs), bool)
        if len(self._known):
            found = (self._known[position] == runs) & (self._count[position] <= COMMON)
        shared = np.bincount(owners[found], minlength=len(prompts))
        total = np.bincount(owners, minlength=len(prompts))
        touched = np.zeros(len(self._known), bool)
        touched[position[found]] = True
        owning = set(self._owners[np.repeat(touched, self._count)].tolist())
        train_rows = {row for owner in owning for row in self._same[owner]}
        test_rows, first = np.unique(owners[found], return_index=True)
        first_run = dict(zip(test_rows.tolist(), position[found][first].tolist(), strict=True))
        hits = []
        for row, prompt in enumerate(prompts):
            same = self._rows.get(normalised(prompt))
            if same:
                train_rows.update(same)
                hits.append(Hit(row, same[0], "exact", 1.0))
            elif row in first_run:
                train_row = self._same[self._owners[self._start[first_run[row]]]][0]
                hits.append(Hit(row, train_row, "13-gram", float(shared[row] / total[row])))
        return Overlap(len(prompts), tuple(hits), int((lengths < WORDS).sum()), frozenset(train_rows))

    def _runs(
        self, prompts: Sequence[Prompt]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Every run of 13 words as a number (R,), the row it is in (R,), and the rows' lengths in words (rows,)."""
        number = self._vocabulary
        texts = [[number.setdefault(word, len(number)) for word in words(prompt)] for prompt in prompts]
        if len(number) > len(self._table):
            self._table = np.concatenate([self._table, self._numbers(len(number) - len(self._table))])
        lengths = np.array([len(text) for text in texts], np.int64)
        values = self._table[np.fromiter((word for text in texts for word in text), np.int64, int(lengths.sum()))]
        count = max(len(values) - WORDS + 1, 0)
        runs = np.zeros(count, np.uint64)
        for k, factor in enumerate(self._factors):
            runs += values[k : k + count] * factor  # modulo 2^64
        owners = np.repeat(np.arange(len(texts)), lengths)[:count]
        ends = np.repeat(np.cumsum(lengths), lengths)[:count]
        whole = np.arange(count) + WORDS <= ends  # runs that end within their question
        return runs[whole], owners[whole], lengths

    def _numbers(self, count: int) -> npt.NDArray[np.uint64]:
        return self._rng.integers(0, 1 << 64, count, dtype=np.uint64)


def same_questions(train: Sequence[Question], test: Sequence[Question]) -> list[tuple[Question, Question]]:
    """(training question, test question) for each test question that is in the training set, by normalised text."""
    known = {normalised(question.prompt): question for question in train}
    pairs = [(known.get(normalised(question.prompt)), question) for question in test]
    return [(mine, theirs) for mine, theirs in pairs if mine is not None]
