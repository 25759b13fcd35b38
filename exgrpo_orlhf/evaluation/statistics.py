"""Metrics of graded samples, with confidence intervals.

The unit is the question: 32 samples of one question are not 32 questions. Every metric is first computed for each
question, shape (Q,). Only questions are resampled.

Intervals are 95 % BCa bootstrap intervals (Efron 1987) with three choices, each made by simulation with clustered
samples (tests/evaluation/test_eval_statistics.py repeats it):

- The bias constant of BCa is set to the acceleration, its value for a mean. An estimate from resamples of a few equal
  values would be mostly noise.
- Quantiles are widened as a t interval is wider than a z interval. The degrees of freedom are those of the variance
  estimate, 2Q / (kurtosis − 1 − skewness²): infinite for values 0 and 1, whose variance follows from their mean, and
  2.5 Q for uniform values.
- Means of few values lie on a lattice, so quantiles interpolate between the midpoints of its steps.

scipy.stats.bootstrap cannot take their place: 34 s instead of 0.07 s for the four pass@k of 12,032 questions, and NaN
for equal values.

A bootstrap of equal values has width 0. There the bound is exact, that of Clopper and Pearson for a value that all Q
questions have: for 1 correct question of 1 the interval is [0.025, 1].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

LEVEL = 0.95
RESAMPLES = 10_000
_AT_ONCE = 4_000_000  # counts drawn at a time, 32 MB
_GRADES = "(questions, samples)"
_DIGITS = 12  # means that agree to this many digits are equal


@dataclass(frozen=True)
class Estimate:
    """A mean over questions and its 95 % interval, in the unit of the values (shares: 0 to 1)."""

    value: float
    low: float
    high: float


def avg_at_k(correct: npt.ArrayLike) -> Array:
    """correct: (Q, n), bool or shares. Each question's mean over its n samples, (Q,)."""
    means: Array = _shares(correct, _GRADES).mean(axis=1)
    return means


def pass_at_k(correct_counts: npt.ArrayLike, n: int, k: int) -> Array:
    """The probability that k of a question's n samples, drawn without replacement, include a correct one, (Q,).

    1 − C(n−c, k) / C(n, k). It is unbiased for k new samples.

    correct_counts: c, (Q,), integers from 0 to n. Raises ValueError if they are not, or k is not from 1 to n.
    """
    from scipy.stats import hypergeom  # 50 MB that training does not need

    counts = np.asarray(correct_counts, np.float64)
    _check_k(k, n)
    if counts.ndim != 1 or not np.all((counts >= 0) & (counts <= n) & (counts == np.floor(counts))):
        raise ValueError(f"correct_counts must be whole numbers from 0 to n = {n}, one a question; got {counts}")
    chances: Array = hypergeom.sf(0, n, counts, k)
    return chances


def maj_at_k(answers: Sequence[Sequence[str | None]], correct: npt.ArrayLike, k: int) -> Array:
    """The probability that the most frequent answer of k samples is correct, (Q,).

    Samples without an answer do not vote; without any vote the result is 0. Tied answers count by their mean. An
    answer whose samples are graded differently counts by the share graded correct. For k < n this is the mean over the
    n // k blocks of k consecutive samples.

    answers: n keys a question, None for no answer; correct: (Q, n). Raises ValueError if the shapes differ or k is not
    from 1 to n.
    """
    grades = _shares(correct, _GRADES)
    if [len(keys) for keys in answers] != [grades.shape[1]] * len(grades):
        raise ValueError(f"answers must be {grades.shape[1]} keys for each of {len(grades)} questions, as correct is")
    _check_k(k, grades.shape[1])
    starts = range(0, grades.shape[1] - k + 1, k)
    return np.array(
        [
            np.mean([_majority(keys[start : start + k], row[start : start + k]) for start in starts])
            for keys, row in zip(answers, grades, strict=True)
        ]
    )


def _majority(keys: Sequence[str | None], correct: Array) -> float:
    votes = Counter(key for key in keys if key is not None)
    most = max(votes.values(), default=0)
    # All tied answers have the same number of samples: the mean over answers is the mean over their samples.
    winners = [grade for key, grade in zip(keys, correct, strict=True) if key is not None and votes[key] == most]
    return float(np.mean(winners)) if winners else 0.0


def interval(per_question: npt.ArrayLike, rng: np.random.Generator, resamples: int = RESAMPLES) -> Estimate:
    """The mean and its interval. per_question: (Q,), from 0 to 1. Raises ValueError if they are not, or Q = 0."""
    return intervals(np.asarray(per_question)[None], rng, resamples)[0]


def intervals(per_question: npt.ArrayLike, rng: np.random.Generator, resamples: int = RESAMPLES) -> list[Estimate]:
    """The same for several metrics of the same questions, (M, Q), resampled together. Raises as `interval`."""
    return _bootstrap([_shares(per_question)], [1.0], rng, resamples)


