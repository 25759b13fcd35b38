"""Question sampling follows the distribution that it states, at a cost that does not depend on what is stored."""

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from exgrpo_orlhf.replay import DifficultyBuckets, QuestionSampler
from exgrpo_orlhf.replay.sampling import IndexedSet

K = 8
UNEVEN = {Fraction(1, 8): 2, Fraction(2, 8): 7, Fraction(3, 7): 4, Fraction(6, 8): 1, Fraction(7, 8): 6}
SMALL = {Fraction(2, 8): 1, Fraction(4, 8): 1, Fraction(5, 8): 1, Fraction(7, 8): 2}


def pool(sizes: dict[Fraction, int], kind=IndexedSet) -> dict[Fraction, IndexedSet]:
    return {accuracy: kind(f"{accuracy}:{i}" for i in range(size)) for accuracy, size in sizes.items()}


def sampler(unit="accuracy", **settings) -> QuestionSampler:
    """Sharp enough that a wrong unit or weighting shows: σ is 1.5 successes, 0.2 in accuracy."""
    scale = {"accuracy": {"mu": 0.5, "sigma": 0.2}, "successes": {"mu": 4, "sigma": 1.5}}[unit]
    return QuestionSampler(**{"unit": unit, **scale, **settings})


def next_draw(settings: QuestionSampler, sizes: dict[Fraction, int], taken: tuple[str, ...]) -> dict[str, float]:
    """P(next question), from the definition: every question listed, every bucket weighed.

    A bucket of several accuracies stands at the mean accuracy of the questions it had when the draw began.
    """
    levels = {"unsolved": 0, "hard": 1, "medium": 2, "easy": 3}
    buckets: dict = {}
    for accuracy, size in sizes.items():
        level = DifficultyBuckets().level(accuracy)
        key = accuracy if settings.partition == "accuracy" else levels[level]
        buckets.setdefault(key, []).extend((f"{accuracy}:{i}", accuracy) for i in range(size))
    chances = {}
    for members in buckets.values():
        x = float(sum(accuracy for _, accuracy in members)) / len(members)
        if settings.unit == "successes":
            x *= K
        density = math.exp(-((x - settings.mu) ** 2) / (2 * settings.sigma**2)) if settings.method == "gaussian" else 1
        left = [question_id for question_id, _ in members if question_id not in taken]
        for question_id in left:
            chances[question_id] = density / (len(left) if settings.weight == "bucket" else 1)
    total = sum(chances.values())
    return {question_id: chance / total for question_id, chance in chances.items()}


def sequence_probabilities(settings, sizes, n) -> dict[tuple[str, ...], float]:
    """P(these n questions in this order), by following every branch."""
    reached = {(): 1.0}
    for _ in range(n):
        reached = {
            (*taken, question_id): chance * p
            for taken, chance in reached.items()
            for question_id, p in next_draw(settings, sizes, taken).items()
        }
    return reached


def assert_follows(observed: Counter, expected: dict, draws: int) -> None:
    """Pearson's χ² against its value exceeded once in 10,000 (Wilson–Hilferty); rare outcomes are pooled."""
    assert set(observed) <= set(expected)
    common = [key for key in expected if expected[key] * draws >= 5]
    cells = [(observed[key], expected[key] * draws) for key in common]
    rest = draws - sum(e for _, e in cells)
    if rest >= 5:
        cells.append((draws - sum(o for o, _ in cells), rest))
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    freedom = len(cells) - 1
    assert freedom >= 2
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound, f"χ² = {statistic:.1f} with {freedom} degrees of freedom"


def draw(settings, candidates, n, rng) -> list[str]:
    return settings.sample(candidates, n, K, DifficultyBuckets(), rng)


# -- the distribution -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"mu": 4, "sigma": 1, "unit": "successes"}, [0.004, 0.054, 0.242, 0.399, 0.242, 0.054, 0.004]),
        ({"mu": 0.5, "sigma": 1, "unit": "accuracy"}, [0.137, 0.143, 0.146, 0.147, 0.146, 0.143, 0.137]),
    ],
    ids=["successes, as in the official code", "accuracy, as in the paper"],
)
def test_sigma_one_is_sharp_in_success_counts_and_nearly_flat_in_accuracy(settings, weights):
    """T2."""
    densities = np.exp([QuestionSampler(**settings).log_density(Fraction(k, K), K) for k in range(1, K)])
    assert [round(float(weight), 3) for weight in densities / densities.sum()] == weights


def test_a_replayed_groups_accuracy_is_scaled_to_successes_of_k():
    """k of n = K−1 stands at x = K·k/n."""
    settings = QuestionSampler(mu=4, sigma=1, unit="successes")
    for k in range(1, 8):
        assert settings.log_density(Fraction(k, 7), K) == pytest.approx(-0.5 * (8 * k / 7 - 4) ** 2)


CHOICES = [
    {"unit": unit, "weight": weight, "partition": partition}
    for unit, weight, partition in itertools.product(
        ("accuracy", "successes"), ("bucket", "question"), ("accuracy", "level")
    )
] + [
    {"method": "uniform", "weight": weight, "partition": partition}
    for weight, partition in itertools.product(("bucket", "question"), ("accuracy", "level"))
]
names = [" ".join(choice.values()) for choice in CHOICES]


