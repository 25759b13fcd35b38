"""The charts of the page: buckets over steps, and what is replayed against what is stored."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from ..evaluation.plots import BINS, PALETTE, WIDTH, Drawing, drawing
from ..records import mean
from .history import History, forgotten_by_step, shares_by_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 300  # along the steps of a chart; more steps are averaged
PANEL = (370, 260)  # width and height
LEVELS = {"unsolved": "m5", "hard": "m1", "medium": "m2", "easy": "m0", "solved": "m3", "retired": "no_answer"}
REPLAYED, STORED, FRESH = "m1", "m0", "m2"
Series = Sequence[tuple[str, Sequence[Sequence[float]]]]  # colour, and the values of each step


def buckets(history: History) -> str:
    """A stacked area: questions by level over steps, the retired at the top."""
    parts = _parts(history.steps)
    steps = [history.steps[part[-1]] for part in parts]
    sizes = [[history.buckets[part[-1]][level] for part in parts] for level in LEVELS]
    with drawing(WIDTH, 300) as chart:
        axes = chart.axes(60, 20, 10, 42, xlabel="step", xlim=(min(steps) - 0.5, max(steps) + 0.5))
        axes.set_ylim(0, max(1, *map(sum, zip(*sizes, strict=True))))
        areas = axes.stackplot(steps, sizes, colors=[PALETTE[colour] for colour in LEVELS.values()], alpha=0.85)
        for area, (level, colour), values in zip(areas, LEVELS.items(), sizes, strict=True):
            chart.mark(area, f"area {colour}", f"{level}: {values[-1]:,} after step {steps[-1]:,}")
        return chart.svg("questions by level over steps", "buckets")


@contextmanager
def _panel(title: str, steps: Sequence[int]) -> Iterator[tuple[Drawing, Axes, list[np.ndarray]]]:
    """A small chart over steps: the drawing, its axes, and the positions of the steps in parts."""
    with drawing(*PANEL) as chart:
        axes = chart.axes(48, 14, 28, 42, title=title, xlabel="step", xlim=(min(steps) - 0.5, max(steps) + 0.5))
        yield chart, axes, _parts(steps)


def over_steps(title: str, label: str, steps: Sequence[int], series: Series) -> str:
    """Medians over steps, each with the band from the 10 % to the 90 % quantile."""
    with _panel(title, steps) as (chart, axes, parts):
        for colour, values in series:
            of_part = [(steps[part[-1]], [value for i in part for value in values[i]]) for part in parts]
            points = [(step, *np.quantile(numbers, (0.1, 0.5, 0.9))) for step, numbers in of_part if numbers]
            if points:
                at, low, middle, high = zip(*points, strict=True)
                band = axes.fill_between(at, low, high, color=PALETTE[colour], alpha=0.16, linewidth=0)
                chart.mark(band, f"band {colour}")
                words = f"median after step {at[-1]:,}: {middle[-1]:.3g} {label}"
                chart.mark(axes.plot(at, middle, color=PALETTE[colour], linewidth=1.7)[0], f"curve {colour}", words)
        return chart.svg(title, "over-steps")


def spreads(history: History) -> str | None:
    """The standard deviation of a group's rewards over steps; None where difficulty is the accuracy."""
    if not any(history.spreads):
        return None
    return over_steps("spread of a group's rewards", "", history.steps, [(FRESH, history.spreads)])


def lines(title: str, steps: Sequence[int], series: Mapping[str, Sequence[float]], share: bool) -> str:
    """One value a step and colour, NaN where there is none. share: of one, shown in percent"""
    with _panel(title, steps) as (chart, axes, parts):
        for colour, values in series.items():
            numbers = [[values[i] for i in part if not math.isnan(values[i])] for part in parts]
            points = [(steps[part[-1]], mean(each)) for part, each in zip(parts, numbers, strict=True) if each]
            if points:
                at, means = zip(*points, strict=True)
                axes.plot(at, np.array(means) * (100 if share else 1), color=PALETTE[colour], linewidth=1.7)
        axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
        return chart.svg(title, "lines")