def mean_over(
    benchmarks: Sequence[npt.ArrayLike], rng: np.random.Generator, resamples: int = RESAMPLES, micro: bool = False
) -> Estimate:
    """The mean over benchmarks; questions are resampled within each benchmark, because its size is fixed.

    benchmarks: (Q_b,) each; micro: the mean over all questions instead of the mean of the benchmarks' means. Raises as
    `interval`, and ValueError without a benchmark.
    """
    strata = [_shares(np.asarray(values)[None]) for values in benchmarks]
    weights, sizes = _equal_weights(len(strata)), [values.shape[1] for values in strata]
    return _bootstrap(strata, [size / sum(sizes) for size in sizes] if micro else weights, rng, resamples)[0]


def _bootstrap(
    strata: Sequence[Array], weights: Sequence[float], rng: np.random.Generator, resamples: int
) -> list[Estimate]:
    """The weighted mean of the strata's means, for each of M metrics. strata: (M, Q_s) each."""
    means = np.zeros((len(strata[0]), resamples))
    for weight, stratum in zip(weights, strata, strict=True):
        # Questions with equal values are interchangeable, so one multinomial count is drawn for each distinct column.
        columns, counts = np.unique(stratum, axis=1, return_counts=True)  # (M, U), (U,)
        for rows in _chunks(resamples, len(counts)):
            drawn = rng.multinomial(counts.sum(), counts / counts.sum(), rows.stop - rows.start)
            means[:, rows] += weight * (columns @ drawn.T / counts.sum())
    return [_bca([stratum[m] for stratum in strata], weights, row) for m, row in enumerate(means)]


def _bca(strata: Sequence[Array], weights: Sequence[float], means: Array) -> Estimate:
    """One metric: its values (Q_s,) in each stratum, and the resampled means (resamples,)."""
    from scipy.special import ndtr, stdtrit  # 40 MB that a run without validation does not need

    value = sum(w * float(values.mean()) for w, values in zip(weights, strata, strict=True))
    variance = inflated = third = noise = 0.0  # of the mean; `noise`: of its variance, given the mean
    for weight, values in zip(weights, strata, strict=True):
        if _constant(values):
            continue
        size, centred = len(values), values - values.mean()
        second, skewed, fourth = (float((centred**power).mean()) for power in (2, 3, 4))
        variance += weight**2 * second / size
        inflated += weight**2 * second / (size - 1)
        third += weight**3 * skewed / size**2
        noise += weight**4 * (fourth - second**2 - skewed**2 / second) / size**3
    low = high = value
    if variance > 0:
        freedom = 2 * variance**2 / max(noise, 1e-9 * variance**2)
        reach = stdtrit(freedom, (1 + LEVEL) / 2) * (inflated / variance) ** 0.5
        acceleration = third / (6 * variance**1.5)
        shifted = acceleration + np.array([-reach, reach])
        low, high = _quantile(means, ndtr(acceleration + shifted / (1 - acceleration * shifted)))
    return _with_constants(value, low, high, strata, weights)


def _with_constants(
    value: float, low: float, high: float, strata: Sequence[Array], weights: Sequence[float]
) -> Estimate:
    """Add the exact bounds of strata whose questions all have one value, by adding squares of half widths.

    With probability 97.5 %, at most a share u of all questions has other values, where (1 − u)^Q = 0.025. Those values
    lie between 0 and 1.
    """
    below, above = max(value - float(low), 0.0) ** 2, max(float(high) - value, 0.0) ** 2
    for weight, values in zip(weights, strata, strict=True):
        if _constant(values):
            unseen = 1 - ((1 - LEVEL) / 2) ** (1 / len(values))
            below += (weight * unseen * float(values[0])) ** 2
            above += (weight * unseen * (1 - float(values[0]))) ** 2
    return Estimate(value, max(value - below**0.5, 0.0), min(value + above**0.5, 1.0))


def _quantile(sample: Array, shares: Array) -> Array:
    """Quantiles, interpolated between the midpoints of the steps of the sample's distribution function."""
    values, counts = np.unique(np.round(sample, _DIGITS), return_counts=True)
    return np.interp(shares, (np.cumsum(counts) - counts / 2) / len(sample), values)


def _chunks(resamples: int, width: int) -> Iterator[slice]:
    step = max(1, _AT_ONCE // width)
    return (slice(start, min(start + step, resamples)) for start in range(0, resamples, step))


def _constant(values: Array) -> bool:
    return float(np.ptp(values)) < 1e-12


def _equal_weights(count: int) -> list[float]:
    if not count:
        raise ValueError("a mean over benchmarks needs at least one")
    return [1 / count] * count


def _shares(values: npt.ArrayLike, shape: str = "(metrics, questions)") -> Array:
    """A checked table of shares in that shape."""
    array = np.asarray(values, np.float64)
    if array.ndim != 2 or not array.size:
        raise ValueError(f"expected at least one value a question, in the shape {shape}; got the shape {array.shape}")
    if not np.all((array >= -1e-9) & (array <= 1 + 1e-9)):
        raise ValueError(f"values must be shares from 0 to 1; got {array[~((array >= 0) & (array <= 1))][:3]}")
    return array


def _check_k(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k must be from 1 to the number of samples, n = {n}; got {k}")
