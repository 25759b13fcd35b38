"""The curve of one metric of a run, and numbers computed from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .seeds import mean

Array = npt.NDArray[np.float64]
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
    params: Mapping[str, str]
    metrics: frozenset[str]
    url: str | None

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed} ({self.name}, {self.id})"


@dataclass(frozen=True)
class Curve:
    """The measured values of a metric, arrays (N,) with N ≥ 1.

    steps: increasing; tokens: generated since the run's start, at the end of the step; seconds: spent on steps until
    then, without evaluation. Tokens and seconds never fall; None: the run has no record of them for these steps.
    """

    run: TrackedRun
    steps: Array
    values: Array
    tokens: Array | None
    seconds: Array | None

    def along(self, axis: str) -> Array | None:
        return {"steps": self.steps, "tokens": self.tokens, "seconds": self.seconds}[axis]

    @property
    def final(self) -> float:
        return float(self.values[-1])

    @property
    def collapsed(self) -> bool:
        """Ends below its start, or below half of its best value if that is above 0. Higher values are better."""
        best = float(self.values.max())
        return self.final < float(self.values[0]) or (best > 0 and self.final < best / 2)

    def at(self, axis: str, x: float) -> float:
        """The value at x, interpolated linearly; NaN outside the measured range."""
        along = self.along(axis)
        if along is None or not along[0] <= x <= along[-1]:
            return math.nan
        return float(np.interp(x, along, self.values))

    def area(self, axis: str, low: float, high: float) -> float:
        """The mean height of the curve from low to high, in the metric's unit.

        It is computed by trapezoids through the measured points and the interpolated ends; NaN if the curve does not
        cover the range, or low = high.
        """
        along = self.along(axis)
        if along is None or not along[0] <= low < high <= along[-1]:
            return math.nan
        inside = (along > low) & (along < high)
        x = np.array([low, *along[inside], high])
        y = np.array([self.at(axis, low), *self.values[inside], self.at(axis, high)])
        return float(np.trapezoid(y, x) / (high - low))


@dataclass(frozen=True)
class Band:
    """The mean of several curves and its 95 % interval, (X,) each, where all of them are; no interval for one curve
    or where they are equal: low = high = mean there."""

    x: Array
    mean: Array
    low: Array
    high: Array


def band(curves: Sequence[Curve], axis: str) -> Band | None:
    """None where a curve has no such axis or they have no range in common."""
    along = [curve.along(axis) for curve in curves]
    known = [x for x in along if x is not None]
    if len(known) < len(along):
        return None
    low, high = max(x[0] for x in known), min(x[-1] for x in known)
    x = np.unique(np.concatenate([each[(each >= low) & (each <= high)] for each in known]))
    if not len(x):
        return None
    values = np.array([np.interp(x, each, curve.values) for each, curve in zip(known, curves, strict=True)])
    means = [mean(column) for column in values.T]
    bounds = np.array(
        [[m.value, m.value if m.low is None else m.low, m.value if m.high is None else m.high] for m in means]
    )
    return Band(x, *bounds.T)
