"""The curve of one metric of a run, and numbers computed from it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .seeds import mean

Array = npt.NDArray[np.float64]
Params = Mapping[str, str]  # by name
# Metrics of which more is better, so that a fall is a collapse: rewards, accuracies and benchmarks' averages
_SUCCESS = re.compile(r"^reward/mean$|^eval/(.*[/_])?(accuracy|pass_at|avg_at|maj_at|avg)(_[^/]*)?$")
AXES = ("steps", "tokens", "seconds")  # what a curve can be drawn against


@dataclass(frozen=True)
class TrackedRun:
    """A run as listed by the tracking server.

    metrics: their names; started: milliseconds since 1970; url: of its page, None for a local store
    """

    id: str
    name: str
    variant: str
    seed: int
    engine: str
    status: str
    started: int
    params: Params
    metrics: frozenset[str]
    url: str | None

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


def common_range(curves: Iterable[Curve], axis: str) -> tuple[float, float] | None:
    """What all curves cover of an axis; None where there is no such range."""
    ends = np.array([curve.along(axis)[[0, -1]] for curve in curves])
    low, high = float(ends[:, 0].max()), float(ends[:, 1].min())
    return (low, high) if low <= high else None


def band(curves: Sequence[Curve], axis: str) -> tuple[Array, Array, Array, Array] | None:
    """(x, mean, low, high), (X,) each: the mean of the curves where all of them are, and its 95 % interval.

    Without an interval (seeds.py), low = high = mean. None where the curves have no range of the axis in common.
    """
    common = common_range(curves, axis)
    if common is None:
        return None
    points = np.unique(np.concatenate([curve.along(axis) for curve in curves]))
    x = points[(points >= common[0]) & (points <= common[1])]
    values = np.array([np.interp(x, curve.along(axis), curve.values) for curve in curves])
    means = [mean(column) for column in values.T]
    average, low, high = np.array([[m.value, *(m.bounds or (m.value, m.value))] for m in means]).T
    return x, average, low, high
