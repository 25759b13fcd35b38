"""Benchmarks and suites, read from evals/benchmarks.toml and from the user's own files."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..paths import PROJECT
from ..questions.catalogue import PUBLIC_SETS, PublicSet
from ..rewards import Verifier
from ..settings import require
from ..tasks.made_questions import MadeQuestions
from ..tasks.modular_chains import ModularChains
from ..tasks.word_problems import WordProblems

DEFINITIONS = PROJECT / "evals" / "benchmarks.toml"


# Verifier -> (instruction below a question, when it is added).
_ASK = {
    "math": ("Reason step by step and put the final answer within \\boxed{}.", "silent"),
    "choice": ("Reason step by step and put the label of the right option within \\boxed{}.", "always"),
}
_SETTINGS = ("verifier", "function", "samples", "temperature", "top_p", "max_tokens", "rows", "ask", "ask_when")
_TASKS: dict[str, type[MadeQuestions]] = {"chains": ModularChains, "word_problems": WordProblems}  # by their key


class BenchmarkError(ValueError):
    """A benchmark that does not exist or is not well defined. The message names file, block and key."""


@dataclass(frozen=True)
class SetFile:
    """A local file of a set.

    convert: how a row becomes a question; question, answer: its columns, for the conversions that need them
    options: the column with the texts of the options, for multiple choice; note: a remark beside the score
    """

    name: str
    convert: str = "columns"
    question: str = "question"
    answer: str = "answer"
    options: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """One block.

    verifier, function: as Verifier.kind and Verifier.function
    group: benchmarks with a common mean; default "other", in a user's own file "own"
    rows: the official number of rows; None: not known
    samples: responses to each question; max_tokens: of a response
    ask: the instruction below each question; '' for none. The default asks to box a mathematical answer, with
        ask_when = 'silent', and to box the label of an option, with ask_when = 'always'
    ask_when: 'always', or 'silent': only if nothing else in the prompt mentions a box
    chains, word_problems: questions that are made here, by the fields of ModularChains or WordProblems
    by: a column, or a field of the question's meta; each of its values gets its own score
    folder: of the file with the block
    own: defined in a user's own file only: it is in no mean of the project's benchmarks
    departures: settings changed by the command line, or by a user's block of this name
    """

    name: str
    title: str
    verifier: str
    samples: int
    temperature: float
    top_p: float
    max_tokens: int
    group: str = "other"
    public: PublicSet | None = None
    files: tuple[SetFile, ...] = ()
    chains: ModularChains | None = None
    word_problems: WordProblems | None = None
    rows: int | None = None
    ask: str | None = None
    ask_when: str | None = None
    by: str | None = None
    function: str | None = None
    folder: Path = Path()
    own: bool = False
    departures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n, known = self.samples, self.ask_when in ("always", "silent", None)
        alike = n > 1 and self.temperature == 0
        for right, said in (
            (n >= 1, f"samples must be at least 1, got {n!r}"),
            (0 <= self.temperature < math.inf, f"temperature is 0 (greedy) or above, got {self.temperature!r}"),
            (0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, got {self.top_p!r}"),
            (self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens!r}"),
            (known, f"ask_when must be 'always' or 'silent', got {self.ask_when!r}"),
            (not alike, f"{n} samples at temperature 0 would all be the same; give 1 sample, or a temperature"),
        ):
            require(right, f"benchmark {self.name!r}: {said}")
        self.grader(5.0, 1)

    @property
    def made(self) -> MadeQuestions | None:
        """The questions, if they are made here."""
        return self.chains or self.word_problems

    def instruction(self, silent: bool) -> str | None:
        """The instruction below a question. silent: whether nothing else in the prompt mentions a box"""
        ask, when = _ASK.get(self.verifier, (None, "always"))
        ask, when = (ask if self.ask is None else self.ask), self.ask_when or when
        return ask if ask and (when == "always" or silent) else None

    def grader(self, timeout: float, workers: int) -> Verifier:
        """The verifier. Responses that it cannot grade are counted and do not end the evaluation."""
        kind: Any = self.verifier
        return Verifier(kind, function=self.function, timeout=timeout, workers=workers, max_failed_share=1.0)


class Definitions:
    """All blocks and suites of some files. Later files replace blocks of earlier ones, but not their suites.

    No file but evals/benchmarks.toml changes which benchmarks a suite or a group of that file has.
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

    def benchmark(self, name: str, asked_by: str = "--benchmarks") -> Benchmark:
        """Raises BenchmarkError with the nearest names."""
        if name in self.benchmarks:
            return self.benchmarks[name]
        raise BenchmarkError(f"{asked_by}: there is no benchmark {name!r}; {_nearest(name, self.benchmarks)}")

    def suite(self, name: str) -> list[Benchmark]:
        """Raises BenchmarkError with the nearest names."""
        if name not in self.suites:
            raise BenchmarkError(f"--suite: there is no suite {name!r}; {_nearest(name, self.suites)}")
        return [self.benchmarks[each] for each in self.suites[name]]

    def group(self, name: str) -> list[str]:
        """The names of all benchmarks of a group."""
        return [each.name for each in self.benchmarks.values() if each.group == name]

    def _read(self, file: Path) -> None:
        try:
            blocks = tomllib.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BenchmarkError(f"{file}: no such file of benchmarks") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BenchmarkError(f"{file}: not TOML: {error}") from error
        suites, defaults = blocks.pop("suites", {}), blocks.pop("defaults", {})
        if not isinstance(suites, dict) or not isinstance(defaults, dict):
            raise BenchmarkError(f"{file}: [suites] and [defaults] are tables")
        for suite, names in suites.items():
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise BenchmarkError(f"{file}: suite {suite!r} is a list of benchmarks' names, not {names!r}")
            if suite in self.suites:
                raise BenchmarkError(f"{file}: suite {suite!r} is defined already; give yours another name")
            self.suites[suite] = tuple(dict.fromkeys(names))
        self._defaults |= defaults
        for name, block in blocks.items():
            if not isinstance(block, dict):
                raise BenchmarkError(f"{file}: {name} = {block!r} stands in no block; blocks begin with [name]")
            self.benchmarks[name] = self._benchmark(name, block, file)
            group = self.benchmarks[name].group
            if file == DEFINITIONS and name not in suites.get(group, [name]):
                raise BenchmarkError(
                    f"{file}, block [{name}]: group {group!r} is the mean of suite {group!r}, which does not list "
                    f"{name}; give another group, or list it there"
                )

    def _benchmark(self, name: str, block: Mapping[str, Any], file: Path) -> Benchmark:
        given, own, before = {**self._defaults, **block}, file != DEFINITIONS, self.benchmarks.get(name)
        if own:
            given.setdefault("group", before.group if before else "own")
        public, files = given.get("public"), given.get("files", [])
        try:
            plain = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
            require(plain, "a name has letters, digits, - and _ alone: a folder and metrics bear it")
            _check(given, Benchmark, without=("name", "folder", "own", "departures"))
            if public is not None and str(public) not in PUBLIC_SETS:
                raise ValueError(f"public = {public!r} is in no catalogue; {_nearest(str(public), PUBLIC_SETS)}")
            tables = isinstance(files, list) and all(isinstance(each, dict) for each in files)
            require(tables, f'files is a list of tables such as {{ name = "set.jsonl" }}, not {files!r}')
            for each in files:
                _check(each, SetFile)
            made = [task for task in _TASKS if task in given]
            require(bool(public or files or made), f"no source; give files, public, {' or '.join(_TASKS)}")
            sources = [*made, *(key for key in ("public", "files") if made and given.get(key))]
            require(len(sources) < 2, f"{' and '.join(sources)} are two sources; give one of them")
            require(given["verifier"] != "code", "programs are not evaluated here; verifier = 'function' can")
            given["public"] = PUBLIC_SETS[public] if public else None
            given["files"] = tuple(SetFile(**each) for each in files)
            for task in made:
                table = isinstance(given[task], dict)
                require(table, f"{task} is a table such as {{ count = 100 }}, not {given[task]!r}")
                lists = {key: tuple(value) for key, value in given[task].items() if isinstance(value, list)}
                given[task] = _TASKS[task](**{**given[task], **lists})
            if public and "rows" not in given and len(set(PUBLIC_SETS[public].rows)) == 1:
                given["rows"] = PUBLIC_SETS[public].rows[0]
            now = Benchmark(
                name=name, folder=file.resolve().parent, own=own and (before is None or before.own), **given
            )
            if own:
                self._check_group(now, before)
            return now if before is None else replace(now, departures=_changes(before, now, file))
        except (ValueError, TypeError) as error:
            raise BenchmarkError(f"{file}, block [{name}]: {error}") from error

    def _check_group(self, now: Benchmark, before: Benchmark | None) -> None:
        """Raises ValueError if a user's block would change which benchmarks a group of the project's has."""
        theirs = {each.group for each in self.benchmarks.values() if not each.own}
        if now.own:
            said = f"group {now.group!r} is the project's, and its mean would change; give a group of your own"
            require(now.group not in theirs, said)
        elif before is not None:
            require(now.group == before.group, f"{now.name} is of group {before.group!r}, not {now.group!r}")


