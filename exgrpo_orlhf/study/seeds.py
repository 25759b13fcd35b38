"""What a handful of seeds can say: t intervals, paired differences and their p-values.

The unit is the seed: one training run gives one number. Intervals are 95 % t intervals of the mean. Differences are
taken seed by seed, so that what the seed decides for both (questions' order, validation questions) falls out.

The p-value that is corrected and reported is that of the paired t test: it agrees with the interval (0 is outside it
exactly where p < 0.05), it can be small with few seeds, and it errs on the side of none where some seeds collapse
(tests/test_compare.py simulates that). Beside it stands the exact sign-flip test, which assumes
only that a difference is as likely one way as the other: of n seeds it knows 2^n sign patterns, so that it is never
below 2/2^n (0.25 for 3 seeds, 2/256 = 0.008 for 8).

Equal numbers have no spread to reckon with: no interval and no t test then, as with a single seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr, stdtrit

LEVEL = 0.95
EXACT_UP_TO = 16  # seeds: 65,536 sign patterns
_NO_SPREAD = 1e-12  # standard deviation over magnitude, below which it is rounding


@dataclass(frozen=True)
class Mean:
    """Over `count` seeds, with its 95 % interval; None: fewer than two seeds, or all equal."""

    value: float
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True)
class Paired:
    """Of the mean difference over `count` seeds against 0, two-sided. p: paired t; p_exact: sign flips.

    p is None where `mean` has no interval, p_exact for more than EXACT_UP_TO seeds.
    """

    mean: Mean
    p: float | None
    p_exact: float | None


def mean(values: npt.ArrayLike) -> Mean:
    """values: (n,), n ≥ 1, finite."""
    x = np.asarray(values, np.float64)
    error = _standard_error(x)
    if error is None:
        return Mean(float(x.mean()), None, None, len(x))
    half = float(stdtrit(len(x) - 1, (1 + LEVEL) / 2)) * error
    return Mean(float(x.mean()), float(x.mean()) - half, float(x.mean()) + half, len(x))


def paired(differences: npt.ArrayLike) -> Paired:
    """differences: (n,), n ≥ 1, finite: one a seed."""
    d = np.asarray(differences, np.float64)
    error = _standard_error(d)
    p = None if error is None else float(2 * stdtr(len(d) - 1, -abs(d.mean()) / error))
    return Paired(mean(d), p, sign_flip(d) if len(d) <= EXACT_UP_TO else None)


def sign_flip(differences: npt.NDArray[np.float64]) -> float:
    """The share of all 2^n sign patterns whose mean is at least as far from 0 as the one observed, itself included."""
    sums = np.zeros(1)
    for d in differences:
        sums = np.concatenate([sums + d, sums - d])
    reached = abs(float(differences.sum())) - 1e-9 * float(np.abs(differences).sum())  # equal but for rounding
    return float(np.mean(np.abs(sums) >= reached))


def _standard_error(x: npt.NDArray[np.float64]) -> float | None:
    if len(x) < 2 or x.std(ddof=1) <= _NO_SPREAD * float(np.abs(x).max()):
        return None
    return float(x.std(ddof=1)) / math.sqrt(len(x))
