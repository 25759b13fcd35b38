"""Statistics over a few seeds: t intervals, paired differences and their p-values.

The unit is the seed: one training run gives one number. Intervals are 95 % t intervals of the mean. Differences are
paired by seed, so effects of the seed on both runs (order of questions, validation questions) cancel.

The p-value that is corrected and reported is that of the paired t test. It agrees with the interval, and is
conservative if some seeds collapse (test_comparison.py simulates that). The exact sign-flip test assumes only that both
signs of a difference are equally likely; with n seeds its p-value is never below 2/2^n (0.25 for 3, 0.008 for 8).

scipy.stats (1.17.1) has no correction of Holm's, and its permutation_test takes equal means for different ones where
they differ by rounding: 4 of 600 p-values were wrong, of differences of 8 seeds with two digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
EXACT_UP_TO = 16  # seeds: 65,536 sign patterns
_NO_SPREAD = 1e-12  # a ratio of standard deviation to magnitude below this is rounding


@dataclass(frozen=True)
class Mean:
    """A mean over `count` seeds. bounds: its 95 % interval; p: of the two-sided t test that it is 0 (paired, if it is
    of differences). Both are None for fewer than two seeds, or if all are equal."""

    value: float
    bounds: tuple[float, float] | None
    p: float | None
    count: int


def mean(values: npt.ArrayLike) -> Mean:
    """The mean with its interval and its test. values: (n,), n ≥ 1, finite"""
    x = np.asarray(values, np.float64)
    low, high, p = map(float, t_test(x))
    spread = not math.isnan(p)
    return Mean(float(x.mean()), (low, high) if spread else None, p if spread else None, len(x))


def t_test(values: Array) -> tuple[Array, Array, Array]:
    """(low, high) of the t interval of the means along the first axis, and the p of the test that they are 0.

    values: (n, …); the results, (…), are NaN where there is no spread
    """
    from scipy.stats import ttest_1samp  # 50 MB that training does not need

    if len(values) < 2:
        return (np.full(values.shape[1:], np.nan),) * 3
    spread = values.std(axis=0) > _NO_SPREAD * np.abs(values).max(axis=0)
    test = ttest_1samp(np.where(spread, values, np.nan), 0)
    return *test.confidence_interval(), test.pvalue


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction: the k-th smallest of m times m − k + 1, made monotone. None (no test) is skipped."""
    tested = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, i) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p))
        corrected[i] = largest
    return corrected


def sign_flip(differences: npt.ArrayLike) -> float | None:
    """The exact p: the share of all 2^n sign patterns with a mean at least as far from 0 as the observed one, which is
    one of them. differences: (n,), one for each seed; None for more than EXACT_UP_TO"""
    d, sums = np.asarray(differences, np.float64), np.zeros(1)
    if len(d) > EXACT_UP_TO:
        return None
    for difference in d:
        sums = np.concatenate([sums + difference, sums - difference])
    least = abs(float(d.sum())) - 1e-9 * float(np.abs(d).sum())  # equal but for rounding
    return float(np.mean(np.abs(sums) >= least))
