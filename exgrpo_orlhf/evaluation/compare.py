"""Two results folders on the questions that both asked: what differs, and how surely."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .statistics import PairedDifference, holm, paired, paired_macro

# What two runs must have in common for their difference to be the models' own.
SETTINGS = ("samples", "temperature", "top_p", "max_tokens", "verifier", "ask")

Key = tuple[str, int]  # id of a question, how often it had occurred before
Results = dict[str, Any]


@dataclass(frozen=True)
class BenchmarkDifference:
    """One benchmark on the questions that both asked; shares from 0 to 1.

    a, b: avg@k of each on these questions
    paired: b − a
    p_holm: the p-value, corrected for the number of benchmarks compared
    """

    name: str
    title: str
    questions: int
    a: float
    b: float
    paired: PairedDifference
    p_holm: float | None


@dataclass(frozen=True)
class Comparison:
    """macro: the mean of the benchmarks' differences, each counting the same
    only_a, only_b: titles of benchmarks that only one of them has
    warnings: where the two were not run alike
    """

    a: str
    b: str
    benchmarks: tuple[BenchmarkDifference, ...]
    macro: PairedDifference
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    warnings: tuple[str, ...]

    def table(self) -> str:
        """Aligned text for a terminal; scores in per cent."""
        header = ("benchmark", "questions", "a", "b", "b - a", "95 % interval", "p", "p (Holm)")
        lines = [header]
        for one in self.benchmarks:
            scores = (str(one.questions), f"{100 * one.a:.1f}", f"{100 * one.b:.1f}")
            lines.append((one.title, *scores, *_cells(one.paired), f"{one.p_holm:.4f}"))
        means = [sum(scores) / len(scores) for scores in zip(*((one.a, one.b) for one in self.benchmarks), strict=True)]
        questions = str(sum(one.questions for one in self.benchmarks))
        lines.append(("macro mean", questions, *(f"{100 * mean:.1f}" for mean in means), *_cells(self.macro), ""))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [f"a: {self.a}", f"b: {self.b}", ""]
        for cells in lines:
            aligned = [cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]
            text.append("  ".join(aligned).rstrip())
        text.insert(4, "  ".join("-" * width for width in widths))
        text.insert(-1, text[4])
        for label, titles in (("only in a", self.only_a), ("only in b", self.only_b)):
            if titles:
                text += ["", f"{label}: {', '.join(titles)}"]
        if self.warnings:
            text += ["", *(f"warning: {warning}" for warning in self.warnings)]
        return "\n".join(text)

    def as_json(self) -> dict[str, Any]:
        """The same as JSON takes it; `benchmarks` by name."""
        return {**asdict(self), "benchmarks": {one.name: asdict(one) for one in self.benchmarks}}


def compare(a: Path, b: Path, seed: int = 0) -> Comparison:
    """b against a, benchmark by benchmark.

    A question is the same if its id, its place among rows of that id, its text and its reference answer are. Samples
    are averaged for each question, so that their numbers may differ.

    Raises ValueError if a folder holds no results, a file of it is damaged or not what the results were computed from,
    or the two have no question in common.
    """
    ours, theirs = _results(a), _results(b)
    names = (str(a), str(b)) if ours["name"] == theirs["name"] else (ours["name"], theirs["name"])
    both = [name for name in ours["benchmarks"] if name in theirs["benchmarks"]]
    warnings = _record_warnings(ours, theirs)
    rng = np.random.default_rng(seed)
    found: list[tuple[str, str, np.ndarray, np.ndarray]] = []  # name, title, avg@k of each, (Q,)
    for name in both:
        here, there = ours["benchmarks"][name], theirs["benchmarks"][name]
        first, second = _questions(a, name, here), _questions(b, name, there)
        common = [key for key in first if key in second and first[key].content == second[key].content]
        warnings += _benchmark_warnings(here, there, len(first), len(second), len(common))
        if common:
            scores = [np.array([side[key].average for key in common]) for side in (first, second)]
            found.append((name, here["title"], *scores))
    if not found:
        raise ValueError(
            f"{a} and {b} have no question in common: one has {_listed(ours['benchmarks'])}, the other "
            f"{_listed(theirs['benchmarks'])}"
        )
    tests = [paired(first, second, rng) for _, _, first, second in found]
    corrected = holm([test.p_value for test in tests])
    return Comparison(
        *names,
        benchmarks=tuple(
            BenchmarkDifference(name, title, len(first), float(first.mean()), float(second.mean()), test, p_holm)
            for (name, title, first, second), test, p_holm in zip(found, tests, corrected, strict=True)
        ),
        macro=paired_macro([(first, second) for _, _, first, second in found], rng),
        only_a=tuple(one["title"] for name, one in ours["benchmarks"].items() if name not in both),
        only_b=tuple(one["title"] for name, one in theirs["benchmarks"].items() if name not in both),
        warnings=tuple(warnings),
    )


@dataclass
class _Asked:
    """A question as one folder has it, and its samples."""

    content: tuple[str, str]  # its text and its reference answer
    correct: int = 0
    samples: int = 0

    @property
    def average(self) -> float:
        return self.correct / self.samples


def _results(folder: Path) -> Results:
    path = folder / "results.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no results: {path} does not exist")
    try:
        results = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(results, dict) or results.get("format") != 1:
        raise ValueError(f"{path} is not a results.json of format 1")
    return results


def _questions(folder: Path, benchmark: str, results: Results) -> dict[Key, _Asked]:
    """A benchmark's questions in the order of their rows. results: of this benchmark"""
    path = folder / benchmark / "samples.jsonl"
    rows: dict[int, tuple[str, _Asked]] = {}
    for number, sample in _lines(path):
        try:
            _, asked = rows.setdefault(sample["row"], (sample["id"], _Asked((sample["question"], sample["gold"]))))
            asked.correct += sample["verdict"] == "correct"
            asked.samples += 1
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number} is no sample: {error!r}") from error
    if [asked.samples for _, asked in rows.values()] != [results["samples"]] * results["questions"]:
        raise ValueError(
            f"{path} does not hold {results['samples']} samples for each of {results['questions']} questions, as "
            f"results.json counts them: run or regrade the evaluation to its end first"
        )
    occurred: Counter[str] = Counter()
    questions = {}
    for row in sorted(rows):
        question_id, asked = rows[row]
        questions[question_id, occurred[question_id]] = asked
        occurred[question_id] += 1
    return questions


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Each line's number and object. A line ends at "\\n" alone: others occur in texts."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist, though results.json names its benchmark")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number} is no JSON: {error}") from error


