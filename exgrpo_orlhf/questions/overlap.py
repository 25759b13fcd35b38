"""Finds test questions that a training set holds: the same text (text.py), or a run of 13 words in common.

Texts are hashed, not compared pair by pair: every run of 13 words is one 64-bit number, so that comparing 46,000
questions with 15,000 takes seconds. Two different runs share a number about once in 10^7 checks of that size.

A run of words that more than 10 training questions share is a common phrase ("how many ways are there to choose …") or
a template's instruction, and does not count. A question of fewer than 13 words is compared only by its whole text.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..files import replacing
from ..records import Question
from .question_files import column_names, place_of, read_rows
from .reading import read_prompt
from .text import Prompt, normalised, plain_text, words

WORDS = 13
COMMON = 10  # training questions


@dataclass(frozen=True)
class Hit:
    """A test question that the training set has too. Rows count from 0.

    share: the share of its runs of 13 words that the training set has; 1 for the same text
    question: how its text begins
    """

    test_row: int
    train_row: int
    kind: str  # 'exact' or '13-gram'
    share: float
    question: str


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
        rows: dict[str, list[int]] = {}
        for row, prompt in enumerate(prompts):
            rows.setdefault(normalised(prompt), []).append(row)
        # A repeated text counts once; otherwise a repeated question would be roles for a common phrase.
        self._rows, self._same = rows, list(rows.values())
        runs = [np.unique(_runs(prompts[same[0]])) for same in self._same]
        owners = np.repeat(np.arange(len(runs)), [len(of_one) for of_one in runs])  # positions in _same
        joined = np.concatenate([*runs, np.empty(0, np.int64)])
        order = np.argsort(joined, kind="stable")
        self._runs, self._owners = joined[order], owners[order]  # sorted by run, then by owner
        self.common = int((np.unique(self._runs, return_counts=True)[1] > COMMON).sum())

    def overlap(self, prompts: Sequence[Prompt]) -> Overlap:
        """Compare a test set's prompts with the training set."""
        hits, train_rows, short = [], set[int](), 0
        for row, prompt in enumerate(prompts):
            runs = _runs(prompt)
            first, last = (np.searchsorted(self._runs, runs, side) for side in ("left", "right"))
            shared = (first < last) & (last - first <= COMMON)
            owners = [self._owners[a:b] for a, b in zip(first[shared], last[shared], strict=True)]
            train_rows.update(row for group in owners for owner in group for row in self._same[owner])
            short += not len(runs)
            same = self._rows.get(normalised(prompt))
            start = plain_text(prompt)[:160]
            if same:
                train_rows.update(same)
                hits.append(Hit(row, same[0], "exact", 1.0, start))
            elif owners:
                hits.append(Hit(row, self._same[owners[0][0]][0], "13-gram", float(shared.mean()), start))
        return Overlap(len(prompts), tuple(hits), short, frozenset(train_rows))


def _runs(prompt: Prompt) -> npt.NDArray[np.int64]:
    """Every run of 13 words as a number, in order (R,). They differ between processes: Python salts hashes of text."""
    text = words(prompt)
    return np.array([hash(tuple(text[i : i + WORDS])) for i in range(len(text) - WORDS + 1)], np.int64)


def same_questions(train: Sequence[Question], test: Sequence[Question]) -> list[tuple[Question, Question]]:
    """(training question, test question) for each test question that is in the training set, by normalised text."""
    by_text = {normalised(question.prompt): question for question in train}
    pairs = [(by_text.get(normalised(question.prompt)), question) for question in test]
    return [(mine, other) for mine, other in pairs if mine is not None]


# -- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptColumn:
    """A file and the field of its questions."""

    path: Path
    field: str

    def read(self) -> list[Prompt]:
        """Every row's prompt, repetitions too. FileNotFoundError, ValueError with place and field."""
        place, option = place_of(self.path), f"{self.path}:FIELD on the command line"
        names = column_names(self.path)
        if names and self.field not in names:
            raise ValueError(f"{self.path}: no column {self.field!r}, there are {', '.join(names)}; give {option}")
        rows = enumerate(read_rows(self.path, (self.field,)))
        prompts = [read_prompt(row, place.of(i), option, self.field) for i, row in rows]
        if not prompts:
            raise ValueError(f"{self.path} holds no questions; was it written to the end?")
        return prompts


