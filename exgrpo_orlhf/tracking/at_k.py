"""Metrics of graded samples, computed for each question, shape (Q,): pass@k, maj@k."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import multimode

import numpy as np
import numpy.typing as npt

from .bootstrap import Array


def pass_at_k(correct_counts: npt.ArrayLike, n: int, k: int) -> Array:
    """The probability that k of a question's n samples, drawn without replacement, include a correct one, (Q,).

    1 − C(n−c, k) / C(n, k). It is unbiased for k new samples.

    correct_counts: c, (Q,), from 0 to n; k: from 1 to n
    """
    from scipy.stats import hypergeom  # 50 MB that training does not need

    chances: Array = hypergeom.sf(0, n, correct_counts, k)
    return chances


def maj_at_k(answers: Sequence[Sequence[str | None]], correct: Array, k: int) -> Array:
    """The probability that the most frequent answer of k samples is correct, (Q,).

    Samples without an answer do not vote; without any vote the result is 0. Tied answers count by their mean. An
    answer whose samples are graded differently counts by the share graded correct. For k < n this is the mean over the
    n // k blocks of k consecutive samples.

    answers: n keys a question, None for no answer; correct: (Q, n), 0 or 1; k: from 1 to n
    """
    return np.array(
        [
            np.mean([_majority(keys[i : i + k], row[i : i + k]) for i in range(0, len(row) - k + 1, k)])
            for keys, row in zip(answers, correct, strict=True)
        ]
    )


def _majority(keys: Sequence[str | None], correct: Array) -> float:
    most = multimode(key for key in keys if key is not None)
    # All tied answers have the same number of samples: the mean over answers is the mean over their samples.
    winners = [grade for key, grade in zip(keys, correct, strict=True) if key in most]
    return float(np.mean(winners)) if winners else 0.0