def distribution(title: str, unit: str, series: Mapping[str, Sequence[float]], top: float | None = None) -> str:
    """Histograms as outlines: the share of each colour's values in a bin, in percent. top: end of the axis"""
    numbers = [value for values in series.values() for value in values]
    end = top or max(float(np.quantile(numbers, 0.99)) if numbers else 1.0, 1e-6)
    edges = np.linspace(min(0.0, *numbers, 0.0), end, BINS + 1)
    with drawing(*PANEL) as chart:
        axes = chart.axes(48, 14, 28, 42, title=title, xlabel=unit, xlim=(edges[0], edges[-1]))
        for colour, values in series.items():
            if len(values):
                counts, _ = np.histogram(np.minimum(values, end), edges)
                shares = 100 * counts / len(values)
                axes.stairs(shares, edges, color=PALETTE[colour], alpha=0.18, fill=True)
                words = f"mean {np.mean(values):.3g}, {len(values):,} values"
                chart.mark(axes.stairs(shares, edges, color=PALETTE[colour], linewidth=1.6), f"bars {colour}", words)
        axes.set_ylim(0)
        return chart.svg(title, "distribution")


def replayed(history: History) -> list[str]:
    """Age, entropy and importance weight of what was replayed, over steps and against what is stored."""
    replays = history.replays
    bounds = np.searchsorted(replays["step"], [*history.steps, history.step + 1]).tolist()
    of_step = [slice(begin, end) for begin, end in itertools.pairwise(bounds)]

    def by_step(name: str) -> list[list[float]]:
        return [[value for value in replays[name][part] if value is not None] for part in of_step]

    weights = [[math.exp(value) for value in values] for values in by_step("log_weight")]
    stored = history.buffer
    entropies = [(FRESH, history.entropies), ("m7", by_step("others")), (REPLAYED, by_step("entropy"))]
    return [
        over_steps("age, steps", "steps", history.steps, [(REPLAYED, by_step("age"))]),
        over_steps("entropy under the current policy, nats", "nats", history.steps, entropies),
        over_steps("importance weight (geometric mean)", "", history.steps, [(REPLAYED, weights)]),
        distribution("age: replayed, and stored now", "steps", {STORED: stored["age"], REPLAYED: replays["age"]}),
        distribution("−log π_past per token", "nats", {STORED: stored["surprisal"], REPLAYED: replays["surprisal"]}),
        distribution("length", "tokens", {STORED: stored["tokens"], REPLAYED: replays["tokens"]}),
    ]


def lucky(history: History) -> str | None:
    """The share of lucky guesses over steps, fresh and replayed; None where nothing checks the reasoning."""
    if not any(history.events["checked"]):
        return None
    fresh = shares_by_step(history, history.events["lucky"], history.events["checked"], history.events["step"])
    sound, steps = history.replays["sound"], history.replays["step"]
    unsound = shares_by_step(history, [s is False for s in sound], [s is not None for s in sound], steps)
    return lines("lucky guesses, % of correct answers", history.steps, {FRESH: fresh, REPLAYED: unsound}, share=True)


def forgotten(history: History) -> str:
    """Questions that were solved once and are at 0, over steps."""
    counts = [float(count) for count in forgotten_by_step(history)]
    return lines("forgotten questions", history.steps, {"m5": counts}, share=False)


def diversity(history: History) -> list[str]:
    """How many trajectories a question has, and how different they are."""
    several = [value for value in history.distinct if value >= 0]
    many = [float(count) for count in history.stored if count]
    unit = "0: the same token pairs, 1: no pair in two of them"
    return [
        distribution("stored trajectories of a question", "trajectories", {STORED: many}),
        distribution("diversity of a question's trajectories", unit, {STORED: several}, 1.0),
    ]


def _parts(steps: Sequence[int]) -> list[np.ndarray]:
    """Positions of the steps, in at most POINTS parts."""
    return np.array_split(np.arange(len(steps)), min(POINTS, len(steps)))