@dataclass(frozen=True)
class Report:
    """What a training file shares with each test file. train_rows: the training rows that overlap with any of them."""

    train: Path
    rows: int
    tests: tuple[tuple[Path, Overlap], ...]
    train_rows: frozenset[int]
    common: int
    seconds: float

    def table(self) -> str:
        """The report as text."""
        width = max(len("test set"), *(len(str(path)) for path, _ in self.tests))
        lines = [
            f"{self.train}: {self.rows:,} rows; {WORDS}-gram: a run of {WORDS} words in common that at most "
            f"{COMMON} training questions have",
            "",
            f"{'test set':{width}}  questions   exact  {WORDS}-gram  together  under {WORDS} words  training rows",
        ]
        for path, overlap in self.tests:
            exact, runs = overlap.count("exact"), overlap.count("13-gram")
            share = f"{100 * (exact + runs) / overlap.questions:.1f} %"
            lines.append(
                f"{path!s:{width}}  {overlap.questions:9,}  {exact:6,}  {runs:7,}  {share:>8}  {overlap.short:14,}  "
                f"{len(overlap.train_rows):13,}"
            )
        lines += [
            "",
            f"{len(self.train_rows):,} of {self.rows:,} training rows overlap, {self.rows - len(self.train_rows):,} "
            f"are clean ({self.common:,} runs ignored as common phrases, {self.seconds:.1f} s)",
        ]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The report with every hit, for a JSON file."""
        return {
            "train": str(self.train),
            "train_rows": self.rows,
            "train_rows_overlapping": len(self.train_rows),
            "words_of_a_run": WORDS,
            "common_above": COMMON,
            "common_runs": self.common,
            "seconds": round(self.seconds, 2),
            "tests": [
                {
                    "test": str(path),
                    "questions": overlap.questions,
                    "exact": overlap.count("exact"),
                    "ngram": overlap.count("13-gram"),
                    "short": overlap.short,
                    "train_rows_overlapping": len(overlap.train_rows),
                    "hits": [asdict(hit) for hit in overlap.hits],
                }
                for path, overlap in self.tests
            ],
        }


def compare(train: PromptColumn, tests: Sequence[PromptColumn]) -> Report:
    """Compare a training file with test files. The report's seconds include reading."""
    began = time.monotonic()
    prompts = train.read()
    index = TrainingTexts(prompts)
    overlaps = tuple((column.path, index.overlap(column.read())) for column in tests)
    rows = frozenset(row for _, overlap in overlaps for row in overlap.train_rows)
    return Report(train.path, len(prompts), overlaps, rows, index.common, time.monotonic() - began)


def check_written(train: Path, tests: Sequence[Path], clean: Path | None, report: Path | None) -> None:
    """Raises ValueError if the clean subset or the report would overwrite a compared set or each other."""
    if clean and clean.suffix != train.suffix:
        raise ValueError(f"{clean}: the clean subset keeps the form of {train}; its name ends in {train.suffix}")
    roles = {path.resolve(): "a test set that is compared" for path in tests}
    roles[train.resolve()] = "the training file itself"
    for written in filter(None, (report, clean)):
        if role := roles.get(written.resolve()):
            raise ValueError(f"{written} is {role}; give another name")
        roles[written.resolve()] = "the report too"


def write_without(train: Path, rows: Collection[int], clean: Path) -> None:
    """Write the training file without these rows, with all its columns, whole or not at all."""
    with replacing(clean) as partial:
        if train.suffix == ".parquet":
            import pyarrow.parquet as pq

            table = pq.read_table(train)
            pq.write_table(table.take([row for row in range(table.num_rows) if row not in rows]), partial)
        elif train.suffix == ".jsonl":
            with train.open("rb") as file, partial.open("wb") as kept:
                kept.writelines(line for row, line in enumerate(file) if row not in rows)
        else:
            with train.open(encoding="utf-8-sig", newline="") as file, partial.open("w", -1, "utf-8", newline="") as to:
                records = enumerate(csv.reader(file, strict=True), -1)  # the header is record -1
                csv.writer(to).writerows(values for row, values in records if row not in rows)
