"""The results beside the table of the ExGRPO paper."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .folder import Results
from .tables import NONE, markdown_table, model_name, percent, shortfall


@dataclass(frozen=True)
class Paper:
    """A table of a paper as printed, in %.

    samples: column -> samples per question; questions: column -> number of questions where it is not the official one
    averages: column -> the columns it is the mean of
    rows: (backbone, method) -> column -> value
    """

    source: str
    grader: str
    temperature: float
    top_p: float
    samples: dict[str, int]
    questions: dict[str, int]
    titles: dict[str, str]
    averages: dict[str, list[str]]
    rows: dict[tuple[str, str], dict[str, float]]


def read_paper(path: Path) -> Paper:
    """evals/paper.toml. Raises ValueError for a row with too few or too many values."""
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    columns = raw["table"]["columns"]
    rows = {}
    for backbone in raw["backbones"]:
        for method, values in backbone["rows"].items():
            if len(values) != len(columns):
                raise ValueError(f"{path}: {backbone['name']}, {method}: {len(values)} values, {len(columns)} columns")
            rows[backbone["name"], method] = dict(zip(columns, map(float, values), strict=True))
    titles = dict(zip(columns, raw["table"]["titles"], strict=True))
    table = {"titles": titles, "averages": raw["table"]["averages"], "rows": rows}
    return Paper(source=raw["source"], grader=raw["grader"], **raw["protocol"], **table)


def markdown(results: Results, paper: Paper) -> str:
    """A markdown table: our row with its intervals above the paper's rows.

    A * marks a departure from the paper's protocol (part of the rows, other samples or sampling), which a footnote
    explains. An average is given only if all its columns were run whole.
    """
    cells, footnotes = [], []
    for column, name in paper.titles.items():
        value, bounds, why = (_average if column in paper.averages else _column)(results, paper, column)
        other = results["benchmarks"].get(column, {}).get("plain")
        cells.append((value, bounds, percent(other["value"]) if other else NONE))
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


def _column(results: Results, paper: Paper, column: str) -> tuple[str, str, str | None]:
    """(value, interval, departure from the paper or None)."""
    benchmark = results["benchmarks"].get(column)
    if benchmark is None:
        missing = results["not_run"].get(column)
        return NONE, NONE, f"not run ({missing['reason']})" if missing else "not asked for"
    why = _departures(benchmark, paper, column)
    average = benchmark["avg"]
    bounds = f"{percent(average['low'])} to {percent(average['high'])}"
    return percent(average["value"]) + ("\\*" if why else ""), bounds, "; ".join(why) or None


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


def _average(results: Results, paper: Paper, column: str) -> tuple[str, str, str | None]:
    """(mean of the columns, interval, why there is none or a remark, or None)."""
    of, run = paper.averages[column], results["benchmarks"]
    parts = {key: shortfall(run[key]) if key in run else "not run" for key in of}
    if lacking := [f"{paper.titles[key]}: {part}" for key, part in parts.items() if part]:
        return NONE, NONE, f"no average, because not all of it was run whole ({'; '.join(lacking)})"
    mean = sum(run[key]["avg"]["value"] for key in of) / len(of)
    bounds = NONE
    for group in results["means"]["groups"].values():
        if set(group["benchmarks"]) == set(of):
            bounds = f"{percent(group['low'])} to {percent(group['high'])}"
    other = [paper.titles[key] for key in of if _departures(run[key], paper, key)]
    if other:
        return percent(mean) + "\\*", bounds, f"holds {', '.join(other)}, not sampled as in the paper"
    return percent(mean), bounds, None
