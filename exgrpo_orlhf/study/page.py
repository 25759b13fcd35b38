"""A comparison as one HTML page: no script, no network, the evaluation report's style sheet."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from ..evaluation import charts
from . import figures
from .comparison import Comparison, settings
from .curve import AXES, Run
from .tables import Table, number, remarks, tables

CELL = 60  # characters of a setting's value; the rest is in its tooltip
STYLE = """
section h3 { margin-top: 30px; }
.three { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 14px; }
.three .chart { width: 100%; margin: 0; }
.thin { fill: none; stroke: var(--c); stroke-width: 0.8; opacity: 0.3; }
.series .dot { fill-opacity: 0.6; stroke-width: 1.4; }
.series .dot.part { fill-opacity: 1; }
.spread { fill: var(--c); opacity: 0.16; }
.mean { stroke: var(--c); stroke-width: 2.4; }
.zero { stroke: var(--ink); stroke-width: 1.2; }
.d1 .curve { stroke-dasharray: 6 3; } .d2 .curve { stroke-dasharray: 1.5 2.5; }
.legend i.d1 { background: repeating-linear-gradient(90deg, var(--c) 0 5px, transparent 5px 7px); }
.legend i.d2 { background: repeating-linear-gradient(90deg, var(--c) 0 2px, transparent 2px 4px); }
.legend { position: sticky; top: 0; z-index: 1; background: var(--paper); padding: 5px 0; }
.legend li { cursor: default; }
ul.notes { margin: 0 0 12px; padding-left: 20px; max-width: 110ch; }
ul.quiet { color: var(--quiet); font-size: 13.5px; }
@media (max-width: 900px) { .three { grid-template-columns: 1fr; } }
@media print { .legend { position: static; } }
"""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p class="said">{about}</p>
<nav>{links}</nav>
</header>
<main>
{sections}
</main>
</body>
</html>
"""


def page(title: str, about: str, comparisons: Sequence[Comparison], notes: Sequence[str]) -> str:
    """The whole page. about: a line on where the runs come from; notes: beyond those of the comparisons"""
    sections = [(f"metric-{i}", each.metric, _metric(each)) for i, each in enumerate(comparisons)]
    if notes:
        sections.insert(0, ("notes", "Notes", _list(notes)))
    sections.append(("settings", "Settings that differ", _settings(comparisons)))
    sections.append(("runs", "Runs", _runs(comparisons)))
    css = (Path(charts.__file__).parent / "report.css").read_text(encoding="utf-8") + STYLE
    most = max(len(each.variants) for each in comparisons)
    return PAGE.format(
        title=escape(title),
        about=escape(about),
        style=css + "".join(map(_highlight, range(most))),
        links="".join(f'<a href="#{key}">{escape(heading)}</a>' for key, heading, _ in sections),
        sections="\n".join(
            f'<section id="{key}"><h2>{escape(heading)}</h2>{inner}</section>' for key, heading, inner in sections
        ),
    )


def _highlight(series: int) -> str:
    """The pointer on a name of the legend leaves only that variant's lines."""
    chosen = "." + figures.style(series).replace(" ", ".")
    return f"section:has(.legend li{chosen}:hover) .series:not({chosen}) {{ opacity: 0.1; }}\n"


def _metric(comparison: Comparison) -> str:
    first, *rest = tables(comparison)
    drawn = [figures.curves(comparison, axis) for axis in AXES]
    parts = [
        _list(comparison.notes),
        _table(first),
        _list(remarks(comparison), "quiet"),
        figures.legend(comparison),
        "<h3>Learning curves</h3>",
        _said("Mean over seeds with its 95 % interval; thin lines are seeds. A name above shows its variant alone."),
        f'<div class="three">{"".join(filter(None, drawn))}</div>',
        _each(comparison),
        "<h3>By seed</h3>",
        _said("Hollow: collapsed. The bar is the mean, the field its 95 % interval."),
        f'<div class="wide">{figures.finals(comparison)}</div>',
    ]
    if chart := figures.differences(comparison):
        parts += ["<h3>Differences</h3>", f'<div class="wide">{chart}</div>', *map(_table, rest)]
    return "".join(parts)


def _each(comparison: Comparison) -> str:
    """Where one chart cannot show all: a panel for each variant, with the baseline."""
    if len(comparison.variants) <= figures.COLOURS:
        return ""
    axis = "tokens" if comparison.ranges["tokens"] else "steps"
    names = [variant.name for variant in comparison.variants if variant.name != comparison.baseline]
    first = [] if comparison.baseline is None else [comparison.baseline]
    beside = f", each beside {comparison.baseline}" if first else ""
    said = _said(f"More variants than colours: above are means alone; here all{beside}, against {figures.NAMES[axis]}.")
    panels = [figures.curves(comparison, axis, [*first, name]) for name in names]
    return f'{said}<div class="three">{"".join(filter(None, panels))}</div>'


def _table(table: Table) -> str:
    cells = lambda row, tag: "".join(
        f'<{tag} class="{"left" if i < table.left else "num" if tag == "td" else ""}">{escape(cell)}</{tag}>'
        for i, cell in enumerate(row)
    )
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in table.rows)
    head = f"<thead><tr>{cells(table.head, 'th')}</tr></thead>"
    return f'<div class="wide"><table><caption>{escape(table.title)}</caption>{head}<tbody>{body}</tbody></table></div>'


def _settings(comparisons: Sequence[Comparison]) -> str:
    variants = max((each.variants for each in comparisons), key=len)
    differing, _ = settings(variants)
    if not differing:
        return _said("None: the runs' params are the same in all variants.")
    head = ("setting", *(variant.name for variant in variants))
    rows = [(name, *values) for name, values in differing.items()]
    body = "".join(f"<tr>{''.join(map(_setting, row))}</tr>" for row in rows)
    names = "".join(f'<th class="left">{escape(name)}</th>' for name in head)
    return f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'


def _setting(value: str) -> str:
    return f'<td class="left" title="{escape(value)}"><code>{escape(charts.short(value, CELL)) or "–"}</code></td>'


def _runs(comparisons: Sequence[Comparison]) -> str:
    """Every run compared, with its last value of each metric."""
    runs: dict[str, Run] = {}
    last: dict[tuple[str, str], str] = {}
    for comparison in comparisons:
        for variant in comparison.variants:
            for curve in variant.curves:
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
        cells += [escape(last.get((run.id, each.metric), "–")) for each in comparisons]
        rows.append("<tr>" + "".join(f'<td class="left">{cell}</td>' for cell in cells) + "</tr>")
    names = "".join(f'<th class="left">{escape(name)}</th>' for name in head)
    return f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _list(words: Sequence[str], more: str = "") -> str:
    items = "".join(f"<li>{escape(each)}</li>" for each in words)
    return f'<ul class="notes {more}">{items}</ul>' if words else ""


def _said(words: str) -> str:
    return f'<p class="said">{escape(words)}</p>'
