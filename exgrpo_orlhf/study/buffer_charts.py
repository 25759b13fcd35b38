"""The charts of the page: buckets over steps, and what is replayed against what is stored."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..show.charts import BINS, PALETTE, WIDTH, Chart, curve, drawing, panel, place, svg
from .history import History, forgotten_by_step, shares_by_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 300  # along the steps of a chart; more steps are averaged
PANEL = (370, 260)  # width and height
LEVELS = {"unsolved": "m5", "hard": "m1", "medium": "m2", "easy": "m0", "solved": "m3", "retired": "no_answer"}
REPLAYED, STORED, FRESH = "m1", "m0", "m2"
Series = Sequence[tuple[str, Sequence[Sequence[float]]]]  # colour, and the values of each step


def buckets(history: History) -> Chart:
    """A stacked area: questions by level over steps, the retired at the top."""
    parts = _parts(history.steps)
    steps = [history.steps[part[-1]] for part in parts]
    sizes = [[history.buckets[part[-1]][level] for part in parts] for level in LEVELS]
    with drawing(WIDTH, 300, layout=None) as figure:
        axes = place(figure, 60, 20, 10, 42, xlabel="step", xlim=_limits(steps))
        axes.set_ylim(0, max(1, *map(sum, zip(*sizes, strict=True))))
        areas = axes.stackplot(steps, sizes, colors=[PALETTE[colour] for colour in LEVELS.values()], alpha=0.85)
        for area, colour in zip(areas, LEVELS.values(), strict=True):
            area.set_gid(f"area-{colour}")
        return svg(figure, "questions by level over steps", "buckets")


def over_steps(title: str, label: str, steps: Sequence[int], series: Series) -> Chart | None:
    """Medians over steps, each with the band from the 10 % to the 90 % quantile; None without a value. label: the unit

    NaN is no value.
    """
    if all(math.isnan(value) for _, values in series for of_step in values for value in of_step):
        return None
    with panel(*PANEL, xlabel="step", ylabel=label, xlim=_limits(steps)) as (figure, axes):
        for colour, values in series:
            of_part = [
                (steps[part[-1]], [value for i in part for value in values[i] if not math.isnan(value)])
                for part in _parts(steps)
            ]
            points = [(step, *np.quantile(numbers, (0.1, 0.5, 0.9))) for step, numbers in of_part if numbers]
            if points:
                at, low, middle, high = zip(*points, strict=True)
                curve(axes, at, middle, colour, (low, high), label=f"{middle[-1]:.3g} after step {at[-1]:,}")
        axes.set_ylim(min(0, axes.get_ylim()[0]))
        _name(axes)
        return svg(figure, title, "over-steps")


def spreads(history: History) -> Chart | None:
    """The standard deviation of a group's rewards over steps; None where difficulty is the accuracy."""
    if not any(history.spreads):
        return None
    return over_steps("spread of a group's rewards", "", history.steps, [(FRESH, history.spreads)])


def distribution(
    title: str, unit: str, series: Mapping[str, Sequence[float]], top: float | None = None
) -> Chart | None:
    """Histograms as outlines: the share of each colour's values in a bin, in percent; None without a value. top: end of
    the axis"""
    numbers = [value for values in series.values() for value in values]
    if not numbers:
        return None
    end = top or max(float(np.quantile(numbers, 0.99)), 1e-6)
    edges = np.linspace(min(0.0, *numbers, 0.0), end, BINS + 1)
    with panel(*PANEL, xlabel=unit, xlim=(edges[0], edges[-1])) as (figure, axes):
        for colour, values in series.items():
            if len(values):
                shares = 100 * np.histogram(np.minimum(values, end), edges)[0] / len(values)
                axes.stairs(shares, edges, color=PALETTE[colour], alpha=0.18, fill=True)
                words = f"mean {np.mean(values):.3g}, {len(values):,} values"
                axes.stairs(shares, edges, color=PALETTE[colour], linewidth=1.6, gid=f"bars-{colour}", label=words)
        axes.set_ylim(0)
        _name(axes)
        return svg(figure, title, "distribution")


def replayed(history: History) -> list[Chart]:
    """Age, entropy and importance weight of what was replayed, over steps and against what is stored."""
    replays = history.replays
    bounds = np.searchsorted(replays["step"], [*history.steps, history.step + 1]).tolist()
    of_step = [slice(begin, end) for begin, end in itertools.pairwise(bounds)]

    def by_step(name: str) -> list[list[float]]:
        return [[value for value in replays[name][part] if value is not None] for part in of_step]

    weights = [[math.exp(value) for value in values] for values in by_step("log_weight")]
    stored = history.buffer
    entropies = [(FRESH, history.entropies), ("m7", by_step("others")), (REPLAYED, by_step("entropy"))]
    charts = [
        over_steps("age, steps", "steps", history.steps, [(REPLAYED, by_step("age"))]),
        over_steps("entropy under the current policy, nats", "nats", history.steps, entropies),
        over_steps("importance weight (geometric mean)", "", history.steps, [(REPLAYED, weights)]),
        distribution("age: replayed, and stored now", "steps", {STORED: stored["age"], REPLAYED: replays["age"]}),
        distribution("−log π_past per token", "nats", {STORED: stored["surprisal"], REPLAYED: replays["surprisal"]}),
        distribution("length", "tokens", {STORED: stored["tokens"], REPLAYED: replays["tokens"]}),
    ]
    return [*filter(None, charts)]


def lucky(history: History) -> Chart | None:
    """The share of lucky guesses over steps, fresh and replayed; None where nothing checks the reasoning."""
    if not any(history.events["checked"]):
        return None
    fresh = shares_by_step(history, history.events["lucky"], history.events["checked"], history.events["step"])
    sound, steps = history.replays["sound"], history.replays["step"]
    unsound = shares_by_step(history, [s is False for s in sound], [s is not None for s in sound], steps)
    series = [(colour, [[100 * share] for share in shares]) for colour, shares in ((FRESH, fresh), (REPLAYED, unsound))]
    return over_steps("lucky guesses, % of correct answers", "%", history.steps, series)


def forgotten(history: History) -> Chart | None:
    """Questions that were solved once and are at 0, over steps."""
    counts = [[float(count)] for count in forgotten_by_step(history)]
    return over_steps("forgotten questions", "", history.steps, [("m5", counts)])


def diversity(history: History) -> list[Chart]:
    """How many trajectories a question has, and how different they are."""
    several = [value for value in history.distinct if value >= 0]
    many = [float(count) for count in history.stored if count]
    unit = "0: the same token pairs, 1: no pair in two of them"
    charts = [
        distribution("stored trajectories of a question", "trajectories", {STORED: many}),
        distribution("diversity of a question's trajectories", unit, {STORED: several}, 1.0),
    ]
    return [*filter(None, charts)]


def _name(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _limits(steps: Sequence[int]) -> tuple[float, float]:
    return min(steps) - 0.5, max(steps) + 0.5


def _parts(steps: Sequence[int]) -> list[np.ndarray]:
    """Positions of the steps, in at most POINTS parts."""
    return np.array_split(np.arange(len(steps)), min(POINTS, len(steps)))
