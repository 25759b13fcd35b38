"""Compare two results folders on their common questions: paired differences with intervals and p-values."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .folder import SAMPLES, Results, check_count, read_results
from .results_table import aligned, missing
from .samples import read_samples
from .statistics import Array, PairedDifference, holm, paired

# Settings that two evaluations must share for their difference to be that of the models.
SETTINGS = ("samples", "temperature", "top_p", "max_tokens", "verifier", "ask")

Question = tuple[str, int, str, str]  # id, how often that had occurred before, text, reference answer


@dataclass(frozen=True)
class BenchmarkDifference:
    """One benchmark on the common questions; shares from 0 to 1.

    a, b: avg@k of each evaluation on these questions; paired: b − a
    p_holm: the p-value, corrected for the number of benchmarks compared
    in_mean: whether it counts in the macro mean
    """

    name: str
    title: str
    questions: int
    a: float
    b: float
    paired: PairedDifference
    p_holm: float | None
    in_mean: bool


@dataclass(frozen=True)
class ResultsComparison:
    """Evaluation b against evaluation a.

    macro: the mean of the differences of the benchmarks that count in the mean of both, each with the same weight
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
        lines = [("benchmark", "questions", "a", "b", "b - a", "95 % interval", "p", "p (Holm)")]
        for one in self.benchmarks:
            scores = (str(one.questions), f"{100 * one.a:.1f}", f"{100 * one.b:.1f}")
            lines.append((one.title, *scores, *_cells(one.paired), f"{one.p_holm:.4f}"))
        counted = [one for one in self.benchmarks if one.in_mean]
        mean_a, mean_b = (sum(of) / len(of) for of in zip(*((one.a, one.b) for one in counted), strict=True))
        questions = str(sum(one.questions for one in counted))
        macro = (f"{100 * mean_a:.1f}", f"{100 * mean_b:.1f}", *_cells(self.macro))
        lines.append(("macro mean", questions, *macro, ""))
        head, rule, *rows = aligned(lines, left=1)
        text = [f"a: {self.a}", f"b: {self.b}", "", head, rule, *rows[:-1], rule, rows[-1]]
        beside = tuple(one.title for one in self.benchmarks if not one.in_mean)
        for label, titles in (("not in the mean", beside), ("only in a", self.only_a), ("only in b", self.only_b)):
            if titles:
                text += ["", f"{label}: {', '.join(titles)}"]
        if self.warnings:
            text += ["", *(f"warning: {warning}" for warning in self.warnings)]
        return "\n".join(text)

    def as_json(self) -> dict[str, Any]:
        """The comparison as JSON; `benchmarks` by name."""
        return {**asdict(self), "benchmarks": {one.name: asdict(one) for one in self.benchmarks}}


