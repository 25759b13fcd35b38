"""The charts of a comparison: learning curves, last values by seed, differences from the baseline.

Variants are coloured in order: 8 colours, then the same again dashed, then dotted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..evaluation.plots import LINE, PALETTE, SERIES, WIDTH, Drawing, drawing, wrapped
from .comparison import MEASURES, Comparison
from .comparison_tables import UNITS, difference, number, plus_minus
from .curve import AXES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL = (370, 282)  # width and height
MARGIN = 0.04  # of an axis, on either side of what is drawn: whole dots and lines at its ends
NAMES = {"steps": "steps", "tokens": "generated tokens", "seconds": "training time"}


def style(series: int) -> str:
    """The CSS classes of a variant's colour and dashes."""
    return f"m{series % SERIES} d{series // SERIES % 3}"


def _look(series: int) -> dict[str, Any]:
    return {"color": PALETTE[f"m{series % SERIES}"], "linestyle": ("-", "--", ":")[series // SERIES % 3]}


def _limits(values: Iterable[float]) -> tuple[float, float]:
    """An axis that holds the values and zero, with a margin on either side."""
    numbers = [0.0, *values]
    low, high = min(numbers), max(numbers)
    margin = MARGIN * ((high - low) or 1.0)
    return low - margin, high + margin


def ends(comparison: Comparison) -> tuple[float, float, bool]:
    """(low, high) of the learning curves and their bands as drawn, and whether a band goes on beyond the plot.

    With two seeds an interval can be many times as wide as the range of the curves. The ends are at most as far beyond
    the curves as the curves' own range; the plot clips what is beyond them.
    """
    values = [float(v) for variant in comparison.variants for curve in variant.curves for v in curve.values]
    low, high = min(0.0, *values), max(values)
    bands = [band for of_axis in comparison.bands.values() for band in of_axis if band]
    least = min(low, *(float(band[2].min()) for band in bands))
    most = max(high, *(float(band[3].max()) for band in bands))
    reach = (high - low) or 1.0
    drawn = max(least, low - reach), min(most, high + reach)
    return *drawn, drawn != (least, most)


def curves(comparison: Comparison, axis: str) -> tuple[str, str] | None:
    """(title, chart): learning curves of the variants; None where none can be drawn against this axis."""
    with drawing(*PANEL) as chart:
        title = f"{comparison.metric} against {NAMES[axis]}"
        drawn = _curves(chart, chart.axes(46, 14, 10, 42), comparison, axis, dots=True)
        return (title, chart.svg(title, "learning")) if drawn else None


def _curves(chart: Drawing, axes: Axes, comparison: Comparison, axis: str, dots: bool = False) -> bool:
    """Draw each variant's mean with its interval, and its seeds as thin lines; more variants than colours as means.
    dots: dots to point at. Returns whether there are curves to draw."""
    unit, size = UNITS[axis]
    axes.set(xlabel=unit, ylim=_limits(ends(comparison)[:2]))
    pairs = enumerate(zip(comparison.variants, comparison.bands[axis], strict=True))
    drawn = [(i, variant, band) for i, (variant, band) in pairs if band]
    for i, variant, (x, mean, low, high) in drawn:
        look, classes = _look(i), f"series {style(i)}"
        if len(variant.curves) > 1 and len(drawn) <= SERIES:
            area = axes.fill_between(x / size, low, high, alpha=0.15, color=look["color"], linewidth=0)
            chart.mark(area, f"band {classes}")
            for curve in variant.curves:
                (line,) = axes.plot(curve.along(axis) / size, curve.values, linewidth=0.8, alpha=0.35, **look)
                words = f"{variant.name}, seed {curve.run.seed}: {number(curve.final)} at the end"
                chart.mark(line, f"thin {classes}", words)
        (line,) = axes.plot(x / size, mean, linewidth=1.8, label=variant.name, **look)
        chart.mark(line, f"curve {classes}", variant.name)
    axes.set_xlim(left=-MARGIN / 2 * axes.get_xlim()[1])
    for i, variant, (x, mean, _, _) in drawn:
        for at, value in zip(x / size, mean, strict=True) if dots and len(x) <= 60 else ():
            (dot,) = axes.plot(at, value, "o", markersize=3.6, color=_look(i)["color"])
            chart.mark(dot, f"knot series {style(i)}", f"{variant.name}: {number(value)}")
    return bool(drawn)


def finals(comparison: Comparison) -> str:
    """Each seed's last value, a row for each variant; collapsed ones hollow; beside the row mean and interval."""
    names = [wrapped(variant.name, 250, 10) for variant in comparison.variants]
    with drawing(WIDTH, _row(names, 30) * len(names) + 52) as chart:
        axes = chart.axes(270, 190, 8, 44, xlabel=f"{comparison.metric} at the end")
        _finals(chart, axes, comparison, names)
        for i, variant in enumerate(comparison.variants):
            place = axes.get_yaxis_transform()
            axes.text(1.02, i, plus_minus(variant.mean("final")), va="center", fontsize=11, transform=place)
        return chart.svg(f"{comparison.metric} at the end, by seed", "finals")


def _row(names: Sequence[str], least: float) -> float:
    """The height of each row of a chart, so that the name with the most lines has room."""
    return max(least, 10 * LINE * max(name.count("\n") + 1 for name in names) + 6)


def _finals(chart: Drawing, axes: Axes, comparison: Comparison, names: Sequence[str]) -> None:
    variants = comparison.variants
    means = [variant.mean("final") for variant in variants]
    bounds = [bound for mean in means if mean for bound in mean.bounds or ()]
    axes.set(xlim=_limits([*bounds, *(value for variant in variants for value in variant.values["final"])]))
    axes.set_ylim(len(variants) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(variants)), names, color=PALETTE["ink"], fontsize=10)
    for i, (variant, mean) in enumerate(zip(variants, means, strict=True)):
        colour, classes = _look(i)["color"], f"series {style(i)}"
        if mean and mean.bounds:
            low, high = mean.bounds
            chart.mark(axes.barh(i, high - low, 0.6, low, color=colour, alpha=0.16)[0], f"spread {classes}")
        if mean:
            (line,) = axes.plot((mean.value, mean.value), (i - 0.3, i + 0.3), color=colour, linewidth=2.4)
            chart.mark(line, f"mean {classes}")
        for curve in variant.curves:
            face = PALETTE["paper"] if curve.collapsed else colour
            (dot,) = axes.plot(curve.final, i, "o", color=colour, markerfacecolor=face, alpha=0.7)
            part, end = (" part", ", collapsed") if curve.collapsed else ("", "")
            chart.mark(
                dot, f"dot{part} {classes}", f"{variant.name}, seed {curve.run.seed}: {number(curve.final)}{end}"
            )


def differences(comparison: Comparison) -> str | None:
    """A panel for each measure, a row for each variant: the difference from the baseline; None without any."""
    series = {variant.name: i for i, variant in enumerate(comparison.variants)}
    compared = {each.variant for each in comparison.differences}
    if not compared:
        return None
    names = [name for name in series if name in compared]
    labels = [wrapped(name, 190, 10) for name in names]
    height = _row(labels, 26) * len(names) + 70
    with drawing(WIDTH, height) as chart:
        panels = chart.figure.subplots(1, len(MEASURES), sharex=True, sharey=True)
        chart.figure.subplots_adjust(210 / WIDTH, 42 / height, 1 - 14 / WIDTH, 1 - 28 / height, wspace=0.12)
        for axes, (key, heading) in zip(panels, MEASURES, strict=True):
            axes.set(title=heading, ylim=(len(names) - 0.5, -0.5))
            axes.axvline(0, color=PALETTE["ink"], linewidth=1.2)
            axes.grid(visible=False, axis="y")
            axes.locator_params(axis="x", nbins=4)
            for each in (each for each in comparison.differences if each.measure == key):
                i, y = series[each.variant], names.index(each.variant)
                colour, classes = _look(i)["color"], f"series {style(i)}"
                words = f"{each.variant}, {heading}: {' '.join(difference(each.mean))}"
                if each.mean.bounds:
                    (line,) = axes.plot(each.mean.bounds, (y, y), color=colour, linewidth=2.4, alpha=0.55)
                    chart.mark(line, f"whisker {classes}", words)
                chart.mark(axes.plot(each.mean.value, y, "o", color=colour)[0], f"dot {classes}", words)
        panels[0].set_yticks(range(len(names)), labels, color=PALETTE["ink"], fontsize=10)
        label = f"difference of {comparison.metric} from {comparison.baseline}, 95 % intervals over seeds"
        chart.figure.supxlabel(label, fontsize=9.5, color=PALETTE["quiet"])
        return chart.svg(label, "differences")


def picture(comparisons: Sequence[Comparison]) -> bytes:
    """A PNG: a row for each metric, with its curves against the three axes and the last values by seed."""
    most = max(len(comparison.variants) for comparison in comparisons)
    height = 72 * (max(4.2, 0.24 * most) * len(comparisons) + 0.3 * math.ceil(most / 6))
    with drawing(1296, height, layout="constrained") as chart:
        grid = chart.figure.subplots(len(comparisons), 4, squeeze=False)
        for row, comparison in zip(grid, comparisons, strict=True):
            for axes, axis in zip(row, AXES, strict=False):
                _curves(chart, axes, comparison, axis)
                axes.set_title(f"against {NAMES[axis]}")
            row[0].set_ylabel(comparison.metric)
            _finals(chart, row[3], comparison, [wrapped(variant.name, 150, 10) for variant in comparison.variants])
            row[3].set_title("at the end, by seed")
        handles, labels = grid[0][0].get_legend_handles_labels()
        chart.figure.legend(handles, labels, loc="outside lower center", ncols=min(6, most))
        return chart.png()
