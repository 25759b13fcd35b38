"""A benchmark's questions: found in a file or on the hub, counted, converted, and chosen from."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..questions import conversions
from ..questions.catalogue import PublicSet
from ..questions.conversions import Conversion
from ..questions.files import read_rows
from ..questions.hub import HubError, commit, load_table, table_rows
from ..questions.records import fingerprint
from ..replay import Question
from ..tasks.modular_chains import ModularChains
from .benchmarks import Benchmark, BenchmarkError, SetFile

# By the name that `convert` has in a block: the columns it reads, and the function.
_CONVERSIONS: dict[str, tuple[tuple[str, ...], Conversion]] = {
    "verl": (("prompt", "reward_model"), conversions.verl_messages),
    "after_hashes": (("question", "answer"), conversions.after_hashes),
    "olympiad": (("context", "question", "final_answer"), conversions.olympiad),
    "arc": (("question", "choices", "answerKey"), conversions.arc),
    "mmlu_pro": (("question", "options", "answer"), conversions.mmlu_pro),
    "gpqa": (
        ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
        conversions.gpqa,
    ),
}


DATASETS = Path(__file__).resolve().parents[2] / "datasets"  # where scripts/prepare_data.py writes


class Unavailable(ValueError):
    """A set that cannot be had here: says why, and what to do."""


@dataclass(frozen=True)
class BenchmarkSet:
    """A benchmark with the questions that are asked.

    rows: (row of the set, from 0, question), in the set's order; a question that the set repeats occurs as often
    found: rows of the whole set; source: where it came from; notes: what a reader of the score must know
    """

    benchmark: Benchmark
    rows: tuple[tuple[int, Question], ...]
    found: int
    source: str
    notes: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """Of the questions asked, in their order."""
        return fingerprint(question for _, question in self.rows)

    @property
    def whole(self) -> bool:
        """Whether the score is one of the official set."""
        return len(self.rows) == self.found and self.benchmark.rows in (None, self.found)


def load(benchmark: Benchmark, folders: Sequence[Path], limit: int | None, hub: bool = True) -> BenchmarkSet:
    """The benchmark's set from the first place that has it. hub: look there too

    limit: so many questions; chosen by their hashes, so that they are spread over the set, the same ones in every
        run, and part of those of any larger limit
    Raises Unavailable where no place has it, BenchmarkError where a file is not as the block says.
    """
    if benchmark.chains:
        found = (_made(benchmark, benchmark.chains), "made here", ())
    elif (path := _prepared(benchmark, folders)) is not None:
        found = (_from_file(benchmark, path, SetFile(path.name, "verl")), str(path), ())
    elif (place := _named(benchmark, folders)) is not None:
        path, file = place
        found = (_from_file(benchmark, path, file), str(path), (file.note,) if file.note else ())
    elif benchmark.public and hub:
        found = (_from_hub(benchmark, benchmark.public), f"{benchmark.public.id} of the hub", ())
    else:
        names = " or ".join([f"{benchmark.name}.parquet", *(file.name for file in benchmark.files)])
        raise Unavailable(f"there is no {names} in {', '.join(map(str, (*folders, benchmark.folder)))}; see --data")
    rows, source, notes = found
    if not rows:
        raise BenchmarkError(f"benchmark {benchmark.name!r}: {source} holds no questions; was it written to the end?")
    chosen = rows if limit is None else _chosen(rows, limit)
    if benchmark.rows is not None and len(rows) != benchmark.rows:
        notes = (f"{len(rows):,} rows, {benchmark.rows:,} are official", *notes)
    if len(chosen) < len(rows):
        notes = (*notes, f"--limit {limit}: {len(chosen):,} of {len(rows):,} rows")
    return BenchmarkSet(benchmark, tuple(chosen), len(rows), source, notes)


def _made(benchmark: Benchmark, chains: ModularChains) -> list[tuple[int, Question]]:
    """With the questions' own ids: they are known from training."""
    made = []
    for row, question in enumerate(chains.load()):
        group = {"group": str(question.meta[benchmark.by])} if benchmark.by else {}
        made.append((row, replace(question, meta={**question.meta, **group})))
    return made


def _prepared(benchmark: Benchmark, folders: Sequence[Path]) -> Path | None:
    name = f"{benchmark.public.name if benchmark.public else benchmark.name}.parquet"
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _named(benchmark: Benchmark, folders: Sequence[Path]) -> tuple[Path, SetFile] | None:
    for file in benchmark.files:
        for folder in (*folders, benchmark.folder):
            if (folder / file.name).is_file():
                return folder / file.name, file
    return None