def _record_warnings(ours: Results, theirs: Results) -> list[str]:
    warnings = [f"{side} is not complete" for side, one in (("a", ours), ("b", theirs)) if not one["complete"]]
    first, second = ours["record"]["template"], theirs["record"]["template"]
    if first["fingerprint"] != second["fingerprint"]:
        names = f"{first['name']} in a, {second['name']} in b"
        warnings.append(f"the prompts were rendered by different templates: {names}")
    first, second = ours["record"], theirs["record"]
    for name in ("name", "dtype"):
        if first["engine"].get(name) != second["engine"].get(name):
            warnings.append(f"engine {name}: {first['engine'].get(name)} in a, {second['engine'].get(name)} in b")
    grader = [one.get("graded_with", one)["git_commit"] for one in (first, second)]
    if grader[0] != grader[1]:
        warnings.append(f"graded by different versions: {grader[0]} in a, {grader[1]} in b; regrade both")
    return warnings


def _benchmark_warnings(here: Results, there: Results, first: int, second: int, common: int) -> list[str]:
    """first, second: questions that each asked; common: that both did"""
    different = [f"{name} {here[name]} in a, {there[name]} in b" for name in SETTINGS if here[name] != there[name]]
    warnings = [f"{here['title']}: {', '.join(different)}"] if different else []
    if not common:
        warnings.append(f"{here['title']}: no question in common, not compared")
    elif common < max(first, second):
        warnings.append(f"{here['title']}: {common} questions in common of {first} in a, {second} in b")
    return warnings


def _cells(test: PairedDifference) -> tuple[str, str, str]:
    interval = f"[{100 * test.low:+.1f}, {100 * test.high:+.1f}]"
    return f"{100 * test.difference:+.1f}", interval, f"{test.p_value:.4f}"


def _listed(benchmarks: Results) -> str:
    return ", ".join(one["title"] for one in benchmarks.values()) or "none"
