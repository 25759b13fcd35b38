"""Benchmarks and suites, read from evals/benchmarks.toml and from the user's own files."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..checks import Count, NotNegative, PositiveShare, check_settings, require
from ..environments import Environment
from ..io.entry_points import entry_points_of, loaded
from ..io.paths import PROJECT
from ..questions.catalogue import PUBLIC_SETS, PublicSet
from ..rewards import Verifier

DEFINITIONS = PROJECT / "evals" / "benchmarks.toml"

_BOX = "Reason step by step and put the final answer within \\boxed{}."
_MATHS = ("math", "math_verify")
_ASK = {  # verifier -> the instruction below a question
    **dict.fromkeys(_MATHS, _BOX),
    "choice": "Reason step by step and put the label of the right option within \\boxed{}.",
    "reasoning_gym": "Reason step by step and put the final answer within <answer> and </answer>.",
    "code": "Reason step by step and write the whole program in one Python code block.",
}
_TASKS = {"chains": "ModularChains", "word_problems": "WordProblems", "reasoning_gym": "ReasoningGym"}  # by their key


class BenchmarkError(ValueError):
    """A benchmark that does not exist or is not well defined. The message names file, block and key."""


@dataclass(frozen=True)
class SetFile:
    """A local file of a set.

    convert: how a row becomes a question; question, answer: its columns, for the conversions that need them; with
        verifier 'code' the answer is the tests
    options: the column with the texts of the options, for multiple choice; note: a remark beside the score
    meta: further columns that the verifier or the environment needs, as QuestionFile.meta
    """

    name: str
    convert: str = "columns"
    question: str = "question"
    answer: str = "answer"
    options: str | None = None
    note: str | None = None
    meta: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_settings(SetFile, vars(self), "files: ")


@dataclass(frozen=True)
class Benchmark:
    """One block.

    verifier, function, url: as Verifier.kind, Verifier.function and Verifier.url
    group: benchmarks with a common mean; default "other", in a user's own file "own"
    rows: the official number of rows; None: not known
    samples: responses to each question; max_tokens: of a response
    ask: the instruction below each question; '' for none. None: a checkpoint of this trainer gets what stood around
        the questions of its training; for another model a multiple choice asks to box the label, and mathematics,
        unless something else in the prompt mentions a box, to box the answer
    made: questions that are made here; in a file chains, word_problems or reasoning_gym, with the fields of
        ModularChains, WordProblems or ReasoningGym, but with split = "validation" by default
    environment: makes each response an episode; in a file the fields of Environment. A path is looked for beside the
        file of the block first. With reward 'verifier' the verifier grades, else the environment
    by: a column, or a field of the question's meta; each of its values gets its own score
    folder: of the file with the block
    own: defined in a user's own file: it is in no mean of the project's benchmarks
    departures: settings changed by the command line
    """

    name: str
    title: str
    verifier: str
    samples: Count
    temperature: NotNegative
    top_p: PositiveShare
    max_tokens: Count
    group: str = "other"
    public: PublicSet | None = None
    files: tuple[SetFile, ...] = ()
    made: Any = None
    rows: int | None = None
    ask: str | None = None
    by: str | None = None
    function: str | None = None
    url: str | tuple[str, ...] | None = None
    environment: Environment | None = None
    folder: Path = Path()
    own: bool = False
    departures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_settings(Benchmark, vars(self), f"benchmark {self.name!r}: ")
        require(
            self.samples == 1 or self.temperature > 0,
            f"benchmark {self.name!r}: {self.samples} samples at temperature 0 would all be the same; give 1 sample, "
            "or a temperature",
        )
        self.grader(5.0, 1)

    def instruction(self, silent: bool) -> str | None:
        """The instruction below a question. silent: whether nothing else in the prompt mentions a box"""
        if self.ask is not None:
            return self.ask or None
        return _ASK.get(self.verifier) if silent or self.verifier not in _MATHS else None

    def grader(self, timeout: float, workers: int) -> Verifier:
        """The verifier. Responses that it cannot grade are counted and do not end the evaluation."""
        kind: Any = self.verifier
        options: Any = {"function": self.function, "url": self.url}
        return Verifier(kind, timeout=timeout, workers=workers, max_failed_share=1.0, **options)


class Definitions:
    """All blocks and suites of some files. A name is defined once: no file but evals/benchmarks.toml changes what a
    benchmark of that file is, or which benchmarks a suite or a group of it has.
    """

    def __init__(self, files: Sequence[Path] = (DEFINITIONS,)) -> None:
        """Raises BenchmarkError."""
        self.benchmarks: dict[str, Benchmark] = {}
        self.suites: dict[str, tuple[str, ...]] = {}
        self._defaults: dict[str, Any] = {}
        for file in files:
            self._read(file)
        for suite, names in self.suites.items():
            for name in names:
                self.benchmark(name, f"suite {suite!r}")

    def benchmark(self, name: str, source: str = "--benchmarks") -> Benchmark:
        """Raises BenchmarkError with the nearest names. source: where the name is from, for the message"""
        if name in self.benchmarks:
            return self.benchmarks[name]
        raise BenchmarkError(f"{source}: there is no benchmark {name!r}; {_nearest(name, self.benchmarks)}")

    def suite(self, name: str) -> list[Benchmark]:
        """Raises BenchmarkError with the nearest names."""
        if name not in self.suites:
            raise BenchmarkError(f"--suite: there is no suite {name!r}; {_nearest(name, self.suites)}")
        return [self.benchmarks[member] for member in self.suites[name]]

    def group(self, name: str) -> list[str]:
        """The names of all benchmarks of a group."""
        return [benchmark.name for benchmark in self.benchmarks.values() if benchmark.group == name]

    def listing(self) -> str:
        """A line for each benchmark and suite."""
        lines = [
            f"{name:15} {one.title}{'' if one.rows is None else f', {one.rows:,} questions'}, {one.samples} samples, "
            f"group {one.group}"
            for name, one in self.benchmarks.items()
        ]
        return "\n".join([*lines, *(f"--suite {name}: {', '.join(members)}" for name, members in self.suites.items())])

    def _read(self, file: Path) -> None:
        try:
            blocks = tomllib.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BenchmarkError(f"{file}: no such file of benchmarks") from None
        except ValueError as error:
            raise BenchmarkError(f"{file}: not TOML: {error}") from error
        suites, defaults = blocks.pop("suites", {}), blocks.pop("defaults", {})
        if not all(isinstance(table, dict) for table in (suites, defaults, *blocks.values())):
            raise BenchmarkError(f"{file}: a setting stands in no block; blocks begin with [name]")
        for suite, names in suites.items():
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise BenchmarkError(f"{file}: suite {suite!r} is a list of benchmarks' names, not {names!r}")
            if suite in self.suites:
                raise BenchmarkError(f"{file}: suite {suite!r} is defined already; give yours another name")
            self.suites[suite] = tuple(dict.fromkeys(names))
        defaults = {**self._defaults, **defaults}
        if file == DEFINITIONS:
            self._defaults = defaults
        for name, block in blocks.items():
            try:
                self.benchmarks[name] = self._benchmark(name, {**defaults, **block}, file, suites)
            except (ValueError, TypeError) as error:
                raise BenchmarkError(f"{file}, block [{name}]: {error}") from error

    def _benchmark(self, name: str, block: dict[str, Any], file: Path, suites: Mapping[str, Any]) -> Benchmark:
        is_own = file != DEFINITIONS
        require(name not in self.benchmarks, f"{name} is defined already; give yours another name")
        named = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
        require(named, "a name has letters, digits, - and _ alone: a folder and metrics bear it")
        _check_keys(block, Benchmark, without=("name", "folder", "own", "departures", "made"), extra=_TASKS)
        public, files, tasks = block.get("public"), block.get("files", []), [task for task in _TASKS if task in block]
        if public is not None and public not in PUBLIC_SETS:
            raise ValueError(f"public = {public!r} is in no catalogue; {_nearest(public, PUBLIC_SETS)}")
        tables = isinstance(files, list) and all(isinstance(item, dict) for item in files)
        require(tables, f'files is a list of tables such as {{ name = "set.jsonl" }}, not {files!r}')
        for entry in files:
            _check_keys(entry, SetFile)
            fixed = entry.get("convert", "columns") not in ("columns", "boxed")
            ignored = [key for key in ("question", "answer", "options") if fixed and key in entry]
            require(not ignored, f"convert = {entry.get('convert')!r} ignores {' and '.join(ignored)}; leave one out")
        require(bool(public or files or tasks), f"no source; give files, public, {' or '.join(_TASKS)}")
        sources = [*tasks, *(key for key in ("public", "files") if tasks and block.get(key))]
        require(len(sources) < 2, f"{' and '.join(sources)} are two sources; give one of them")
        for task in tasks:
            table = block.pop(task)
            require(isinstance(table, dict), f"{task} is a table such as {{ count = 100 }}, not {table!r}")
            settings = {"split": "validation", **_with_tuples(table)}
            block["made"] = loaded(entry_points_of("exgrpo_orlhf.gin")[_TASKS[task]])(**settings)
        if "environment" in block:
            block["environment"] = _environment(block["environment"], file.resolve().parent)
        if public and len(set(PUBLIC_SETS[public].rows)) == 1:
            block.setdefault("rows", PUBLIC_SETS[public].rows[0])
        group = block.setdefault("group", "own" if is_own else "other")
        projects = {benchmark.group for benchmark in self.benchmarks.values() if not benchmark.own}
        change = f"group {group!r} is the project's, and its mean would change; give a group of your own"
        require(not is_own or group not in projects, change)
        require(
            is_own or name in suites.get(group, [name]),
            f"group {group!r} is the mean of suite {group!r}, which does not list {name}; give another group, or list "
            "it there",
        )
        block["public"] = PUBLIC_SETS[public] if public else None
        block["files"] = tuple(SetFile(**_with_tuples(item)) for item in files)
        return Benchmark(name=name, folder=file.resolve().parent, own=is_own, **_with_tuples(block))


@cache
def project_definitions() -> Definitions:
    """Those of evals/benchmarks.toml, which a process reads once."""
    return Definitions()


def _environment(table: Any, folder: Path) -> Environment:
    require(isinstance(table, dict), f'environment is a table such as {{ path = "agent.py" }}, not {table!r}')
    _check_keys(table, Environment)
    path = table.get("path")
    require(bool(path), "environment needs the path of its .py file")
    beside = {"path": str(folder / path)} if (folder / path).is_file() else {}
    return Environment(**{**_with_tuples(table), **beside})


def _with_tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


def override(benchmark: Benchmark, **settings: Any) -> Benchmark:
    """Apply the settings that are not None. Temperature 0 means one sample by default. Raises ValueError."""
    settings = {name: value for name, value in settings.items() if value is not None}
    if settings.get("temperature") == 0:
        settings.setdefault("samples", 1)
    changes = {name: value for name, value in settings.items() if value != getattr(benchmark, name)}
    departures = tuple(f"{name} {value}, not {getattr(benchmark, name)}" for name, value in changes.items())
    return replace(benchmark, **changes, departures=departures)


def _check_keys(block: Mapping[str, Any], table: type, without: Sequence[str] = (), extra: Iterable[str] = ()) -> None:
    """Raises ValueError unless each key of a block is a field of the table and none is missing.

    without: fields that are no keys; extra: keys that are no fields
    """
    keys = [*(field.name for field in fields(table) if field.name not in without), *extra]
    for key in block:
        if key not in keys:
            raise ValueError(f"there is no key {key!r}; {_nearest(key, keys)}")
    missing = [key for key in ("title", "verifier", "name") if key in keys and key not in block]
    require(not missing, f"{' and '.join(missing)} must be given")


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"
