"""Finds test questions that a training set holds too: the same text, however it is typeset (text.py)."""

from __future__ import annotations

import csv
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..files import replacing
from ..records import Question
from .question_files import column_names, place_of, read_rows
from .reading import read_prompt
from .text import Prompt, normalised, plain_text


@dataclass(frozen=True)
class Hit:
    """A test question that the training set has too. Rows count from 0.

    train_row: the first of those with this text; question: how the test question's text begins
    """

    test_row: int
    train_row: int
    question: str


@dataclass(frozen=True)
class Overlap:
    """What a training set and one test set have in common. train_rows: all training rows with a text of the test set"""

    questions: int
    hits: tuple[Hit, ...]
    train_rows: frozenset[int]


class TrainingTexts:
    """The training set, indexed once for any number of test sets."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._rows: dict[str, list[int]] = {}
        for row, prompt in enumerate(prompts):
            self._rows.setdefault(normalised(prompt), []).append(row)

    def overlap(self, prompts: Sequence[Prompt]) -> Overlap:
        """Compare a test set's prompts with the training set."""
        same = [(row, prompt, self._rows.get(normalised(prompt), [])) for row, prompt in enumerate(prompts)]
        hits = tuple(Hit(row, rows[0], plain_text(prompt)[:160]) for row, prompt, rows in same if rows)
        return Overlap(len(prompts), hits, frozenset(row for _, _, rows in same for row in rows))


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
    seconds: float

    def table(self) -> str:
        """The report as text."""
        width = max(len("test set"), *(len(str(path)) for path, _ in self.tests))
        lines = [
            f"{self.train}: {self.rows:,} rows",
            "",
            f"{'test set':{width}}  questions  same text    share  training rows",
        ]
        for path, overlap in self.tests:
            share = f"{100 * len(overlap.hits) / overlap.questions:.1f} %"
            lines.append(
                f"{path!s:{width}}  {overlap.questions:9,}  {len(overlap.hits):9,}  {share:>7}  "
                f"{len(overlap.train_rows):13,}"
            )
        lines += [
            "",
            f"{len(self.train_rows):,} of {self.rows:,} training rows overlap, {self.rows - len(self.train_rows):,} "
            f"are clean ({self.seconds:.1f} s)",
        ]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The report with every hit, for a JSON file."""
        return {
            "train": str(self.train),
            "train_rows": self.rows,
            "train_rows_overlapping": len(self.train_rows),
            "seconds": round(self.seconds, 2),
            "tests": [
                {
                    "test": str(path),
                    "questions": overlap.questions,
                    "same_text": len(overlap.hits),
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
    return Report(train.path, len(prompts), overlaps, rows, time.monotonic() - began)


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
