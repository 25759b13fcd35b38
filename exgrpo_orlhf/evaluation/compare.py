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
        counted = [one for one in self.benchmarks if one.in_mean]
        a, b = (sum(getattr(one, side) for one in counted) / len(counted) for side in ("a", "b"))
        questions = sum(one.questions for one in counted)
        rows = [(one.title, one.questions, one.a, one.b, one.paired, f"{one.p_holm:.4f}") for one in self.benchmarks]
        lines = [("benchmark", "questions", "a", "b", "b - a", "95 % interval", "p", "p (Holm)")]
        for title, count, first, second, test, p_holm in (*rows, ("macro mean", questions, a, b, self.macro, "")):
            bounds = f"[{100 * test.low:+z.1f}, {100 * test.high:+z.1f}]"
            scores = f"{100 * first:.1f}", f"{100 * second:.1f}", f"{100 * test.difference:+z.1f}"
            lines.append((title, str(count), *scores, bounds, f"{test.p_value:.4f}", p_holm))
        head, rule, *rest = aligned(lines, left=1)
        text = [f"a: {self.a}", f"b: {self.b}", "", head, rule, *rest[:-1], rule, rest[-1]]
        beside = tuple(one.title for one in self.benchmarks if not one.in_mean)
        for label, titles in (("not in the mean", beside), ("only in a", self.only_a), ("only in b", self.only_b)):
            text += ["", f"{label}: {', '.join(titles)}"] if titles else []
        return "\n".join([*text, *([""] if self.warnings else []), *(f"warning: {each}" for each in self.warnings)])

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
    scores: dict[str, tuple[Array, Array]] = {}  # benchmark -> avg@k of each on the common questions, (Q,)
    in_mean = {}
    for name, here in ours["benchmarks"].items():
        if (there := theirs["benchmarks"].get(name)) is None:
            continue
        first, second, title = _averages(a, name, here), _averages(b, name, there), here["title"]
        common = [question for question in first if question in second]
        if changes := [f"{key} {here[key]} in a, {there[key]} in b" for key in SETTINGS if here[key] != there[key]]:
            warnings.append(f"{title}: {', '.join(changes)}")
        if not common:
            warnings.append(f"{title}: no question in common, not compared")
            continue
        if len(common) < max(len(first), len(second)):
            warnings.append(f"{title}: {len(common)} questions in common of {len(first)} in a, {len(second)} in b")
        scores[name] = np.array([first[one] for one in common]), np.array([second[one] for one in common])
        in_mean[name] = here["in_mean"] and there["in_mean"]
    if not scores:
        listed = [", ".join(one["title"] for one in each["benchmarks"].values()) or "none" for each in (ours, theirs)]
        raise ValueError(f"{a} and {b} have no question in common: one has {listed[0]}, the other {listed[1]}")
    if not any(in_mean.values()):
        in_mean = dict.fromkeys(in_mean, True)
    rng, beside = np.random.default_rng(seed), [name for name in scores if not in_mean[name]]
    tests = {name: paired([pair], rng) for name, pair in scores.items() if in_mean[name]}
    macro = paired([pair for name, pair in scores.items() if in_mean[name]], rng)
    tests |= {name: paired([scores[name]], rng) for name in beside}  # last: they change nothing of the others
    corrected = holm([tests[name].p_value for name in scores])
    benchmarks = []
    for (name, (x, y)), p_holm in zip(scores.items(), corrected, strict=True):
        averages, title = (float(x.mean()), float(y.mean())), ours["benchmarks"][name]["title"]
        benchmarks.append(BenchmarkDifference(name, title, len(x), *averages, tests[name], p_holm, in_mean[name]))
    only_a, only_b = (
        tuple(one["title"] for name, one in this["benchmarks"].items() if name not in other["benchmarks"])
        for this, other in ((ours, theirs), (theirs, ours))
    )
    return ResultsComparison(names[0], names[1], tuple(benchmarks), macro, only_a, only_b, tuple(warnings))


def _averages(folder: Path, benchmark: str, entry: Results) -> dict[Question, float]:
    """The share of correct samples of each question, by row. entry: the benchmark's in results.json"""
    path = folder / benchmark / SAMPLES
    texts: dict[int, tuple[str, str, str]] = {}
    verdicts: defaultdict[int, list[bool]] = defaultdict(list)
    for _, sample in read_samples(path):
        texts[sample["row"]] = (sample["id"], sample["question"], sample["gold"])
        verdicts[sample["row"]].append(sample["verdict"] == "correct")
    check_count(path, (row for row, samples in verdicts.items() for _ in samples), entry)
    occurrences: Counter[str] = Counter()
    averages = {}
    for row, (question_id, text, answer) in sorted(texts.items()):
        averages[question_id, occurrences[question_id], text, answer] = sum(verdicts[row]) / len(verdicts[row])
        occurrences[question_id] += 1
    return averages


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
