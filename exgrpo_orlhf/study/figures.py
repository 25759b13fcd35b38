"""The comparison's charts: SVG text in the style of the evaluation's report, and one PNG.

Variants are coloured in order, 8 colours, then the same again dashed and dotted.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from html import escape

from ..evaluation.charts import WIDTH, element, short, svg, text, tooltip
from .comparison import MEASURES, Comparison, Variant
from .curve import AXES, Band, band
from .tables import UNITS, interval, number, plus_minus

COLOURS = 8
PANEL = (370, 300)  # width and height
NAMES = {"steps": "steps", "tokens": "generated tokens", "seconds": "training time"}
Place = Callable[[float, float], tuple[float, float]]  # of a point in the chart


def style(series: int) -> str:
    """The classes of a variant's colour and dashes."""
    return f"m{series % COLOURS} d{series // COLOURS % 3}"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers, evenly spaced, the first not above `low`, the last not below `high`."""
    rough = (high - low) / about or abs(high) / about or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * f for f in (1, 2, 2.5, 5, 10) if power * f >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def values_axis(comparison: Comparison) -> list[float]:
    """Ticks that hold all curves; from zero on where nothing is below."""
    values = [v for variant in comparison.variants for curve in variant.curves for v in curve.values]
    return ticks(min(0.0, *values), max(values))


def curves(comparison: Comparison, axis: str, only: Sequence[str] | None = None) -> str | None:
    """Every variant's mean with its interval, its seeds as thin lines; None where no variant can be drawn so.

    More variants than colours are means alone. only: the variants to draw, the last of them in the title
    """
    unit, size = UNITS[axis]
    bands = [(i, v, band(v.curves, axis)) for i, v in enumerate(comparison.variants) if only is None or v.name in only]
    drawn = [(i, variant, found) for i, variant, found in bands if found is not None]
    if not drawn:
        return None
    title = f"{comparison.metric} against {NAMES[axis]}" if only is None else only[-1]
    (width, height), left, right, head, foot = PANEL, 46, 14, 28, 42
    ends = [float(each.along(axis)[-1]) / size for _, variant, _ in drawn for each in variant.curves]
    across, up = ticks(0, max(ends)), values_axis(comparison)

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (width - left - right) * x / size / across[-1],
            height - foot - (height - head - foot) * (y - up[0]) / (up[-1] - up[0]),
        )

    parts = [text(0, 15, short(title, 50), "title")]
    parts.append(text((left + width) / 2, height - 6, unit, "axis", "middle"))
    for y in up:
        parts.append(element("line", "grid", x1=left, x2=width - right, y1=at(0, y)[1], y2=at(0, y)[1]))
        parts.append(text(left - 6, round(at(0, y)[1] + 4, 1), f"{y:.4g}", "tick", "end"))
    for x in across:
        parts.append(text(round(at(x * size, 0)[0], 1), height - foot + 16, f"{x:,.4g}", "tick", "middle"))
    for series, variant, found in drawn:
        inner = _variant(variant, axis, found, at, seeds=len(drawn) <= COLOURS)
        parts.append(f'<g class="series {style(series)}">{inner}</g>')
    return svg(width, height, title, parts, "learning")


def _variant(variant: Variant, axis: str, found: Band, at: Place, seeds: bool) -> str:
    lines = []
    if len(variant.curves) > 1 and seeds:
        edge = [*zip(found.x, found.high, strict=True), *reversed(list(zip(found.x, found.low, strict=True)))]
        lines.append(f'<polygon class="band" points="{_path([at(x, y) for x, y in edge])}"/>')
        for curve in variant.curves:
            points = _path([at(x, y) for x, y in zip(curve.along(axis), curve.values, strict=True)])
            words = f"{variant.name}, seed {curve.run.seed}: {number(curve.final)} at the end"
            lines.append(f'<polyline class="thin" points="{points}">{tooltip(words)}</polyline>')
    points = [at(x, y) for x, y in zip(found.x, found.mean, strict=True)]
    lines.append(f'<polyline class="curve" points="{_path(points)}">{tooltip(variant.name)}</polyline>')
    for (x, y), value in zip(points, found.mean, strict=True):
        if len(points) <= 60:
            lines.append(element("circle", "knot", tooltip(f"{variant.name}: {number(value)}"), cx=x, cy=y, r=1.8))
    return "".join(lines)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def finals(comparison: Comparison) -> str:
    """Each seed's last value, a row a variant; collapsed ones hollow; the mean with its interval beside the row."""
    left, right, line, head, foot = 220, 930, 30, 8, 44
    height = head + line * len(comparison.variants) + foot
    up = values_axis(comparison)
    scale = (right - left) / (up[-1] - up[0])
    parts = _scale(up, left, scale, head, height - foot)
    parts.append(text((left + right) / 2, height - 6, f"{comparison.metric} at the end", "axis", "middle"))
    for series, variant in enumerate(comparison.variants):
        y, found = head + line * (series + 0.5), variant.mean("final")
        parts.append(text(0, y + 4, short(variant.name, 30), "label"))
        group = []
        if found and found.low is not None and found.high is not None:
            low, high = (left + scale * (max(min(x, up[-1]), up[0]) - up[0]) for x in (found.low, found.high))
            group.append(element("rect", "spread", x=low, y=y - 9, width=high - low, height=18))
        if found:
            x = left + scale * (found.value - up[0])
            group.append(element("line", "mean", x1=x, x2=x, y1=y - 9, y2=y + 9))
        for curve in variant.curves:
            words = f"{variant.name}, seed {curve.run.seed}: {number(curve.final)}"
            shape, words = ("dot part", f"{words}, collapsed") if curve.collapsed else ("dot", words)
            group.append(element("circle", shape, tooltip(words), cx=left + scale * (curve.final - up[0]), cy=y, r=4))
        parts.append(f'<g class="series {style(series)}">{"".join(group)}</g>')
        parts.append(text(right + 16, y + 4, plus_minus(found), "value"))
    return svg(WIDTH, height, f"{comparison.metric} at the end, by seed", parts, "finals")


