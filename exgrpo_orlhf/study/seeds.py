"""Statistics over a few seeds: t intervals, paired differences and their p-values.

The unit is the seed: one training run gives one number. Intervals are 95 % t intervals of the mean. Differences are
paired by seed, so effects of the seed on both runs (order of questions, validation questions) cancel.

The p-value that is corrected and reported is that of the paired t test. It agrees with the interval (0 is outside
exactly if p < 0.05), it can be small with few seeds, and it is conservative if some seeds collapse
(test_comparison.py simulates that). The exact sign-flip test is given too. It assumes only that both signs of a
difference are equally likely. With n seeds there are 2^n sign patterns, so its p-value is never below 2/2^n (0.25 for
3 seeds, 2/256 = 0.008 for 8).

Equal numbers have no spread, so there is no interval and no t test, as with a single seed.

scipy's ttest_1samp and permutation_test compute the same (test_comparison.py) and are 70 and 300 times slower;
permutation_test also takes equal means for different ones where they differ by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr, stdtrit

from ..evaluation.statistics import LEVEL

EXACT_UP_TO = 16  # seeds: 65,536 sign patterns
_NO_SPREAD = 1e-12  # a ratio of standard deviation to magnitude below this is rounding


@dataclass(frozen=True)
class Mean:
    """A mean over `count` seeds; bounds: its 95 % interval, None for fewer than two seeds, or if all are equal."""

    value: float
    bounds: tuple[float, float] | None
    count: int


@dataclass(frozen=True)
class Paired:
    """A mean difference, tested against 0, two-sided.

    p: paired t test, None if `mean` has no interval; p_exact: sign flips, None for more than EXACT_UP_TO seeds
    """

    mean: Mean
    p: float | None
    p_exact: float | None


def mean(values: npt.ArrayLike) -> Mean:
    """The mean and its interval. values: (n,), n ≥ 1, finite"""
    x = np.asarray(values, np.float64)
    value, error = float(x.mean()), _standard_error(x)
    half = error and float(stdtrit(len(x) - 1, (1 + LEVEL) / 2)) * error
    return Mean(value, None if half is None else (value - half, value + half), len(x))


def paired(differences: npt.ArrayLike) -> Paired:
    """Test a mean difference. differences: (n,), n ≥ 1, finite, one for each seed"""
    d = np.asarray(differences, np.float64)
    error = _standard_error(d)
    p = None if error is None else float(2 * stdtr(len(d) - 1, -abs(d.mean()) / error))
    return Paired(mean(d), p, _sign_flip(d) if len(d) <= EXACT_UP_TO else None)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction: the k-th smallest of m times m − k + 1, made monotone. None (no test) is skipped."""
    tested = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, i) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p))
        corrected[i] = largest
    return corrected


def _sign_flip(differences: npt.NDArray[np.float64]) -> float:
    """The share of all 2^n sign patterns with a mean at least as far from 0 as the observed one, which is included."""
    sums = np.zeros(1)
    for d in differences:
        sums = np.concatenate([sums + d, sums - d])
    least = abs(float(differences.sum())) - 1e-9 * float(np.abs(differences).sum())  # equal but for rounding
    return float(np.mean(np.abs(sums) >= least))


def _standard_error(x: npt.NDArray[np.float64]) -> float | None:
    if len(x) < 2 or x.std(ddof=1) <= _NO_SPREAD * float(np.abs(x).max()):
        return None
    return float(x.std(ddof=1)) / math.sqrt(len(x))
