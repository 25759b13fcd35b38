"""Compares a training file with test files: the table, the JSON, and the training file without what they share."""

from __future__ import annotations

import csv
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..files import replacing
from .files import place_of, read_rows
from .overlap import COMMON, WORDS, Overlap, TrainingTexts
from .reading import read_prompt
from .text import Prompt, plain_text


@dataclass(frozen=True)
class PromptColumn:
    """A file and the field of its questions."""

    path: Path
    field: str

    def read(self) -> list[Prompt]:
        """Every row's prompt, repetitions too. FileNotFoundError, ValueError with place and field."""
        place = place_of(self.path)
        mend = f"{self.path}:FIELD on the command line"

        def check(present: list[str]) -> None:
            if self.field not in present:
                raise ValueError(f"{self.path}: no column {self.field!r}, there are {', '.join(present)}; give {mend}")

        prompts = [
            read_prompt(row, place.of(i), mend, self.field)
            for i, row in enumerate(read_rows(self.path, check, (self.field,)))
        ]
        if not prompts:
            raise ValueError(f"{self.path} holds no questions; was it written to the end?")
        return prompts


@dataclass(frozen=True)
class Report:
    """What a training file shares with each test file. train_rows: the training rows that overlap with any of them."""

    train: PromptColumn
    rows: int
    tests: tuple[tuple[PromptColumn, Overlap, Sequence[Prompt]], ...]
    train_rows: frozenset[int]
    common: int
    seconds: float

    def table(self) -> str:
        """The report as text."""
        names = [str(column.path) for column, _, _ in self.tests]
        width = max(len("test set"), *map(len, names))
        lines = [
            f"{self.train.path}: {self.rows:,} rows; {WORDS}-gram: a run of {WORDS} words in common that at most "
            f"{COMMON} training questions have",
            "",
            f"{'test set':{width}}  questions   exact  {WORDS}-gram  together  under {WORDS} words  training rows",
        ]
        for name, (_, overlap, _) in zip(names, self.tests, strict=True):
            exact, runs = overlap.count("exact"), overlap.count("13-gram")
            share = f"{100 * (exact + runs) / overlap.questions:.1f} %"
            lines.append(
                f"{name:{width}}  {overlap.questions:9,}  {exact:6,}  {runs:7,}  {share:>8}  {overlap.short:14,}  "
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
            "train": str(self.train.path),
            "train_rows": self.rows,
            "train_rows_overlapping": len(self.train_rows),
            "words_of_a_run": WORDS,
            "common_above": COMMON,
            "common_runs": self.common,
            "seconds": round(self.seconds, 2),
            "tests": [
                {
                    "test": str(column.path),
                    "questions": overlap.questions,
                    "exact": overlap.count("exact"),
                    "ngram": overlap.count("13-gram"),
                    "short": overlap.short,
                    "train_rows_overlapping": len(overlap.train_rows),
                    "hits": [
                        {**asdict(hit), "question": plain_text(prompts[hit.test_row])[:160]} for hit in overlap.hits
                    ],
                }
                for column, overlap, prompts in self.tests
            ],
        }


def compare(train: PromptColumn, tests: Sequence[PromptColumn]) -> Report:
    """Compare a training file with test files. The report's seconds include reading."""
    began = time.monotonic()
    prompts = train.read()
    index = TrainingTexts(prompts)
    done = []
    for column in tests:
        asked = column.read()
        done.append((column, index.overlap(asked), asked))
    touched = frozenset(row for _, overlap, _ in done for row in overlap.train_rows)
    return Report(train, len(prompts), tuple(done), touched, index.common, time.monotonic() - began)


def check_written(train: Path, tests: Sequence[Path], clean: Path | None, report: Path | None) -> None:
    """Raises ValueError if the clean subset or the report would overwrite a compared set or each other."""
    if clean and clean.suffix != train.suffix:
        raise ValueError(f"{clean}: the clean subset keeps the form of {train}; its name ends in {train.suffix}")
    taken = {path.resolve(): "a test set that is compared" for path in tests}
    taken[train.resolve()] = "the training file itself"
    for written in filter(None, (report, clean)):
        if what := taken.get(written.resolve()):
            raise ValueError(f"{written} is {what}; give another name")
        taken[written.resolve()] = "the report too"


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
            with (
                train.open(encoding="utf-8-sig", newline="") as file,
                partial.open("w", encoding="utf-8", newline="") as to,
            ):
                reader = csv.reader(file, strict=True)
                writer = csv.writer(to)
                writer.writerow(next(reader))
                writer.writerows(values for row, values in enumerate(reader) if row not in rows)
