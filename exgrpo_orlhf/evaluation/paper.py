"""The results beside the tables of the ExGRPO paper."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..show.tables import NONE, markdown_table, percent
from .results_folder import Results
from .results_table import model_name, shortfall

# A share, its interval, and the departure from the paper or why there is no score: each of them or None.
Score = tuple[float | None, tuple[float, float] | None, str | None]


@dataclass(frozen=True)
class Paper:
    """The tables of a paper as printed, in %.

    samples: column -> samples per question; questions: column -> number of questions where it is not the official one
    averages: column -> the columns it is the mean of
    rows: (name of a suite, None for the main table; backbone; method or variant) -> column -> value
    """

    source: str
    grader: str
    temperature: float
    top_p: float
    samples: dict[str, int]
    questions: dict[str, int]
    titles: dict[str, str]
    averages: dict[str, list[str]]
    rows: dict[tuple[str | None, str, str], dict[str, float]]


def read_paper(path: Path) -> Paper:
    """evals/paper.toml. Raises ValueError for a row with too few or too many values."""
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    every = raw["table"]["columns"]
    rows = {}
    for block in raw["backbones"]:
        columns = block.get("columns", every)
        for method, values in block["rows"].items():
            if len(values) != len(columns):
                raise ValueError(f"{path}: {block['name']}, {method}: {len(values)} values, {len(columns)} columns")
            rows[block.get("suite"), block["name"], method] = dict(zip(columns, map(float, values), strict=True))
    titles = dict(zip(every, raw["table"]["titles"], strict=True))
    table = {"titles": titles, "averages": raw["table"]["averages"], "rows": rows}
    return Paper(source=raw["source"], grader=raw["grader"], **raw["protocol"], **table)


def markdown(results: Results, paper: Paper) -> str:
    """A markdown table: our row with its intervals above the paper's rows.

    A * marks a departure from the paper's protocol (part of the rows, other samples or sampling), which a footnote
    explains. An average is given only if all its columns were run whole.
    """
    cells, footnotes = [], []
    for column, name in paper.titles.items():
        value, bounds, why = score(results, paper, column)
        other = results["benchmarks"].get(column, {}).get("plain")
        cells.append((value_text(value, why), bounds_text(bounds), percent(other["value"]) if other else NONE))
        if why:
            footnotes.append(f"{name}: {why}.")
    names = (f"**{model_name(results)}**", "95 % interval", "by math-verify's plain recipe")
    rows = [[name, *row] for name, row in zip(names, zip(*cells, strict=True), strict=True)]
    for (suite, model, method), row in paper.rows.items():
        rows += [] if suite else [[f"{model}, {method}", *(f"{value:.1f}" for value in row.values())]]
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


def value_text(value: float | None, why: str | None) -> str:
    return NONE if value is None else percent(value) + ("\\*" if why else "")


def bounds_text(bounds: tuple[float, float] | None) -> str:
    return " to ".join(map(percent, bounds)) if bounds else NONE


def score(results: Results, paper: Paper, column: str) -> Score:
    """An average has no interval if the results have no mean over just its columns."""
    run, columns = results["benchmarks"], paper.averages.get(column, [column])
    if column not in paper.averages:
        if column not in run:
            missing = results["not_run"].get(column)
            return None, None, f"not run ({missing['reason']})" if missing else "not asked for"
        average = run[column]["avg"]
        why = "; ".join(_departures(run[column], paper, column)) or None
        return average["value"], (average["low"], average["high"]), why
    parts = {key: shortfall(run[key]) if key in run else "not run" for key in columns}
    if lacking := [f"{paper.titles[key]}: {part}" for key, part in parts.items() if part]:
        return None, None, f"no average, because not all of it was run whole ({'; '.join(lacking)})"
    groups = [group for group in results["means"]["groups"].values() if set(group["benchmarks"]) == set(columns)]
    bounds = (groups[0]["low"], groups[0]["high"]) if groups else None
    other = [paper.titles[key] for key in columns if _departures(run[key], paper, key)]
    why = f"holds {', '.join(other)}, not sampled as in the paper" if other else None
    return sum(run[key]["avg"]["value"] for key in columns) / len(columns), bounds, why


def _departures(benchmark: dict[str, Any], paper: Paper, column: str) -> list[str]:
    departures = []
    if part := shortfall(benchmark):
        departures.append(part)
    elif benchmark["questions"] != (in_paper := paper.questions.get(column, benchmark["questions"])):
        departures.append(f"{benchmark['questions']} questions, {in_paper} in the paper's file")
    if benchmark["samples"] != paper.samples[column]:
        departures.append(f"avg@{benchmark['samples']}, avg@{paper.samples[column]} in the paper")
    sampling = (("temperature", "temperature", paper.temperature), ("top_p", "top-p", paper.top_p))
    departures += [f"{words} {benchmark[name]}" for name, words, value in sampling if benchmark[name] != value]
    return departures + [change for change in benchmark["departures"] if change.startswith("max_tokens")]
