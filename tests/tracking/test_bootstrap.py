"""Intervals of means over questions: against closed forms and against simulated models.

A simulated model is one whose true score is known: each question's chance of a correct sample is drawn from a Beta
distribution, then its k samples are. Simulations are seeded; each says how often it repeats, and so how exact it is.
"""

import itertools
import math
import time

import numpy as np
import pytest

from exgrpo_orlhf.tracking.at_k import pass_at_k
from exgrpo_orlhf.tracking.bootstrap import Estimate, interval, intervals, mean_over

REPEATS = 1000  # a coverage of 95 % is measured with a standard error of 0.7 %
RESAMPLES = 500


def seeded(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def clustered(rng, questions: int, k: int, mean: float = 0.4, spread: float = 1.5) -> np.ndarray:
    """Graded samples of a model whose true score is `mean`, (questions, k)."""
    chance = rng.beta(mean * spread, (1 - mean) * spread, questions)
    return rng.random((questions, k)) < chance[:, None]


def coverage(draw, truth: float, repeats: int = REPEATS) -> float:
    """How often the interval that draw(rng) gives holds the truth."""
    rng = seeded()
    estimates = [draw(rng) for _ in range(repeats)]
    return sum(estimate.low <= truth <= estimate.high for estimate in estimates) / repeats


@pytest.mark.parametrize(
    ("questions", "k", "mean"),
    [*itertools.product((30, 100, 500), (1, 8), (0.4,)), (30, 8, 0.1), (20, 32, 0.5), (100, 1, 0.9)],
)
def test_intervals_cover_the_true_score(questions, k, mean):
    """Also one near an end, and one of few questions."""
    share = coverage(lambda rng: interval(clustered(rng, questions, k, mean).mean(axis=1), rng, RESAMPLES), mean)
    assert 0.93 <= share <= 0.97


@pytest.mark.slow
def test_intervals_of_pass_at_k_and_of_a_macro_mean_cover():
    """The macro mean: 30 questions of 8 samples, 20 of 32 and 100 of 1, with different scores."""
    truth = float(pass_at_k(clustered(seeded(7), 400_000, 8).sum(axis=1), 8, 4).mean())  # ± 0.0007
    passed = lambda rng: interval(pass_at_k(clustered(rng, 100, 8).sum(axis=1), 8, 4), rng, RESAMPLES)
    assert 0.93 <= coverage(passed, truth) <= 0.97
    sets = [(30, 8, 0.2), (20, 32, 0.5), (100, 1, 0.8)]
    macro = lambda rng: mean_over([clustered(rng, *one).mean(axis=1) for one in sets], rng, RESAMPLES)
    assert 0.93 <= coverage(macro, 0.5) <= 0.97


def test_macro_and_micro_means_by_hand_and_the_mean_over_one_benchmark_is_its_interval():
    benchmarks = [[0, 1], [1, 1, 1, 0.5, 1, 0]]
    assert mean_over(benchmarks, seeded()).value == pytest.approx((1 / 2 + 3 / 4) / 2)
    assert mean_over(benchmarks, seeded(), micro=True).value == pytest.approx(5.5 / 8)
    values = clustered(seeded(3), 50, 8).mean(axis=1)
    alone = interval(values, seeded())
    assert mean_over([values], seeded()) == alone == mean_over([values], seeded(), micro=True)


def test_equal_values_get_the_exact_bound_and_widen_a_mean():
    """P(no success in 20 | p) = 0.025 at p = 1 − 0.025^(1/20): Clopper and Pearson's upper bound."""
    bound = 1 - 0.025 ** (1 / 20)
    assert interval([0] * 20, seeded()) == Estimate(0, 0, pytest.approx(bound))
    assert interval([1] * 20, seeded()) == Estimate(1, pytest.approx(1 - bound), 1)
    assert interval([1], seeded()) == Estimate(1, pytest.approx(0.025), 1)
    half = interval([0.5] * 20, seeded())
    assert (half.low, half.high) == (pytest.approx(0.5 - bound / 2), pytest.approx(0.5 + bound / 2))
    solved = clustered(seeded(1), 500, 1).mean(axis=1)
    alone, both = interval(solved, seeded()), mean_over([solved, [0] * 20], seeded())
    assert both.high - both.value == pytest.approx(math.hypot((alone.high - alone.value) / 2, bound / 2), rel=0.02)
    assert both.value - both.low == pytest.approx((alone.value - alone.low) / 2, rel=0.02)


def test_metrics_of_the_same_questions_are_resampled_together():
    counts = clustered(seeded(2), 100, 8).sum(axis=1)
    metrics = [pass_at_k(counts, 8, k) for k in (1, 2, 8)]
    first, turned, *others = intervals([metrics[0], 1 - metrics[0], *metrics[1:]], seeded())
    assert turned.low == pytest.approx(1 - first.high, abs=1e-3)
    for single, together in zip(metrics, [first, *others], strict=True):
        alone = interval(single, seeded(5))
        assert together.value == pytest.approx(single.mean())
        assert (alone.low, alone.high) == pytest.approx((together.low, together.high), abs=0.005)


def test_a_seed_fixes_the_interval_whatever_the_order_of_questions_and_the_portions_of_resamples(monkeypatch):
    values = seeded().random(300)
    first = interval(values, seeded(1))
    assert interval(values[::-1], seeded(1)) == first != interval(values, seeded(2))
    monkeypatch.setattr("exgrpo_orlhf.tracking.bootstrap._AT_ONCE", 70_000)
    assert interval(values, seeded(1)) == first


def test_the_largest_set_does_not_take_minutes():
    """12,032 questions (MMLU-Pro), 8 samples, pass@1 to pass@8: 0.04 s on one core, 52 s by scipy.stats.bootstrap."""
    counts = clustered(seeded(), 12_032, 8).sum(axis=1)
    started = time.perf_counter()
    intervals([pass_at_k(counts, 8, k) for k in (1, 2, 4, 8)], seeded())
    assert time.perf_counter() - started < 20


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: interval([], seeded()), "at least one value a question"),
        (lambda: interval([0.5, float("nan")], seeded()), "shares from 0 to 1; got .*nan"),
        (lambda: interval([0, 31], seeded()), "shares from 0 to 1; got .*31"),
        (lambda: mean_over([], seeded()), "at least one"),
    ],
)
def test_what_makes_no_sense_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
