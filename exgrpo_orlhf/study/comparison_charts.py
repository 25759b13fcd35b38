"""The charts of a comparison: learning curves, last values by seed, differences from the baseline.

Variants are coloured in order: 8 colours, then the same again dashed, then dotted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..io.files import write
from ..io.paths import run_name
from ..io.progress import score_name
from ..show.charts import LINE, PALETTE, SERIES, WIDTH, Chart, curve, dot, drawing, interval, panel, png, svg, wrapped
from ..show.tables import plus_minus
from .comparison import MEASURES, Comparison, compare
from .curve import AXES, UNITS, logged_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..replay import ReplayBuffer
    from ..tracking.listener import ListenedRun

log = logging.getLogger(__name__)
PANEL = (370, 282)  # width and height
MARGIN = 0.04  # of an axis, on either side of what is drawn: whole dots and lines at its ends
NAMES = {"steps": "steps", "tokens": "generated tokens", "seconds": "training time"}


ACCURACY = "eval/greedy_accuracy"
TRAINING = (  # title, metric and axis of the panels of a training run
    ("Validation accuracy", ACCURACY, "steps"),
    ("Validation accuracy", ACCURACY, "tokens"),
    ("Reward of fresh rollouts", "reward/mean", "steps"),
    ("Lucky guesses among correct rollouts", "reward/lucky_guess_rate", "steps"),
    ("Share of replayed questions", "replay/actual_share", "steps"),
    ("Retired questions", "replay/retired", "steps"),
)


def colour(series: int) -> str:
    return f"m{series % SERIES}"


def dashes(series: int) -> int:
    """0: a line, 1: dashed, 2: dotted"""
    return series // SERIES % 3


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
    # There is no band where the seeds of each variant have no range of steps in common.
    least = min([low, *(float(band[2].min()) for band in bands)])
    most = max([high, *(float(band[3].max()) for band in bands)])
    reach = (high - low) or 1.0
    drawn = max(least, low - reach), min(most, high + reach)
    return *drawn, drawn != (least, most)


def curves(comparison: Comparison) -> list[Chart]:
    """Learning curves of the variants, against each axis for which there are some."""
    charts = []
    for axis in AXES:
        if any(comparison.bands[axis]):
            with panel(*PANEL) as (figure, axes):
                _curves(axes, comparison, axis)
                charts.append(svg(figure, f"{comparison.metric} against {NAMES[axis]}", "learning"))
    return charts


def _curves(axes: Axes, comparison: Comparison, axis: str, names: Sequence[str] = ()) -> None:
    """Each variant's mean with its interval, and its seeds as thin lines; more variants than colours as means.

    names: of variants, which have their colours in this order; by default those of the comparison
    """
    names = names or [variant.name for variant in comparison.variants]
    unit, size = UNITS[axis]
    axes.set(xlabel=unit, ylim=_limits(ends(comparison)[:2]))
    crowded = sum(map(bool, comparison.bands[axis])) > SERIES
    for variant, band in zip(comparison.variants, comparison.bands[axis], strict=True):
        if not band:
            continue
        (x, mean, low, high), i = band, names.index(variant.name)
        look: dict[str, Any] = {"linestyle": ("-", "--", ":")[dashes(i)]}
        alone = crowded or len(variant.curves) == 1
        for run in () if alone else variant.curves:
            along = run.along(axis) / size
            curve(axes, along, run.values, colour(i), kind="thin", linewidth=0.8, alpha=0.35, **look)
        marker = "o" if len(x) <= 60 else ""
        bounds = None if alone else (low, high)
        curve(axes, x / size, mean, colour(i), bounds, label=variant.name, marker=marker, markersize=3.6, **look)
    axes.set_xlim(left=-MARGIN / 2 * axes.get_xlim()[1])


def finals(comparison: Comparison) -> Chart:
    """Each seed's last value, a row for each variant; collapsed ones hollow; beside the row mean and interval."""
    names = [wrapped(variant.name) for variant in comparison.variants]
    with drawing(WIDTH, _row(names, 30) * len(names) + 52) as figure:
        axes = figure.subplots()
        axes.set_xlabel(f"{comparison.metric} at the end")
        _finals(axes, comparison, names)
        for i, variant in enumerate(comparison.variants):
            place = axes.get_yaxis_transform()
            text = plus_minus(variant.mean("final"), scale=variant.scale("final"))
            axes.text(1.02, i, text, va="center", fontsize=11, transform=place)
        return svg(figure, f"{comparison.metric} at the end, by seed", "finals")


def _row(names: Sequence[str], least: float) -> float:
    """The height of each row of a chart, so that the name with the most lines has room."""
    return max(least, 10 * LINE * max(name.count("\n") + 1 for name in names) + 6)


def _rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(names)), names, color=PALETTE["ink"], fontsize=10)


