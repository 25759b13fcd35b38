"""A comparison as one HTML page without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..evaluation import html
from ..evaluation.plots import short
from . import comparison_charts as charts
from .comparison import Comparison, differing_settings
from .comparison_tables import Table, number, remarks, tables
from .curve import AXES, TrackedRun

CELL = 60  # characters of a setting's value; the rest is in its tooltip


def page(title: str, about: str, comparisons: Sequence[Comparison], notes: Sequence[str]) -> str:
    """The whole page. about: a line on the source of the runs; notes: those that hold for all comparisons"""
    sections = [(f"metric-{i}", each.metric, _metric(each)) for i, each in enumerate(comparisons)]
    if notes:
        sections.insert(0, ("notes", "Notes", html.notes(notes)))
    sections.append(("settings", "Settings that differ", _settings(comparisons)))
    sections.append(("runs", "Runs", _runs(comparisons)))
    most = max(len(each.variants) for each in comparisons)
    chosen = ["." + charts.style(i).replace(" ", ".") for i in range(most)]
    # While the pointer is on a name of the legend, the other variants are faint.
    hover = "".join(f"section:has(.legend li{c}:hover) .series:not({c}) {{ opacity: 0.1; }}\n" for c in chosen)
    return html.page(title, f"{html.paragraph(about)}<style>{hover}</style>", sections)


def _metric(comparison: Comparison) -> str:
    first, *rest = tables(comparison)
    names = [(charts.style(i), variant.name) for i, variant in enumerate(comparison.variants)]
    parts = [
        html.notes(comparison.notes),
        _table(first),
        html.notes(remarks(comparison), "quiet"),
        html.legend(names, "hover"),
        "<h3>Learning curves</h3>",
        html.paragraph("Means over seeds with 95 % intervals; thin lines are seeds. Point at a name to see it alone."),
        html.paragraph("A band that reaches the edge of a plot goes on beyond it.")
        if charts.ends(comparison)[2]
        else "",
        html.panels([html.figure(*pair) for axis in AXES if (pair := charts.curves(comparison, axis))], "three"),
        "<h3>By seed</h3>",
        html.paragraph("A hollow dot: the seed collapsed. The line is the mean, the field its 95 % interval."),
        html.wide(charts.finals(comparison)),
    ]
    if chart := charts.differences(comparison):
        parts += ["<h3>Differences</h3>", html.wide(chart), *map(_table, rest)]
    return "".join(parts)


def _table(table: Table) -> str:
    rows = [
        [f'<span class="name">{escape(cell)}</span>' if i < table.left else escape(cell) for i, cell in enumerate(row)]
        for row in table.rows
    ]
    return html.table(table.head, [rows], table.left, table.title, "wide")


def _settings(comparisons: Sequence[Comparison]) -> str:
    variants = max((each.variants for each in comparisons), key=len)
    differing, _ = differing_settings(variants)
    if not differing:
        return html.paragraph("None: all variants have the same parameters.")
    rows = [
        [f'<code title="{escape(value)}">{escape(short(value, CELL)) or "–"}</code>' for value in (name, *values)]
        for name, values in differing.items()
    ]
    return html.table(("setting", *(variant.name for variant in variants)), [rows], len(variants) + 1, box="scroll")


def _runs(comparisons: Sequence[Comparison]) -> str:
    """Every run compared, with its last value of each metric."""
    runs: dict[str, TrackedRun] = {}
    last: dict[tuple[str, str], str] = {}
    for comparison in comparisons:
        for curve in (curve for variant in comparison.variants for curve in variant.curves):
            runs[curve.run.id] = curve.run
            mark = ", collapsed" if curve.collapsed else ""
            last[curve.run.id, comparison.metric] = f"{number(curve.final)} at step {curve.steps[-1]:,.0f}{mark}"
    head = ["variant", "seed", "engine", "status", "run", *(each.metric for each in comparisons)]
    rows = []
    for run in sorted(runs.values(), key=lambda run: (run.variant, run.seed)):
        link = f"<code>{escape(run.id)}</code>"
        if run.url is not None:
            link = f'<a href="{escape(run.url)}" rel="noreferrer">{link}</a>'
        cells = [*map(escape, (run.variant, str(run.seed), run.engine, run.status)), f"{escape(run.name)} {link}"]
        rows.append([*cells, *(escape(last.get((run.id, each.metric), "–")) for each in comparisons)])
    return html.table(head, [rows], len(head), box="scroll")