@pytest.mark.parametrize("choice", CHOICES, ids=names)
def test_one_draw_follows_the_stated_distribution(choice):
    """T3: the weight is per bucket or per question, as said."""
    settings, candidates, rng, draws = sampler(**choice), pool(UNEVEN), np.random.default_rng(1), 6_000
    observed = Counter(draw(settings, candidates, 1, rng)[0] for _ in range(draws))
    assert_follows(observed, next_draw(settings, UNEVEN, ()), draws)


@pytest.mark.parametrize("choice", CHOICES, ids=names)
def test_draws_without_replacement_follow_the_stated_distribution(choice):
    settings, candidates, rng, draws = sampler(**choice), pool(SMALL), np.random.default_rng(2), 3_000
    observed = Counter(tuple(draw(settings, candidates, 3, rng)) for _ in range(draws))
    expected = sequence_probabilities(settings, SMALL, 3)
    assert len(expected) == 60
    assert sum(expected.values()) == pytest.approx(1)
    assert_follows(observed, expected, draws)


@pytest.mark.slow
def test_the_statistical_test_rejects_every_other_distribution():
    """Each choice is told from all others by the same test with the same number of draws."""
    for i, choice in enumerate(CHOICES[:4]):
        settings, candidates, rng = sampler(**choice), pool(UNEVEN), np.random.default_rng(3)
        observed = Counter(draw(settings, candidates, 1, rng)[0] for _ in range(6_000))
        for j, other in enumerate(CHOICES[:4]):
            if i != j:
                with pytest.raises(AssertionError, match="χ²"):
                    assert_follows(observed, next_draw(sampler(**other), UNEVEN, ()), 6_000)


@pytest.mark.parametrize("weight", ["bucket", "question"])
@pytest.mark.parametrize("partition", ["accuracy", "level"])
def test_questions_are_distinct_all_of_them_come_and_the_candidates_stay(weight, partition):
    settings, candidates = sampler(weight=weight, partition=partition), pool(UNEVEN)
    rng = np.random.default_rng(4)
    everyone = sorted(member for members in candidates.values() for member in members)
    for _ in range(50):
        assert sorted(draw(settings, candidates, 20, rng)) == everyone
        assert len(set(draw(settings, candidates, 12, rng))) == 12
    assert {accuracy: list(members) for accuracy, members in candidates.items()} == {
        accuracy: list(members) for accuracy, members in pool(UNEVEN).items()
    }


def test_a_narrow_gaussian_does_not_underflow():
    """Every weight is far below the smallest float, and yet the questions come nearest to μ first."""
    settings, candidates = QuestionSampler(mu=0.5, sigma=1e-4), pool(UNEVEN)
    for seed in range(20):
        drawn = draw(settings, candidates, 20, np.random.default_rng(seed))
        distances = [abs(Fraction(question_id.split(":")[0]) - Fraction(1, 2)) for question_id in drawn]
        assert distances == sorted(distances)


def test_draws_follow_from_the_generators_state_whatever_the_order_in_which_buckets_came_to_be():
    candidates = pool(UNEVEN)
    backwards = dict(reversed(candidates.items()))
    for partition in ("accuracy", "level"):
        settings = sampler(partition=partition)
        draws = [draw(settings, c, 10, np.random.default_rng(5)) for c in (candidates, backwards)]
        assert draws[0] == draws[1] != draw(settings, candidates, 10, np.random.default_rng(6))


def test_nothing_asked_nothing_drawn():
    assert draw(sampler(), {}, 0, np.random.default_rng(0)) == []
    assert draw(sampler(), pool(SMALL), 0, np.random.default_rng(0)) == []


@pytest.mark.parametrize("candidates", [pool(SMALL), {}])
def test_more_than_there_are_is_an_error(candidates):
    with pytest.raises(ValueError, match="cannot draw 6 distinct questions from"):
        draw(sampler(), candidates, 6, np.random.default_rng(0))


# -- cost -------------------------------------------------------------------------------------------------------------


class WatchedSet(IndexedSet):
    """Counts the positions that are read; reading through all of them is an error."""

    reads = 0

    def __getitem__(self, position):
        WatchedSet.reads += 1
        return super().__getitem__(position)

    def __iter__(self):
        raise AssertionError("sampling went through a whole bucket")

    def __contains__(self, member):
        raise AssertionError("sampling searched a bucket")


@pytest.mark.parametrize("choice", CHOICES, ids=names)
def test_sampling_reads_one_position_per_question_drawn_whatever_is_stored(choice):
    """T15: O(1) per question and bucket; the official code's membership tests on lists were quadratic."""
    reads, states = [], []
    for scale in (1, 500):
        candidates = pool({accuracy: size * scale for accuracy, size in UNEVEN.items()}, WatchedSet)
        WatchedSet.reads = 0
        draw(sampler(**choice), candidates, 15, np.random.default_rng(0))
        reads.append(WatchedSet.reads)
        states.append(sum(map(len, candidates.values())))
    assert states == [20, 10_000]
    assert reads == [15, 15]
