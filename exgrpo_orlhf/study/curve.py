"""The curve of one metric of a run, and numbers computed from it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..show.seeds import Array, t_test

Params = Mapping[str, str]  # by name
# Metrics of which more is better, so that a fall is a collapse: rewards, accuracies and benchmarks' averages. Not
# replay/continued_accuracy, which is 0 in a step without such a group
_SUCCESS = re.compile(
    r"^reward/(mean|pass_at_1)$|^reward_part/.+(?<!_groups_with_signal)$"
    r"|^eval/(.*[/_])?(accuracy|pass_at|avg_at|maj_at|avg)(_[^/]*)?$"
)
TOKENS, SECONDS = "cost/generated_tokens", "time/step"  # metrics by which curves are drawn against these
History = tuple[Array, Array]  # (steps, values), (N,) each, with increasing steps
AXES = ("steps", "tokens", "seconds")  # what a curve can be drawn against
UNITS = {"tokens": ("million tokens", 1e6), "seconds": ("minutes", 60.0), "steps": ("steps", 1.0)}


@dataclass(frozen=True)
class TrackedRun:
    """A run as listed by the tracking server, or one that is in no store: its id is its name then.

    metrics: their names; started: milliseconds since 1970; url: of its page, None for a local store
    """

    id: str
    name: str
    variant: str
    seed: int
    engine: str = "local"
    status: str = "FINISHED"
    started: int = 0
    params: Params = field(default_factory=dict)
    metrics: frozenset[str] = frozenset()
    url: str | None = None

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed} ({self.name}, {self.id})"


@dataclass(frozen=True)
class Curve:
    """The measured values of a metric, arrays (N,) with N ≥ 1.

    steps: increasing; tokens: generated since the run's start, at the end of the step; seconds: spent on steps until
    then, without evaluation. Tokens and seconds never fall; NaN: the run has no record of them for these steps.
    metric: its name
    """

    run: TrackedRun
    steps: Array
    values: Array
    tokens: Array
    seconds: Array
    metric: str

    def along(self, axis: str) -> Array:
        array: Array = getattr(self, axis)
        return array

    def has(self, axis: str) -> bool:
        return not math.isnan(self.along(axis)[0])

    @property
    def final(self) -> float:
        return float(self.values[-1])

    @property
    def collapsed(self) -> bool:
        """Ends below its start, or below half of its best value if that is above 0. Of measures of success alone."""
        if not _SUCCESS.search(self.metric):
            return False
        best = float(self.values.max())
        return self.final < float(self.values[0]) or (best > 0 and self.final < best / 2)

    def at(self, axis: str, x: float) -> float:
        """The value at x, interpolated linearly; NaN outside the measured range."""
        along = self.along(axis)
        if not along[0] <= x <= along[-1]:
            return math.nan
        return float(np.interp(x, along, self.values))

    def area(self, axis: str, low: float, high: float) -> float:
        """The mean height of the curve from low to high, in the metric's unit.

        It is computed by trapezoids through the measured points and the interpolated ends; NaN if the curve does not
        cover the range, or low = high.
        """
        along = self.along(axis)
        if not along[0] <= low < high <= along[-1]:
            return math.nan
        inside = (along > low) & (along < high)
        x = np.array([low, *along[inside], high])
        y = np.array([self.at(axis, low), *self.values[inside], self.at(axis, high)])
        return float(np.trapezoid(y, x) / (high - low))


def curve_of(run: TrackedRun, metric: str, histories: Mapping[str, History]) -> Curve:
    """histories: of this metric and, where the run has them, of TOKENS and SECONDS"""
    steps, values = histories[metric]
    tokens = seconds = np.full(len(steps), np.nan)
    if generated := histories.get(TOKENS):
        at, total = generated
        if at[0] <= steps[0] <= steps[-1] <= at[-1]:  # interpolated; a resumed run may repeat steps, but never falls
            tokens = np.interp(steps, at, np.maximum.accumulate(total))
    if spent := histories.get(SECONDS):
        at, of_step = spent
        if steps[-1] <= at[-1]:  # the sum of the times of all steps up to each of these
            seconds = np.concatenate([[0.0], np.cumsum(of_step)])[np.searchsorted(at, steps, side="right")]
    return Curve(run, steps, values, tokens, seconds, metric)


def logged_curve(name: str, seed: int, rows: Sequence[Mapping[str, float]], metric: str) -> Curve:
    """The curve of a run that is in no store. name: of the run and its variant; rows: of its metrics.jsonl"""
    histories: dict[str, History] = {}
    for key in (metric, TOKENS, SECONDS):
        if points := [(row["step"], row[key]) for row in rows if key in row]:
            steps, values = np.array(points, np.float64).T
            histories[key] = steps, values
    return curve_of(TrackedRun(name, name, name, seed), metric, histories)


def common_range(curves: Iterable[Curve], axis: str) -> tuple[float, float] | None:
    """What all curves cover of an axis; None where there is no such range."""
    ends = np.array([curve.along(axis)[[0, -1]] for curve in curves])
    low, high = float(ends[:, 0].max()), float(ends[:, 1].min())
    return (low, high) if low <= high else None


def band(curves: Sequence[Curve], axis: str) -> tuple[Array, Array, Array, Array] | None:
    """(x, mean, low, high), (X,) each: the mean of the curves where all of them are, and its 95 % interval.

    Without an interval (show/seeds.py), low = high = mean. None where the curves have no range of the axis in common.
    """
    common = common_range(curves, axis)
    if common is None:
        return None
    points = np.unique(np.concatenate([curve.along(axis) for curve in curves]))
    x = points[(points >= common[0]) & (points <= common[1])]
    values = np.array([np.interp(x, curve.along(axis), curve.values) for curve in curves])
    average, (low, high, _) = values.mean(axis=0), t_test(values)
    return x, average, np.where(np.isnan(low), average, low), np.where(np.isnan(high), average, high)