def _from_file(benchmark: Benchmark, path: Path, file: SetFile) -> list[tuple[int, Question]]:
    needed, convert = _conversion(benchmark, file)

    def check(present: Iterable[str]) -> None:
        missing = [column for column in needed if column not in present]
        if missing:
            raise BenchmarkError(
                f"{path}: no column {' and no '.join(map(repr, missing))}, there are {', '.join(present)}; mend "
                f"`files` of benchmark {benchmark.name!r}"
            )

    by = (benchmark.by,) if benchmark.by and path.suffix != ".parquet" else ()
    if benchmark.by and path.suffix == ".parquet":
        import pyarrow.parquet as pq

        by = (benchmark.by,) if benchmark.by in pq.read_schema(path).names else ()
    try:
        rows = list(read_rows(path, check, (*needed, *by)))
    except BenchmarkError:
        raise
    except ValueError as error:
        raise BenchmarkError(f"benchmark {benchmark.name!r}: {error}") from error
    if rows and path.suffix == ".jsonl":
        check(list(rows[0]))
    return _questions(benchmark, rows, convert, str(path))


def _from_hub(benchmark: Benchmark, public: PublicSet) -> list[tuple[int, Question]]:
    binding = "the entry in exgrpo_orlhf/questions/catalogue.py"
    try:
        # A short question first: the long one tries for half a minute where there is no network.
        if os.environ.get("HF_HUB_OFFLINE", "0") in ("", "0"):
            commit(public.id, public.revision, binding)
        table = load_table(public.id, public.subset, public.split, public.revision, binding)
    except HubError as error:
        raise Unavailable(f"{error}; or prepare it once with scripts/prepare_data.py --only {public.name}") from error
    missing = [column for column in public.columns if column not in table.column_names]
    if missing:
        raise BenchmarkError(
            f"{public.id} has no column {' and no '.join(map(repr, missing))}, there are "
            f"{', '.join(table.column_names)}; mend its entry in exgrpo_orlhf/questions/catalogue.py"
        )
    by = (benchmark.by,) if benchmark.by in table.column_names else ()
    rows = table_rows(table, (*public.columns, *filter(None, by)))
    return _questions(benchmark, rows, public.convert, public.id)


def _conversion(benchmark: Benchmark, file: SetFile) -> tuple[tuple[str, ...], Conversion]:
    if file.convert == "columns":
        return (file.question, file.answer), conversions.columns(file.question, file.answer)
    if file.convert == "boxed":
        return (file.question, file.answer), conversions.boxed(file.question, file.answer)
    if file.convert not in _CONVERSIONS:
        known = ", ".join(("columns", "boxed", *_CONVERSIONS))
        raise BenchmarkError(f"benchmark {benchmark.name!r}: convert = {file.convert!r}; there are {known}")
    return _CONVERSIONS[file.convert]


def _questions(
    benchmark: Benchmark, rows: Iterable[Mapping[str, Any]], convert: Conversion, place: str
) -> list[tuple[int, Question]]:
    """All rows: a benchmark's score is over the set as it is, repetitions included."""
    questions = []
    for index, row in enumerate(rows):
        try:
            text, answer = convert(row)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise BenchmarkError(
                f"benchmark {benchmark.name!r}: {place}, row {index}: not of the form expected "
                f"({type(error).__name__}: {error}): {str(dict(row))[:200]}"
            ) from error
        if not text.strip() or not answer.strip():
            what = "question" if not text.strip() else "answer"
            raise BenchmarkError(f"benchmark {benchmark.name!r}: {place}, row {index}: the {what} is empty")
        meta = {"group": str(row[benchmark.by])} if benchmark.by and benchmark.by in row else {}
        questions.append((index, Question.make(benchmark.name, text, answer, meta)))
    return questions


def _chosen(rows: list[tuple[int, Question]], limit: int) -> list[tuple[int, Question]]:
    """Repetitions of a question have different hashes: they are rows like any others."""
    seen: Counter[str] = Counter()
    order = []
    for position, (_, question) in enumerate(rows):
        seen[question.id] += 1
        name = f"{question.id} {seen[question.id]}".encode()
        order.append((hashlib.blake2b(name, digest_size=8).digest(), position))
    return [rows[position] for position in sorted(position for _, position in sorted(order)[:limit])]
