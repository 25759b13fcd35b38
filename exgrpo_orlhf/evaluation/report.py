"""The report: one HTML page for one or several results folders, with charts, tables and a browser of samples.

Everything that a model wrote goes into the page as escaped data and from there into its elements as text.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..io.files import write
from ..show.charts import BINS, LINE, PALETTE, SERIES, WIDTH, Chart, curve, drawing, panel, svg, wrapped
from ..show.charts import interval as draw_interval
from ..show.page import page
from ..tracking.samples import UNGRADED, Line
from .results_folder import Results, ResultsFolder
from .results_table import HEAD, benchmark_row, interval, means, missing, notes, of_questions, shortfall

PANEL = (270, 184)  # width and height of a small chart
Models = Sequence[tuple[str, ResultsFolder]]  # (name, folder)


def write_report(folders: Sequence[Path], out: Path, samples_per_benchmark: int = 200) -> None:
    """Write the page. The file appears whole or not at all.

    Args:
        folders: results folders, at most one for each colour.
        out: the HTML file.
        samples_per_benchmark: most samples of a model and benchmark in the browser; `choose` selects them.

    Raises:
        ValueError: no folder or too many, one without results.json, or samples that results.json does not count.
    """
    if not 1 <= len(folders) <= SERIES:
        raise ValueError(f"a report is of 1 to {SERIES} results folders, not {len(folders)}")
    results = [ResultsFolder.read(Path(folder)) for folder in folders]
    names = [folder.results["name"] for folder in results]
    if len(set(names)) < len(names):
        names = [str(folder.path) for folder in results]
    models = list(zip(names, results, strict=True))
    text = page(
        "evaluation.html",
        script="browser.js",
        data=[_samples(name, model, samples_per_benchmark) for name, model in models],
        title="Evaluation: " + ", ".join(names),
        models=[(name, model.results) for name, model in models],
        marks=[(f"m{i}", name) for i, name in enumerate(names)],
        missing=missing,
        head=HEAD,
        benchmarks=[
            [(i, name, benchmark_row(model.results["benchmarks"][key])) for i, name, model in of_benchmark]
            for key, of_benchmark in _benchmarks(models)
        ],
        means=means,
        remarks={
            "Not run, and in no mean": _remarks(
                models, lambda r: [(e["title"], e["reason"]) for e in r["not_run"].values()]
            ),
            "Notes": _remarks(models, notes),
        },
        accuracies=_accuracies(models),
        pass_curves=_pass_curves(models),
        lengths=_lengths(models),
        graded_twice=_graded_twice(models),
        interval=interval,
        flat=_flat,
    )
    write(out, text)


def choose(lines: Sequence[Line], count: int) -> list[Line]:
    """At most `count` samples for a reader to look at, in their order, always the same ones.

    First come those on which the graders disagree and those that could not be graded. The room left is divided evenly
    among the verdicts, with truncated responses apart. Each part is spread evenly over the set, which may be sorted by
    subject.
    """
    if len(lines) <= count:
        return list(lines)
    pools = defaultdict(list)
    for line in lines:
        first = line.disagree or line.verdict in UNGRADED
        pools[None if first else (line.verdict, line.truncated)].append(line)
    chosen = _spread(pools.pop(None, []), count)
    for i, pool in enumerate(sorted(pools.values(), key=len)):  # room left by a small one goes on
        chosen += _spread(pool, (count - len(chosen)) // (len(pools) - i))
    return sorted(chosen)


def _spread(lines: Sequence[Line], count: int) -> list[Line]:
    count = min(count, len(lines))
    return [lines[i * len(lines) // count] for i in range(count)]


def _samples(name: str, model: ResultsFolder, most: int) -> dict[str, Any]:
    """A model's samples in the browser."""
    benchmarks = {}
    for key, lines in model.lines.items():
        # A seed goes as text: beyond 2^53 JavaScript rounds numbers.
        samples = [{**sample, "seed": str(sample["seed"])} for sample in model.samples(key, choose(lines, most))]
        benchmarks[key] = {"title": _title(model, key), "total": len(lines), "samples": samples}
    return {"name": name, "benchmarks": benchmarks}


def _title(model: ResultsFolder, benchmark: str) -> str:
    return str(model.results["benchmarks"][benchmark]["title"])


def _benchmarks(models: Models) -> Iterator[tuple[str, list[tuple[int, str, ResultsFolder]]]]:
    """(key, the models that were run on it, numbered) of every benchmark, in order."""
    for key in dict.fromkeys(key for _, model in models for key in model.results["benchmarks"]):
        yield key, [(i, name, model) for i, (name, model) in enumerate(models) if key in model.lines]


def _heading(models: Models, title: str, name: str) -> str:
    return title if len(models) == 1 else f"{title}, {name}"


