"""The questions of a benchmark: find them in a file or on the hub, convert, count and choose."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..environments import Environment
from ..io.paths import WORKPLACE
from ..io.redaction import address_only
from ..questions import conversions
from ..questions.catalogue import PublicSet
from ..questions.conversions import Conversion
from ..questions.hub import HubError, commit, load_table, table_rows
from ..questions.question_files import column_names, place_of, read_rows
from ..questions.reading import Place, field_value, fingerprint, missing_in
from ..questions.solutions import refuse_solutions
from ..questions.test_sets import TestSet
from ..records import Question
from ..tracking.samples import grouped
from ..workers.user_file import source_hash
from .benchmarks import Benchmark, BenchmarkError, SetFile, project_definitions

log = logging.getLogger(__name__)
_PREPARED = "prepared"  # verl's layout, as scripts/prepare_data.py writes it
_CONVERSIONS: dict[str, Conversion] = {  # by the value of `convert` in a block
    "verl": conversions.verl_messages,
    "after_hashes": conversions.after_hashes,
    "olympiad": conversions.olympiad,
    "arc": conversions.arc,
    "mmlu_pro": conversions.mmlu_pro,
    "gpqa": conversions.gpqa,
}
DATASETS = WORKPLACE / "datasets"  # where scripts/prepare_data.py writes


class Unavailable(ValueError):
    """A set that is not available here. The message says why and what to do."""


@dataclass(frozen=True)
class BenchmarkSet:
    """A benchmark with the questions to ask.

    rows: (row of the set, from 0, question), in the set's order, with the set's repetitions
    size: number of rows of the set; source: where they came from; notes: remarks for readers of the score
    """

    benchmark: Benchmark
    rows: tuple[tuple[int, Question], ...]
    size: int
    source: str
    notes: tuple[str, ...]

    def facts(self, ask: str | None, of_group: Sequence[str]) -> dict[str, Any]:
        """What the entry in results.json says besides what is measured.

        ask: the instruction below each question; of_group: all benchmarks of the group
        """
        names = ("title", "group", "samples", "verifier", "function", "temperature", "top_p", "max_tokens", "by")
        official, episodes = self.benchmark.rows, dict[str, Any]()
        urls = (self.benchmark.url,) if isinstance(self.benchmark.url, str) else self.benchmark.url
        if environment := self.benchmark.environment:  # what its episodes depend on
            names_of = [each.name for each in fields(environment) if each.name not in Environment.MAY_CHANGE]
            settings = {name: getattr(environment, name) for name in names_of}
            of_file = {"path": Path(environment.file()).name, "sha256": source_hash(environment.source)}
            episodes = {"environment": {**settings, **of_file, "stop": list(environment.stop)}}
        if meta := sorted({name for file in self.benchmark.files for name in file.meta}):
            episodes["meta"] = meta
        return {
            **{name: getattr(self.benchmark, name) for name in names},
            **episodes,
            "url": urls and [*map(address_only, urls)],
            "ask": ask,
            "of_group": list(of_group),
            "in_mean": not self.benchmark.own,  # whether it counts in the macro and micro mean; of a suite its own do
            "departures": list(self.benchmark.departures),
            "source": self.source,
            "fingerprint": fingerprint(question for _, question in self.rows),
            "questions": len(self.rows),
            "rows": self.size,
            "official_rows": official,
            "whole": len(self.rows) == self.size and official in (None, self.size),
            "notes": list(self.notes),
        }


def load(benchmark: Benchmark, folders: Sequence[Path], limit: int | None, hub: bool = True) -> BenchmarkSet:
    """The set from the first place that has it: the folders, the folder of its block, datasets/, the hub.

    Args:
        folders: where to look first.
        limit: at most that many questions, chosen by their hashes: spread over the set, the same in every run, and a
            subset of those of any larger limit.

    Raises:
        Unavailable: no place has the set.
        BenchmarkError: a file is not as the block says.
    """
    places = (*folders, benchmark.folder, DATASETS)
    notes: list[str] = []
    if benchmark.made:
        made = benchmark.made.load()  # with the task's ids, by which they are recognised as questions of training
        rows, source = [(row, grouped(question, benchmark.by)) for row, question in enumerate(made)], "made here"
        if benchmark.made.split == "train":
            notes.append("split = 'train': runs on this task are trained on such questions, perhaps on these")
    elif file := _local_file(benchmark, places):
        rows, source = _from_file(benchmark, *file, notes), str(file[0])
    elif benchmark.public and hub:
        rows, source = _from_hub(benchmark, benchmark.public, places), f"{benchmark.public.id} of the hub"
    else:
        names = " or ".join([_prepared_name(benchmark), *(file.name for file in benchmark.files)])
        raise Unavailable(f"there is no {names} in {', '.join(map(str, places))}; give its folder with --data")
    if benchmark.by and not any("group" in question.meta for _, question in rows):
        notes.append(f"no scores by {benchmark.by}: no question of this set has it")
    if not rows:
        raise BenchmarkError(f"benchmark {benchmark.name!r}: {source} holds no questions; was it written to the end?")
    chosen = rows if limit is None else _chosen(rows, limit)
    if benchmark.rows not in (None, len(rows)):
        notes.insert(0, f"{len(rows):,} rows, {benchmark.rows:,} are official")
    if len(chosen) < len(rows):
        notes.append(f"--limit {limit}: {len(chosen):,} of {len(rows):,} rows")
    return BenchmarkSet(benchmark, tuple(chosen), len(rows), source, (*notes, *benchmark.departures))


def load_available(
    benchmarks: Sequence[Benchmark], required: Sequence[str], folders: Sequence[Path], limit: int | None
) -> tuple[list[BenchmarkSet], dict[str, dict[str, str]]]:
    """(the sets that are available, name → {"title", "group", "reason"} of the others).

    required: names of benchmarks that were asked for one by one
    Raises ValueError if one of them is not available, or none is.
    """
    available, not_run = [], {}
    for benchmark in benchmarks:
        try:
            available.append(load(benchmark, folders, limit))
        except Unavailable as error:
            if benchmark.name in required:
                raise ValueError(f"benchmark {benchmark.name!r} is not available: {error}") from error
            log.warning("%s is not run: %s", benchmark.title, error)
            not_run[benchmark.name] = {"title": benchmark.title, "group": benchmark.group, "reason": str(error)}
    if not available:
        raise ValueError("none of the benchmarks is available; give folders with their sets by --data FOLDER")
    return available, not_run


def sets_of(suite: str) -> Iterator[TestSet]:
    """The sets of a suite that are on this machine: an entry point (questions/test_sets.py). Raises BenchmarkError if
    there is no such suite."""
    return map(_test_set, project_definitions().suite(suite))


def _test_set(benchmark: Benchmark) -> TestSet:
    try:
        found = load(benchmark, (), None, hub=False)
    except Unavailable:
        return TestSet(benchmark.title, str(DATASETS), None)
    return TestSet(benchmark.title, found.source, [question for _, question in found.rows])


def _prepared_name(benchmark: Benchmark) -> str:
    return f"{benchmark.public.name if benchmark.public else benchmark.name}.parquet"


def _local_file(benchmark: Benchmark, folders: Sequence[Path]) -> tuple[Path, SetFile] | None:
    name = _prepared_name(benchmark)
    listed = any(file.name == name for file in benchmark.files)
    files = benchmark.files if listed else (SetFile(name, _PREPARED), *benchmark.files)
    paths = ((folder / file.name, file) for folder in folders for file in files)
    return next((candidate for candidate in paths if candidate[0].is_file()), None)


def _from_file(benchmark: Benchmark, path: Path, file: SetFile, notes: list[str]) -> list[tuple[int, Question]]:
    """notes: gets remarks on the questions"""
    import pyarrow as pa

    one = _conversion(benchmark, file)
    kept = lambda row: {**one.meta(row), **{name.rpartition(".")[2]: row[name] for name in file.meta}}
    convert = replace(one, columns=(*one.columns, *file.meta), meta=kept)
    fields = [*convert.columns, *filter(None, [benchmark.by])]
    try:
        present = column_names(path)
        rows = list(read_rows(path, fields))
    except (ValueError, OSError, pa.ArrowException) as error:
        raise BenchmarkError(f"benchmark {benchmark.name!r}: {path}: {error}") from error
    if file.note:
        notes.append(file.note)
    if present:
        _check_columns(str(path), convert.columns, present, f"correct `files` of benchmark {benchmark.name!r}")
        if file.convert != _PREPARED:
            _check_columns(str(path), fields, present, f"correct `by` of benchmark {benchmark.name!r}")
    return _questions(benchmark, rows, convert, place_of(path))


def _check_columns(place: str, needed: Iterable[str], present: Sequence[str], fix: str) -> None:
    if missing := [column for column in needed if column not in present]:
        raise BenchmarkError(
            f"{place}: no column {' and no '.join(map(repr, missing))}, there are {', '.join(present)}; {fix}"
        )


def _from_hub(benchmark: Benchmark, public: PublicSet, places: Sequence[Path]) -> list[tuple[int, Question]]:
    """places: where it was looked for before"""
    binding = "the entry in exgrpo_orlhf/questions/catalogue.py"
    try:
        # A short request first: loading the table tries for half a minute where there is no network.
        if os.environ.get("HF_HUB_OFFLINE", "0") in ("", "0"):
            commit(public.id, public.revision, binding)
        table = load_table(public.id, public.subset, public.split, public.revision, binding)
    except HubError as error:
        raise Unavailable(
            f"{str(error).partition(';')[0]}; it is not in {', '.join(map(str, places))} either; with "
            f"scripts/prepare_data.py --only {public.name}, where there is a network and access, it becomes "
            f"{public.name}.parquet: --data FOLDER"
        ) from error
    _check_columns(public.id, public.convert.columns, table.column_names, f"correct {binding}")
    rows = table_rows(table, (*public.convert.columns, *filter(None, [benchmark.by])))
    return _questions(benchmark, rows, public.convert, Place(public.id, "row", 0))


def _conversion(benchmark: Benchmark, file: SetFile) -> Conversion:
    if file.options:
        return conversions.choice(file.question, file.options, file.answer)
    if file.convert == "columns":
        convert = conversions.tests if benchmark.verifier == "code" else conversions.columns
        return convert(file.question, file.answer)
    if file.convert == "boxed":
        return conversions.boxed(file.question, file.answer)
    name = "verl" if file.convert == _PREPARED else file.convert
    if name not in _CONVERSIONS:
        names = ", ".join(("columns", "boxed", *_CONVERSIONS))
        raise BenchmarkError(f"benchmark {benchmark.name!r}: convert = {name!r}; there are {names}")
    return _CONVERSIONS[name]


class _Row(dict[str, Any]):
    """A row with columns that may be dotted paths into nested records."""

    def __missing__(self, name: str) -> Any:
        if missing_in(self, name):
            raise KeyError(name)
        return field_value(self, name)


def _questions(
    benchmark: Benchmark, rows: Iterable[Mapping[str, Any]], convert: Conversion, place: Place
) -> list[tuple[int, Question]]:
    """The questions of all rows, with repetitions, because the score is over the set as it is."""
    questions, by = [], benchmark.by
    for index, row in enumerate(rows):
        where = f"benchmark {benchmark.name!r}: {place.of(index)}"
        try:
            text, answer = (part.strip() for part in convert(_Row(row)))
            text.encode(), answer.encode()  # raises for half a surrogate pair
            meta = convert.meta(_Row(row))
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise BenchmarkError(
                f"{where}: not of the form expected ({type(error).__name__}: {error}): {str(dict(row))[:200]}"
            ) from error
        if not (text and answer):
            raise BenchmarkError(f"{where}: the {'answer' if text else 'question'} is empty")
        if by is not None and not missing_in(row, by):
            meta["group"] = str(field_value(row, by))
        questions.append((index, Question.make(benchmark.name, text, answer, meta)))
    asked = [question for _, question in questions]
    where = f"benchmark {benchmark.name!r}: {place.name}"
    refuse_solutions(asked, lambda _: where, "name the column of the question alone")
    return questions


def _chosen(rows: list[tuple[int, Question]], limit: int) -> list[tuple[int, Question]]:
    """The `limit` rows with the smallest hashes, in order. Repetitions of a question have different hashes."""
    count: Counter[str] = Counter()
    order = []
    for position, (_, question) in enumerate(rows):
        count[question.id] += 1
        name = f"{question.id} {count[question.id]}".encode()
        order.append((hashlib.blake2b(name, digest_size=8).digest(), position))
    return [rows[position] for position in sorted(position for _, position in sorted(order)[:limit])]
