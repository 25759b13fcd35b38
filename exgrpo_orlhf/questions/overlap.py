"""Finds test questions that a training set holds too: the same text, however it is typeset (text.py)."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..io.files import replacing
from ..records import Question
from .question_files import (
    column_names,
    delimiter_of,
    form_of,
    json_texts,
    place_of,
    read_bytes,
    read_rows,
    read_text,
)
from .reading import read_prompt
from .text import Prompt, normalised, plain_text


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
class Overlap:
    """A test file's prompts. hits: row of each that the training file has too -> the training rows with its text"""

    test: Path
    prompts: list[Prompt]
    hits: dict[int, list[int]]

    @property
    def train_rows(self) -> set[int]:
        return {row for rows in self.hits.values() for row in rows}


@dataclass(frozen=True)
class Report:
    """What a training file shares with each test file. Rows count from 0."""

    train: Path
    rows: int
    tests: list[Overlap]

    @property
    def train_rows(self) -> set[int]:
        """The training rows that overlap with any test file."""
        return {row for overlap in self.tests for row in overlap.train_rows}

    def table(self) -> str:
        """The report as text."""
        width = max(len("test set"), *(len(str(overlap.test)) for overlap in self.tests))
        lines = [f"{self.train}: {self.rows:,} rows", ""]
        lines.append(f"{'test set':{width}}  questions  same text    share  training rows")
        for overlap in self.tests:
            questions, hits = len(overlap.prompts), len(overlap.hits)
            counts = f"{questions:9,}  {hits:9,}  {hits / questions:7.1%}  {len(overlap.train_rows):13,}"
            lines.append(f"{overlap.test!s:{width}}  {counts}")
        count = len(self.train_rows)
        lines += ["", f"{count:,} of {self.rows:,} training rows overlap, {self.rows - count:,} are clean"]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The report with every hit, for a JSON file."""
        tests = [
            {
                "test": str(overlap.test),
                "questions": len(overlap.prompts),
                "same_text": len(overlap.hits),
                "train_rows_overlapping": len(overlap.train_rows),
                "hits": [
                    {"test_row": row, "train_row": rows[0], "question": plain_text(overlap.prompts[row])[:160]}
                    for row, rows in overlap.hits.items()
                ],
            }
            for overlap in self.tests
        ]
        counts = {"train_rows": self.rows, "train_rows_overlapping": len(self.train_rows)}
        return {"train": str(self.train), **counts, "tests": tests}


def compare(train: PromptColumn, tests: Sequence[PromptColumn]) -> Report:
    """Compare a training file with test files by normalised text."""
    prompts, rows = train.read(), dict[str, list[int]]()
    for row, prompt in enumerate(prompts):
        rows.setdefault(normalised(prompt), []).append(row)
    overlaps = []
    for column in tests:
        questions = column.read()
        hits = {i: rows[text] for i, text in enumerate(map(normalised, questions)) if text in rows}
        overlaps.append(Overlap(column.path, questions, hits))
    return Report(train.path, len(prompts), overlaps)


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


def write_rows(path: Path, rows: Sequence[int], out: Path, column: str = "", values: Sequence[float] = ()) -> None:
    """Write these rows of a file with all their columns, and with one more if it has values, whole or not at all."""
    if values and column in column_names(path):
        raise ValueError(f"{path} has a column {column!r} already; take the file without it")
    with replacing(out) as partial:
        if path.suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            table = pq.read_table(path).take(pa.array(rows, pa.int64()))
            pq.write_table(table.append_column(column, pa.array(values)) if values else table, partial)
        elif form_of(path) in (".csv", ".tsv"):
            text = read_text(path)
            delimiter = delimiter_of(path, text)
            header, *values_of = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
            kept = [header, *(values_of[row] for row in rows)]
            for record, value in zip(kept, [column, *values], strict=True) if values else ():
                record.append(str(value))
            csv.writer(table := io.StringIO(newline=""), delimiter=delimiter).writerows(kept)
            _write(partial, path, table.getvalue().encode())
        else:
            is_list = form_of(path) == ".json" and (text := read_text(path)).lstrip().startswith("[")
            # Numbers stay as they are written.
            records = [each.encode() for each in json_texts(text)] if is_list else read_bytes(path).split(b"\n")
            lines = [records[row] for row in rows]
            if values:
                ends = [f", {json.dumps(column)}: {value}}}".encode() for value in values]
                lines = [line.rstrip().removesuffix(b"}").rstrip() + end for line, end in zip(lines, ends, strict=True)]
            content = b"[" + b",\n".join(lines) + b"]\n" if is_list else b"".join(line + b"\n" for line in lines)
            _write(partial, path, content)


def _write(partial: Path, path: Path, content: bytes) -> None:
    """Packed as the file is whose rows these are."""
    partial.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