def _finals(axes: Axes, comparison: Comparison, names: Sequence[str], order: Sequence[str] = ()) -> None:
    """names: as they are written; order: of the variants' own names, as `_curves` has it"""
    variants = comparison.variants
    means = [variant.mean("final") for variant in variants]
    bounds = [bound for mean in means if mean for bound in mean.bounds or ()]
    axes.set(xlim=_limits([*bounds, *(value for variant in variants for value in variant.values["final"])]))
    _rows(axes, names)
    for i, (variant, mean) in enumerate(zip(variants, means, strict=True)):
        name = colour(order.index(variant.name) if order else i)
        paint = PALETTE[name]
        if mean and mean.bounds:
            low, high = mean.bounds
            axes.barh(i, high - low, 0.6, low, color=paint, alpha=0.16, gid=f"spread-{name}")
        if mean:
            axes.plot((mean.value, mean.value), (i - 0.3, i + 0.3), color=paint, linewidth=2.4, gid=f"mean-{name}")
        for run in variant.curves:
            dot(axes, i, run.final, name, hollow=run.collapsed)


def differences(comparison: Comparison) -> Chart:
    """A panel for each measure, a row for each variant: the difference from the baseline."""
    compared = {difference.variant for difference in comparison.differences}
    series = {variant.name: i for i, variant in enumerate(comparison.variants) if variant.name in compared}
    names = [wrapped(name, 30) for name in series]
    rows = {name: row for row, name in enumerate(series)}
    with drawing(WIDTH, _row(names, 26) * len(names) + 70) as figure:
        panels = dict(zip(dict(MEASURES), figure.subplots(1, len(MEASURES), sharex=True, sharey=True), strict=True))
        for measure, heading in MEASURES:
            panels[measure].set_title(heading)
            panels[measure].axvline(0, color=PALETTE["ink"], linewidth=1.2)
            panels[measure].locator_params(axis="x", nbins=4)
            panels[measure].grid(visible=False, axis="y")
        _rows(panels[MEASURES[0][0]], names)
        for difference in comparison.differences:
            mean, name = difference.mean, difference.variant
            interval(panels[difference.measure], rows[name], mean.value, mean.bounds, colour(series[name]))
        label = f"difference of {comparison.metric} from {comparison.baseline}, 95 % intervals over seeds"
        figure.supxlabel(label, fontsize=9.5, color=PALETTE["quiet"])
        return svg(figure, label, "differences")


def picture(comparisons: Sequence[Comparison]) -> bytes:
    """A PNG: a row for each metric, with its curves against each axis for which there are some, and the last values by
    seed."""
    # A variant that lacks a metric, such as one of replay, must not lend its colour to the next one.
    order = list(dict.fromkeys(variant.name for comparison in comparisons for variant in comparison.variants))
    most = len(order)
    height = 72 * (max(4.2, 0.24 * most) * len(comparisons) + 0.3 * math.ceil(most / 6))
    with drawing(1296, height) as figure:
        drawn = [axis for axis in AXES if any(any(comparison.bands[axis]) for comparison in comparisons)]
        grid = figure.subplots(len(comparisons), len(drawn) + 1, squeeze=False)
        for (*panels, last), comparison in zip(grid, comparisons, strict=True):
            for axes, axis in zip(panels, drawn, strict=True):
                _curves(axes, comparison, axis, order)
                axes.set_title(f"against {NAMES[axis]}")
            [*panels, last][0].set_ylabel(comparison.metric)
            _finals(last, comparison, [wrapped(variant.name, 24) for variant in comparison.variants], order)
            last.set_title("at the end, by seed")
        handles = [axes.get_legend_handles_labels() for row in grid for axes in reversed(row)]
        lines = {label: line for of_panel in handles for line, label in zip(*of_panel, strict=True)}
        figure.legend(
            [lines[name] for name in order if name in lines],
            [n for n in order if n in lines],
            loc="outside lower center",
            ncols=min(6, most),
        )
        return png(figure)


class Curves:
    """`curves.png` of a run, at its end."""

    def __init__(self, run: ListenedRun) -> None:
        self._run = run

    def saved(self, buffer: ReplayBuffer, step: int) -> None:
        """Nothing yet."""

    def ended(self, buffer: ReplayBuffer, step: int) -> None:
        run = self._run
        path = run.folder / "curves.png"
        try:
            picture = training_picture({run_name(run.folder): list(run.metrics.rows())})
            if picture is None:
                return
            write(path, picture)
        except (OSError, ValueError, RuntimeError) as error:
            log.warning("%s could not be drawn: %s", path, error)
            return
        run.tracker.artifact(path)


def training_picture(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> bytes | None:
    """A PNG: up to six panels of training runs, of what was measured; None if nothing was.

    runs: by name, rows of metrics.jsonl
    """
    drawn = []
    for title, metric, axis in TRAINING:
        if metric == ACCURACY:  # sampled validation has another name
            metric = score_name(name for rows in runs.values() for row in rows for name in row) or metric
        curves = [
            logged_curve(name, i, rows, metric)
            for i, (name, rows) in enumerate(runs.items())
            if any(metric in row for row in rows)
        ]
        if any(curve.has(axis) for curve in curves):
            drawn.append((title, axis, compare(metric, curves, None)))
    if not drawn:
        return None
    rows_of_panels = math.ceil(len(drawn) / 3)
    with drawing(936, 252 * rows_of_panels) as figure:
        for place, (title, axis, comparison) in enumerate(drawn, 1):
            axes = figure.add_subplot(rows_of_panels, 3, place, title=title)
            axes.locator_params(axis="x", nbins=4)  # labels are long
            _curves(axes, comparison, axis, list(runs))
        figure.axes[0].legend()
        return png(figure)