def _remarks(models: Models, remarks_of: Callable[[Results], Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Pairs (about, text), each once, with the models it holds for unless it holds for all."""
    remarks: dict[tuple[str, str], list[str]] = {}
    for name, model in models:
        for pair in remarks_of(model.results):
            remarks.setdefault(pair, []).append(name)
    return [
        (about + ("" if len(names) == len(models) else f" ({', '.join(names)})"), text)
        for (about, text), names in remarks.items()
    ]


def _accuracies(models: Models) -> Chart:
    """Scores with their intervals, one a line, under their benchmark; hollow for a part of the questions."""
    line, gap, size, label = 19, 13, 11, "avg@k, %"
    titles = {key: wrapped(_title(of_benchmark[0][2], key)) for key, of_benchmark in _benchmarks(models)}
    names = list(titles.values())
    heights = np.array([max(line * len(models), size * LINE * (name.count("\n") + 1)) + gap for name in names])
    below = np.cumsum(heights)
    middles = below - heights / 2
    with drawing(WIDTH, below[-1] + 52) as figure:
        axes = figure.subplots()
        axes.set(ylim=(below[-1], 0), xlabel=label)
        axes.grid(visible=False, axis="y")
        axes.set_yticks(middles, names, color=PALETTE["ink"], fontsize=size)
        for key, middle, edge in zip(titles, middles, below, strict=True):
            axes.axhline(edge, color=PALETTE["line"], linestyle=":", linewidth=1)
            for i, (_, model) in enumerate(models):
                y = middle + line * (i + 0.5 - len(models) / 2)
                colour, words, paint = f"m{i}", "not run", f"m{i}"
                if entry := model.results["benchmarks"].get(key):
                    value, low, high = (100 * entry["avg"][bound] for bound in ("value", "low", "high"))
                    part = shortfall(entry) is not None
                    draw_interval(axes, y, value, (low, high), colour, hollow=part)
                    words, paint = interval(entry["avg"]) + (f", {of_questions(entry)}" if part else ""), "ink"
                place: Any = axes.get_yaxis_transform()
                axes.text(1.02, y, words, transform=place, color=PALETTE[paint], va="center", fontsize=size)
        axes.set_xlim(left=0)
        return svg(figure, label, "intervals")


def _pass_curves(models: Models) -> list[tuple[Chart, list[tuple[int, Results, Results]]]]:
    """(chart, what it shows: number of the model, its pass@k, its maj@k) of every benchmark with several samples."""
    curves = []
    for key, of_benchmark in _benchmarks(models):
        entries = [(i, model.results["benchmarks"][key]) for i, _, model in of_benchmark]
        if lines := [(i, entry["pass"], entry["maj"]) for i, entry in entries if len(entry["pass"]) > 1]:
            curves.append((entries[0][1]["title"], lines))
    top = max((by_k[k]["high"] for _, lines in curves for _, by_k, _ in lines for k in by_k), default=1.0)
    return [(_pass_curve(title, lines, top), lines) for title, lines in curves]


def _pass_curve(title: str, models: Sequence[tuple[int, Results, Results]], top: float) -> Chart:
    """pass@k against k on a logarithmic axis, with intervals; maj@k dashed. top: end of the axis, a share"""
    with panel(*PANEL, xlabel="k (samples)", xscale="log", ylim=(0, 100 * top)) as (figure, axes):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(visible=False, axis="x")
        for number, by_k, by_k_of_votes in models:
            ks, colour = sorted(map(int, by_k)), f"m{number}"
            value, low, high = ([100 * by_k[str(k)][bound] for k in ks] for bound in ("value", "low", "high"))
            curve(axes, ks, value, colour, (low, high), marker="o", markersize=4)
            voted = sorted(map(int, by_k_of_votes))
            shares = [100 * by_k_of_votes[str(k)]["value"] for k in voted]
            curve(axes, voted, shares, colour, kind="maj", linestyle="--", linewidth=1.4)
        return svg(figure, title, "curves")


def _lengths(models: Models) -> list[Chart]:
    """Of each model and benchmark, samples by response length in tokens, the correct ones up, all others down; the
    limit is marked if it is on the axis."""
    charts = []
    for key, of_benchmark in _benchmarks(models):
        longest = max((line.tokens for _, _, model in of_benchmark for line in model.lines[key]), default=1)
        edges = np.linspace(0, max(longest, 1), BINS + 1)
        for _, name, model in of_benchmark:
            up, down = (
                np.histogram([line.tokens for line in model.lines[key] if (line.verdict == "correct") == right], edges)[
                    0
                ]
                for right in (True, False)
            )
            with panel(*PANEL, xlabel="response tokens", xlim=(0, edges[-1])) as (figure, axes):
                for counts, colour in ((up, "correct"), (-down, "wrong")):
                    bars: Any = {"align": "edge", "color": PALETTE[colour], "gid": f"bar-{colour}"}
                    axes.bar(edges[:-1], counts, 0.9 * edges[1], **bars)
                axes.grid(visible=False, axis="x")
                most = max(up.max(), down.max(), 1)
                axes.set_yticks((-most, 0, most), (f"{most:,}", "0", f"{most:,}"))
                axes.locator_params(axis="x", nbins=5)
                if (limit := model.results["benchmarks"][key]["max_tokens"]) <= edges[-1]:
                    axes.axvline(limit, color=PALETTE["quiet"], linestyle="--", gid="limit")
                charts.append(svg(figure, _heading(models, _title(model, key), name), "lengths"))
    return charts


def _graded_twice(models: Models) -> list[tuple[int, str, str, int, int, int]]:
    """How often one grader says correct and the other does not. The browser shows these samples.

    (model, benchmark, heading, samples graded twice, correct by ours alone, correct by the plain one alone)
    """
    rows = []
    for i, (name, model) in enumerate(models):
        for key, lines in model.lines.items():
            if graded_twice := [line for line in lines if line.plain is not None]:
                differ = [line.verdict == "correct" for line in graded_twice if line.disagree]
                heading = _heading(models, _title(model, key), name)
                rows.append((i, key, heading, len(graded_twice), sum(differ), len(differ) - sum(differ)))
    return rows


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """('model.path', '…') of every field that has a value."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield prefix + key, value if isinstance(value, str) else json.dumps(value)