def differences(comparison: Comparison) -> str | None:
    """A panel a measure, a row a variant: the difference from the baseline with its interval; None without any."""
    found = comparison.differences
    measures = [(key, heading) for key, heading in MEASURES if any(each.measure == key for each in found)]
    names = [variant.name for variant in comparison.variants if any(each.variant == variant.name for each in found)]
    if not found:
        return None
    left, gap, line, head, foot = 200, 40, 26, 28, 42
    wide = (WIDTH - left) / len(MEASURES) - gap
    height = head + line * len(names) + foot
    ends = [x for each in found for x in (each.mean.value, each.mean.low, each.mean.high) if x is not None]
    across = ticks(min(0.0, *ends), max(0.0, *ends), 2)
    scale = wide / (across[-1] - across[0])
    order = {variant.name: i for i, variant in enumerate(comparison.variants)}
    parts = [text(0, head + line * (i + 0.5) + 4, short(name, 27), "label") for i, name in enumerate(names)]
    for column, (key, heading) in enumerate(measures):
        begin = left + column * (wide + gap)
        parts.append(text(begin + wide / 2, 15, heading, "title", "middle"))
        parts += _scale(across, begin, scale, head, height - foot)
        zero = begin - scale * across[0]
        parts.append(element("line", "zero", x1=zero, x2=zero, y1=head, y2=height - foot))
        for each in found:
            if each.measure == key:
                y = head + line * (names.index(each.variant) + 0.5)
                words = f"{each.variant}, {heading}: {number(each.mean.value, sign='+')} {interval(each.mean)}"
                group = tooltip(words)
                if each.mean.low is not None and each.mean.high is not None:
                    low, high = (zero + scale * x for x in (each.mean.low, each.mean.high))
                    group += element("line", "whisker", x1=low, x2=high, y1=y, y2=y)
                group += element("circle", "dot", cx=zero + scale * each.mean.value, cy=y, r=4)
                parts.append(f'<g class="series point {style(order[each.variant])}">{group}</g>')
    words = f"difference of {comparison.metric} from {comparison.baseline}, 95 % intervals over seeds"
    parts.append(text((left + WIDTH) / 2, height - 6, words, "axis", "middle"))
    return svg(WIDTH, height, words, parts, "differences")


def _scale(marks: Sequence[float], left: float, scale: float, head: float, floor: float) -> list[str]:
    parts = []
    for mark in marks:
        x = left + scale * (mark - marks[0])
        parts.append(element("line", "grid", x1=x, x2=x, y1=head, y2=floor))
        parts.append(text(round(x, 1), floor + 16, f"{mark:.4g}", "tick", "middle"))
    return parts


def legend(comparison: Comparison) -> str:
    items = "".join(
        f'<li class="{style(i)}"><i class="{style(i)}"></i>{escape(variant.name)}</li>'
        for i, variant in enumerate(comparison.variants)
    )
    return f'<ul class="legend">{items}</ul>'


def picture(comparisons: Sequence[Comparison]) -> bytes:
    """A PNG: a row a metric, with its curves against the three axes and the last values by seed."""
    import matplotlib

    matplotlib.use("Agg")  # a file, never a window
    import matplotlib.pyplot as plt

    most = max(len(comparison.variants) for comparison in comparisons)
    size = (18, max(4.2, 0.24 * most) * len(comparisons) + 0.3 * math.ceil(most / 6))  # a line a variant at the right
    figure, grid = plt.subplots(len(comparisons), 4, figsize=size, layout="constrained", squeeze=False)
    colours = plt.get_cmap("tab10").colors[:COLOURS]
    for row, comparison in zip(grid, comparisons, strict=True):
        for series, variant in enumerate(comparison.variants):
            look = {"color": colours[series % COLOURS], "linestyle": ("-", "--", ":")[series // COLOURS % 3]}
            for panel, axis in zip(row, AXES, strict=False):
                found = band(variant.curves, axis)
                if found is None:
                    continue
                unit = UNITS[axis][1]
                if len(comparison.variants) <= COLOURS:
                    for curve in variant.curves if len(variant.curves) > 1 else ():
                        panel.plot(curve.along(axis) / unit, curve.values, linewidth=0.6, alpha=0.35, **look)
                    panel.fill_between(found.x / unit, found.low, found.high, alpha=0.15, color=look["color"], lw=0)
                panel.plot(found.x / unit, found.mean, linewidth=1.8, label=variant.name, **look)
            ends = variant.values["final"]
            row[3].plot(ends, [series] * len(ends), "o", color=look["color"], alpha=0.6, markersize=5)
            row[3].plot(sum(ends) / len(ends), series, "|", color=look["color"], markersize=20, markeredgewidth=2)
        for panel, axis in zip(row, AXES, strict=False):
            panel.set(title=f"against {NAMES[axis]}", xlabel=UNITS[axis][0])
            panel.set_ylim(values_axis(comparison)[0], values_axis(comparison)[-1])
        row[0].set_ylabel(comparison.metric)
        row[3].set(title="at the end, by seed", yticks=range(len(comparison.variants)))
        row[3].locator_params(axis="x", nbins=5)
        row[3].set_yticklabels([short(variant.name, 30) for variant in comparison.variants])
        row[3].invert_yaxis()
        for panel in row:
            panel.grid(alpha=0.3)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, most))
    out = io.BytesIO()
    figure.savefig(out, dpi=110, format="png")
    plt.close(figure)
    return out.getvalue()
