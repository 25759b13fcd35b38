"""Metrics of graded samples, computed for each question, shape (Q,): pass@k, maj@k."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..show.bootstrap import Array


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

    answers: n keys a question, None for no answer; correct: (Q, n), bool or shares. Raises ValueError if the shapes
    differ or k is not from 1 to n.
    """
    grades = np.asarray(correct, np.float64)
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


def _check_k(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k must be from 1 to the number of samples, n = {n}; got {k}")