def _changes(before: Benchmark, now: Benchmark, file: Path) -> tuple[str, ...]:
    """How a block differs from the one that it replaces."""
    unlike = [each.name for each in fields(Benchmark) if getattr(before, each.name) != getattr(now, each.name)]
    said = [f"{name} {getattr(now, name)!r}, not {getattr(before, name)!r}" for name in unlike if name in _SETTINGS]
    return (*said, *([f"questions as {file.name} says"] if set(unlike) & {"public", "files", *_TASKS} else ()))


def override(benchmark: Benchmark, **settings: Any) -> Benchmark:
    """Apply the settings that are not None. Temperature 0 means one sample by default. Raises ValueError."""
    given = {name: value for name, value in settings.items() if value is not None}
    if given.get("temperature") == 0:
        given.setdefault("samples", 1)
    changed = {name: value for name, value in given.items() if value != getattr(benchmark, name)}
    departures = tuple(f"{name} {value}, not {getattr(benchmark, name)}" for name, value in changed.items())
    return replace(benchmark, **changed, departures=(*benchmark.departures, *departures))


def _check(given: Mapping[str, Any], into: type, without: tuple[str, ...] = ()) -> None:
    """Raises ValueError unless every key is known, has a value of its type, and none is missing."""
    known = {field.name: field for field in fields(into) if field.name not in without}
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"there is no key {key!r}; {_nearest(key, known)}")
        kinds = {"str": str, "int": int, "float": int | float}
        kind = kinds.get(str(known[key].type).removesuffix(" | None"))
        fits = kind is None or (isinstance(value, kind) and not isinstance(value, bool))
        require(fits, f"{key} takes {known[key].type}, got {value!r}")
    required = [key for key in ("title", "verifier", "name") if key in known and key not in given]
    require(not required, f"{' and '.join(required)} must be given")


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
