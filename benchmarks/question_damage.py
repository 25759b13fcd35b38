"""What the campaign does to files of questions: each is refused by name, or gives the same questions."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from damage import Problem, Trial

from exgrpo_orlhf.questions import QuestionFile

ROWS = [{"question": f"What is {i} + {i}?", "answer": 2 * i, "options": [str(i), str(2 * i)]} for i in range(1, 41)]


def without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


# What becomes of one row, by the damage; None: another row with its question and another answer follows.
CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
    "no question": lambda row: without(row, "question"),
    "no answer": lambda row: without(row, "answer"),
    "no options": lambda row: without(row, "options"),
    "an empty question": lambda row: {**row, "question": "  "},
    "a question that is a number": lambda row: {**row, "question": 7},
    "a null answer": lambda row: {**row, "answer": None},
    "an answer that is true": lambda row: {**row, "answer": True},
    "an empty list of answers": lambda row: {**row, "answer": []},
    "half a character": lambda row: {**row, "question": row["question"] + "\ud800"},
    "two answers": lambda row: None,
}


def question_trials(folder: Path, rng: random.Random) -> Iterator[tuple[str, str, Trial]]:
    """Kind of damage, what is damaged, and the trial."""
    jsonl, parquet = folder / "questions.jsonl", folder / "questions.parquet"
    for what, change in CHANGES.items():
        at = rng.randrange(len(ROWS))
        changed = change(ROWS[at])
        more = [changed] if changed is not None else [ROWS[at], {**ROWS[at], "answer": -1}]
        rows = [*ROWS[:at], *more, *ROWS[at + 1 :]]
        yield f"questions: {what}", "JSON lines", partial(_refused, jsonl, _lines(rows))
    whole = _lines(ROWS)
    cut = rng.choice([at for at in range(1, len(whole)) if whole[at - 1 : at] != b"\n" and whole[at : at + 1] != b"\n"])
    yield "questions: truncation", "JSON lines", partial(_refused, jsonl, whole[:cut])
    yield (
        "questions: a byte that is no UTF-8",
        "JSON lines",
        partial(_refused, jsonl, whole[:cut] + b"\xff" + whole[cut:]),
    )
    pq.write_table(pa.Table.from_pylist(ROWS), parquet)
    table = parquet.read_bytes()
    for end in (0, rng.randrange(1, len(table)), len(table) - 1):
        yield "questions: truncation", "Parquet", partial(_refused, parquet, table[:end])
    for name, content in ((jsonl, b"\xef\xbb\xbf" + whole), (parquet, table)):
        yield "questions: as they were, or with a byte order mark", name.suffix, partial(_the_same, name, content)


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _load(path: Path, content: bytes) -> list[tuple[Any, ...]]:
    path.write_bytes(content)
    questions = QuestionFile(str(path), meta=("options",)).load()  # whose other columns are recognised
    return [(one.prompt, one.answer, one.meta["options"]) for one in questions]


def _refused(path: Path, content: bytes) -> Problem | None:
    try:
        _load(path, content)
    except ValueError as error:
        return None if str(path) in str(error) and "\n" not in str(error) else ("lost", str(error))
    return "silent", ""


def _the_same(path: Path, content: bytes) -> Problem | None:
    return None if _load(path, content) == [tuple(row.values()) for row in ROWS] else ("silent", "")
