"""The report's sections of charts: which models and benchmarks go into which chart, with legends and captions."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from . import charts
from .charts import NAMES, Point
from .results_folder import VERDICTS, ResultsFolder
from .tables import of_questions, shortfall

Models = Sequence[ResultsFolder]


def benchmarks(models: Models) -> dict[str, str]:
    """key -> title of every benchmark that at least one model was run on, in order."""
    return {key: b["title"] for model in models for key, b in model.results["benchmarks"].items()}


def accuracy(models: Models, names: Sequence[str]) -> str:
    rows = []
    for key, title in benchmarks(models).items():
        points: list[Point | str] = []
        for i, (model, name) in enumerate(zip(models, names, strict=True)):
            benchmark = model.results["benchmarks"].get(key)
            points.append(_point(i, name, benchmark["avg"], benchmark) if benchmark else f"{name}: not run")
        rows.append((title, points))
    said = _said("avg@k with 95 % bootstrap intervals over questions. A hollow dot: part of the questions only.")
    hollow = '<li><i class="hollow"></i>part of the questions</li>'
    return said + _legend(names, hollow) + _wide(charts.intervals(rows, "avg@k, %"))


def _point(series: int, name: str, estimate: dict[str, Any], benchmark: dict[str, Any]) -> Point:
    part = None if shortfall(benchmark) is None else of_questions(benchmark)
    return Point(series, name, estimate["value"], estimate["low"], estimate["high"], part)


def pass_at_k(models: Models, names: Sequence[str]) -> str:
    panels: dict[str, list[tuple[int, dict[str, Any], dict[str, Any]]]] = {}
    for i, model in enumerate(models):
        for benchmark in model.results["benchmarks"].values():
            if len(benchmark["pass"]) > 1:
                panels.setdefault(benchmark["title"], []).append((i, benchmark["pass"], benchmark["maj"]))
    if not panels:
        return _said("Every benchmark was answered once: there is no k to go along.")
    highs = [by_k[k]["high"] for lines in panels.values() for _, by_k, _ in lines for k in by_k]
    drawn = [charts.curves(title, lines, charts.top_of(highs)) for title, lines in panels.items()]
    said = _said("Unbiased pass@k in % with 95 % intervals over questions, and maj@k from k = 4 on. k is logarithmic.")
    return said + _legend(names, '<li><i class="dash"></i>maj@k</li>') + _panels(drawn)


def response_lengths(models: Models, names: Sequence[str]) -> str:
    drawn = []
    for key, title in benchmarks(models).items():
        those = [(name, model) for model, name in zip(models, names, strict=True) if key in model.lines]
        longest = max((line.tokens for _, model in those for line in model.lines[key]), default=1)
        for name, model in those:
            heading = title if len(models) == 1 else f"{title}, {name}"
            limit = model.results["benchmarks"][key]["max_tokens"]
            drawn.append(charts.lengths(heading, model.lines[key], longest, limit))
    legend = (
        '<ul class="legend"><li><i class="correct"></i>correct, upwards</li>'
        '<li><i class="wrong"></i>not correct (all other verdicts), downwards</li>'
        '<li><i class="dash"></i>limit on response tokens</li></ul>'
    )
    said = "Number of samples by response length. Panels of one benchmark share the horizontal axis, not the vertical."
    return _said(said) + legend + _panels(drawn)


def verdict_shares(models: Models, names: Sequence[str]) -> str:
    rows = []
    for key, title in benchmarks(models).items():
        bars = [
            (n if len(names) > 1 else "", m.lines[key]) for m, n in zip(models, names, strict=True) if key in m.lines
        ]
        rows.append((title, bars))
    legend = "".join(f'<li><i class="{verdict}"></i>{NAMES[verdict]}</li>' for verdict in VERDICTS)
    legend += '<li><i class="hatched"></i>truncated</li>'
    said = _said("All samples. Timeout and error: the grader came to no verdict; avg@k counts these as not solved.")
    return said + f'<ul class="legend">{legend}</ul>' + _wide(charts.verdicts(rows))


def two_graders(models: Models, names: Sequence[str]) -> str:
    rows = []
    for key, title in benchmarks(models).items():
        for model, name in zip(models, names, strict=True):
            benchmark = model.results["benchmarks"].get(key)
            if benchmark and benchmark["plain"]:
                ours = _point(2, "ours", benchmark["avg"], benchmark)
                plain = _point(3, "plain math-verify", benchmark["plain"], benchmark)
                rows.append((title if len(models) == 1 else f"{title}, {name}", [ours, plain]))
    if not rows:
        return _said("No benchmark was graded by the plain math-verify recipe too.")
    said = _said("avg@k of the same samples by this project's grader and by the plain math-verify recipe.")
    return said + _legend(["ours", "plain math-verify"], first=2) + _wide(charts.intervals(rows, "avg@k, %"))


def _legend(names: Sequence[str], more: str = "", first: int = 0) -> str:
    items = "".join(f'<li><i class="m{i}"></i>{escape(name)}</li>' for i, name in enumerate(names, first))
    return f'<ul class="legend">{items}{more}</ul>'


def _said(words: str) -> str:
    return f'<p class="said">{escape(words)}</p>'


def _panels(drawn: Sequence[str]) -> str:
    return f'<div class="panels">{"".join(drawn)}</div>'


def _wide(drawn: str) -> str:
    return f'<div class="wide">{drawn}</div>'
