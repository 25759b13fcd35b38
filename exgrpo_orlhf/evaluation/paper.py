"""The results beside the tables of the ExGRPO paper."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..study.seeds import Mean, mean
from ..study.suite import Suite
from .benchmarks import Definitions
from .folder import Results
from .statistics import mean_over
from .tables import NONE, aligned, markdown_table, model_name, percent, shortfall

Row = dict[str, float]  # column -> value in %


@dataclass(frozen=True)
class Paper:
    """The tables of a paper as printed, in %.

    samples: column -> samples per question; questions: column -> number of questions where it is not the official one
    averages: column -> the columns it is the mean of
    rows: (backbone, method) -> its row; ablations: (backbone, name of a suite, variant) -> its row
    """

    source: str
    grader: str
    temperature: float
    top_p: float
    samples: dict[str, int]
    questions: dict[str, int]
    titles: dict[str, str]
    averages: dict[str, list[str]]
    rows: dict[tuple[str, str], Row]
    ablations: dict[tuple[str, str, str], Row]


def read_paper(path: Path) -> Paper:
    """evals/paper.toml. Raises ValueError for a row with too few or too many values."""
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    columns = raw["table"]["columns"]

    def rows(name: str, block: dict[str, Any], columns: list[str]) -> Iterator[tuple[str, Row]]:
        for method, values in block["rows"].items():
            if len(values) != len(columns):
                raise ValueError(f"{path}: {name}, {method}: {len(values)} values, {len(columns)} columns")
            yield method, dict(zip(columns, map(float, values), strict=True))

    table = {
        "titles": dict(zip(columns, raw["table"]["titles"], strict=True)),
        "averages": raw["table"]["averages"],
        "rows": {(x["name"], m): row for x in raw["backbones"] for m, row in rows(x["name"], x, columns)},
        "ablations": {(x["backbone"], s, v): r for s, x in raw["tables"].items() for v, r in rows(s, x, x["columns"])},
    }
    return Paper(source=raw["source"], grader=raw["grader"], **raw["protocol"], **table)


def markdown(results: Results, paper: Paper) -> str:
    """A markdown table: our row with its intervals above the paper's rows.

    A * marks a departure from the paper's protocol (part of the rows, other samples or sampling), which a footnote
    explains. An average is given only if all its columns were run whole.
    """
    cells, footnotes = [], []
    for column, name in paper.titles.items():
        score, why = _score(results, paper, column)
        other = results["benchmarks"].get(column, {}).get("plain")
        cells.append((_value(score, why), _bounds(score), percent(other["value"]) if other else NONE))
        if why:
            footnotes.append(f"{name}: {why}.")
    names = (f"**{model_name(results)}**", "95 % interval", "by math-verify's plain recipe")
    rows = [[name, *row] for name, row in zip(names, zip(*cells, strict=True), strict=True)]
    for (model, method), row in paper.rows.items():
        rows.append([f"{model}, {method}", *(f"{value:.1f}" for value in row.values())])
    text = [
        *markdown_table(["model", *paper.titles.values()], rows),
        "",
        f"{NONE}: not run, or no average. \\*: not as in the paper.",
        "",
        *(f"- {note}" for note in footnotes),
        "",
        f"The rows below ours are the paper's ({paper.source}): avg@{max(paper.samples.values())} on AIME and AMC, "
        f"pass@1 else, temperature {paper.temperature}, top-p {paper.top_p}, graded with {paper.grader}. In %.",
    ]
    return "\n".join(text) + "\n"


def suite_table(paper: Paper, name: str, suite: Suite, backbone: str, runs: dict[str, dict[str, Results]]) -> str:
    """The variants of a suite, for each one the paper's row and ours, with intervals and notes.

    name: of the suite's file, as in evals/paper.toml; backbone: of the paper's rows; runs: variant -> seed -> results
    """
    rows = {v: paper.ablations.get((backbone, name, v)) or paper.rows.get((backbone, v), {}) for v in suite.variants}
    base, benchmarks = rows.get(suite.baseline or "", {}), Definitions().benchmarks
    sizes = {column: paper.questions.get(column) or benchmarks[column].rows or 0 for column in paper.samples}
    verdicts = {column: np.clip(base[column] / 100 * n - np.arange(n), 0, 1) for column, n in sizes.items() if base}
    strata = {column: [verdicts[each] for each in paper.averages.get(column, [column])] for column in base}
    estimates = {column: mean_over(of, np.random.default_rng(0)) for column, of in strata.items()}
    widths = {column: 50 * (estimate.high - estimate.low) for column, estimate in estimates.items()}

    def line(name: str, cells: Mapping[str, str]) -> tuple[str, ...]:
        return (name, *(cells.get(column, NONE) for column in paper.titles))

    lines = [
        line("", paper.titles),
        line("questions · samples", {c: f"{sizes[c]:,} · {n}" for c, n in paper.samples.items()}),
        line("± of one run", {c: f"{width:.1f}" for c, width in widths.items()}),
    ]
    footnotes: dict[str, None] = {}
    for variant, row in rows.items():
        near = {c for c in row.keys() & widths if variant != suite.baseline and abs(row[c] - base[c]) <= widths[c]}
        lines.append(line(f"{variant}, the paper", {c: f"{value:.1f}{' ~' * (c in near)}" for c, value in row.items()}))
        by_seed = []
        for seed, results in runs[variant].items():
            scores = {c: _score(results, paper, c) for c in paper.titles}
            by_seed.append({c: score for c, (score, _) in scores.items() if score})
            lines.append(line(f"  {seed}", {c: _value(*score) for c, score in scores.items()}))
            footnotes |= {f"{paper.titles[c]}: {why}.": None for c, (_, why) in scores.items() if why}
        if len(by_seed) > 1:
            shared = [c for c in paper.titles if all(c in of for of in by_seed)]
            by_seed = [{c: mean([of[c].value for of in by_seed]) for c in shared}]
            lines.append(line("  mean of the seeds", {c: _value(score, None) for c, score in by_seed[0].items()}))
        lines += [line("    95 %", {c: _bounds(score) for c, score in of.items()}) for of in by_seed]
    text = [
        *aligned(lines, left=1),
        f"\nIn %. The paper: {paper.source}, one run a row. {NONE}: none. *: not as in the paper.",
        f"±: half of the 95 % interval of one run with the accuracies of the paper's {suite.baseline}. The unit is "
        "the question, its variance p (1 − p): exact for one sample, the worst case for several, for which the paper "
        "gives no figures per question.",
        f"~: within ± of {suite.baseline}, so one run cannot show it. Two runs have a difference with that interval if "
        "their results on a question correlate by 0.5; training seeds add to it.",
        *footnotes,
    ]
    return "\n".join(text).replace("\\*", "*")


def _value(score: Mean | None, why: str | None) -> str:
    return NONE if score is None else percent(score.value) + ("\\*" if why else "")


def _bounds(score: Mean | None) -> str:
    return " to ".join(map(percent, score.bounds)) if score and score.bounds else NONE


def _score(results: Results, paper: Paper, column: str) -> tuple[Mean | None, str | None]:
    """(one run's score, the departure from the paper or why there is no score, or None)."""
    if column in paper.averages:
        return _average(results, paper, column)
    benchmark = results["benchmarks"].get(column)
    if benchmark is None:
        missing = results["not_run"].get(column)
        return None, f"not run ({missing['reason']})" if missing else "not asked for"
    of = benchmark["avg"]
    return Mean(of["value"], (of["low"], of["high"]), 1), "; ".join(_departures(benchmark, paper, column)) or None


def _departures(benchmark: dict[str, Any], paper: Paper, column: str) -> list[str]:
    found = []
    if part := shortfall(benchmark):
        found.append(part)
    elif benchmark["questions"] != paper.questions.get(column, benchmark["questions"]):
        found.append(f"{benchmark['questions']} questions, {paper.questions[column]} in the paper's file")
    if benchmark["samples"] != paper.samples[column]:
        found.append(f"avg@{benchmark['samples']}, avg@{paper.samples[column]} in the paper")
    sampling = (("temperature", "temperature", paper.temperature), ("top_p", "top-p", paper.top_p))
    found += [f"{words} {benchmark[name]}" for name, words, theirs in sampling if benchmark[name] != theirs]
    return found


def _average(results: Results, paper: Paper, column: str) -> tuple[Mean | None, str | None]:
    """As `_score`; without an interval if the results have no mean over just these columns."""
    of, run = paper.averages[column], results["benchmarks"]
    parts = {key: shortfall(run[key]) if key in run else "not run" for key in of}
    if lacking := [f"{paper.titles[key]}: {part}" for key, part in parts.items() if part]:
        return None, f"no average, because not all of it was run whole ({'; '.join(lacking)})"
    groups = [group for group in results["means"]["groups"].values() if set(group["benchmarks"]) == set(of)]
    bounds = (groups[0]["low"], groups[0]["high"]) if groups else None
    other = [paper.titles[key] for key in of if _departures(run[key], paper, key)]
    why = f"holds {', '.join(other)}, not sampled as in the paper" if other else None
    return Mean(sum(run[key]["avg"]["value"] for key in of) / len(of), bounds, 1), why