def compare(a: Path, b: Path, seed: int = 0) -> ResultsComparison:
    """Compare b with a, benchmark by benchmark.

    Questions are the same if their ids, their places among rows of that id, their texts and their reference answers
    are. Samples are averaged for each question, so their numbers may differ.

    Raises:
        ValueError: a folder holds no results, a file is damaged or not what the results were computed from, or the
            two have no question in common.
    """
    ours, theirs = read_results(a), read_results(b)
    names = (str(a), str(b)) if ours["name"] == theirs["name"] else (ours["name"], theirs["name"])
    warnings = _record_warnings(ours, theirs)
    found: list[tuple[str, str, tuple[Array, Array]]] = []  # name, title, avg@k of each, (Q,)
    for name, here in ours["benchmarks"].items():
        there = theirs["benchmarks"].get(name)
        if there is None:
            continue
        first, second = _averages(a, name, here), _averages(b, name, there)
        common = [question for question in first if question in second]
        if different := [f"{key} {here[key]} in a, {there[key]} in b" for key in SETTINGS if here[key] != there[key]]:
            warnings.append(f"{here['title']}: {', '.join(different)}")
        if not common:
            warnings.append(f"{here['title']}: no question in common, not compared")
            continue
        if len(common) < max(len(first), len(second)):
            counts = f"{len(common)} questions in common of {len(first)} in a, {len(second)} in b"
            warnings.append(f"{here['title']}: {counts}")
        scores_a, scores_b = (np.array([side[question] for question in common]) for side in (first, second))
        found.append((name, here["title"], (scores_a, scores_b)))
    if not found:
        listed = [", ".join(one["title"] for one in each["benchmarks"].values()) or "none" for each in (ours, theirs)]
        raise ValueError(f"{a} and {b} have no question in common: one has {listed[0]}, the other {listed[1]}")
    both = (ours["benchmarks"], theirs["benchmarks"])
    in_mean = {name: all(each[name].get("in_mean", True) for each in both) for name, _, _ in found}
    if not any(in_mean.values()):
        in_mean = dict.fromkeys(in_mean, True)
    rng = np.random.default_rng(seed)
    by_name = {name: paired([scores], rng) for name, _, scores in found if in_mean[name]}
    macro = paired([scores for name, _, scores in found if in_mean[name]], rng)
    by_name |= {
        name: paired([scores], rng) for name, _, scores in found if not in_mean[name]
    }  # last: none else changes
    tests = [by_name[name] for name, _, _ in found]
    corrected = holm([test.p_value for test in tests])
    return ResultsComparison(
        a=names[0],
        b=names[1],
        benchmarks=tuple(
            BenchmarkDifference(
                name, title, len(first), float(first.mean()), float(second.mean()), test, p_holm, in_mean[name]
            )
            for (name, title, (first, second)), test, p_holm in zip(found, tests, corrected, strict=True)
        ),
        macro=macro,
        only_a=_only(ours, theirs),
        only_b=_only(theirs, ours),
        warnings=tuple(warnings),
    )


def _averages(folder: Path, benchmark: str, known: Results) -> dict[Question, float]:
    """The share of correct samples of each question, by row. known: the benchmark's entry in results.json"""
    path = folder / benchmark / SAMPLES
    asked: dict[int, tuple[str, str, str]] = {}
    verdicts: defaultdict[int, list[bool]] = defaultdict(list)
    for _, sample in read_samples(path):
        asked[sample["row"]] = (sample["id"], sample["question"], sample["gold"])
        verdicts[sample["row"]].append(sample["verdict"] == "correct")
    check_count(path, (row for row, those in verdicts.items() for _ in those), known)
    occurred: Counter[str] = Counter()
    averages = {}
    for row, (question_id, text, answer) in sorted(asked.items()):
        averages[question_id, occurred[question_id], text, answer] = sum(verdicts[row]) / len(verdicts[row])
        occurred[question_id] += 1
    return averages


def _only(ours: Results, theirs: Results) -> tuple[str, ...]:
    """Titles of our benchmarks that they lack."""
    return tuple(one["title"] for name, one in ours["benchmarks"].items() if name not in theirs["benchmarks"])


def _record_warnings(ours: Results, theirs: Results) -> list[str]:
    lacking = [(side, missing(one)) for side, one in (("a", ours), ("b", theirs))]
    warnings = [f"{side} is not complete: {what}" for side, what in lacking if what]
    first, second = ours["record"], theirs["record"]
    if first["template"]["fingerprint"] != second["template"]["fingerprint"]:
        names = f"{first['template']['name']} in a, {second['template']['name']} in b"
        warnings.append(f"the prompts were rendered by different templates: {names}")
    for name in ("name", "dtype"):
        if first["engine"].get(name) != second["engine"].get(name):
            warnings.append(f"engine {name}: {first['engine'].get(name)} in a, {second['engine'].get(name)} in b")
    grader = [one.get("graded_with", one)["git_commit"] for one in (first, second)]
    if grader[0] != grader[1]:
        warnings.append(f"graded by different versions: {grader[0]} in a, {grader[1]} in b; regrade both")
    return warnings


def _cells(test: PairedDifference) -> tuple[str, str, str]:
    interval = f"[{100 * test.low:+.1f}, {100 * test.high:+.1f}]"
    return f"{100 * test.difference:+.1f}", interval, f"{test.p_value:.4f}"
