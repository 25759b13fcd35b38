"""Accuracy → difficulty level, and when a question retires."""

from fractions import Fraction

import pytest

from exgrpo_orlhf.replay import DifficultyBuckets, RetirementPolicy
from exgrpo_orlhf.replay.difficulty import LEVELS, as_fraction


@pytest.mark.parametrize(
    ("n", "medium"), [(8, range(3, 7)), (7, range(2, 6))], ids=["all fresh", "seven fresh beside a replayed one"]
)
def test_levels_of_a_group(n, medium):
    levels = {k: DifficultyBuckets().level(Fraction(k, n)) for k in range(n + 1)}
    assert [k for k, level in levels.items() if level == "medium"] == list(medium)
    assert (levels[0], levels[1], levels[n - 1], levels[n]) == ("unsolved", "hard", "easy", "solved")


def test_both_thresholds_belong_to_the_lower_level():
    buckets = DifficultyBuckets((0.3, 0.7))
    assert buckets.level(Fraction(3, 10)) == "hard"
    assert buckets.level(Fraction(3, 10) + Fraction(1, 10**6)) == "medium"
    assert buckets.level(Fraction(7, 10)) == "medium"
    assert buckets.level(Fraction(7, 10) + Fraction(1, 10**6)) == "easy"


@pytest.mark.parametrize("tenths", range(1, 9))
def test_a_decimal_threshold_is_the_decimal_and_not_the_nearest_float(tenths):
    buckets = DifficultyBuckets((tenths / 10, 0.95))
    assert buckets.level(Fraction(tenths, 10)) == "hard"


def test_levels_never_get_easier_as_accuracy_falls():
    ranks = [LEVELS.index(DifficultyBuckets((0.2, 0.9)).level(Fraction(k, 60))) for k in range(61)]
    assert ranks == sorted(ranks)
    assert set(ranks) == set(range(5))


@pytest.mark.parametrize("decimal", ["0.35", "0.1", "0.7", "0.125", "0.333333", "1"])
def test_as_fraction_is_what_the_decimal_says(decimal):
    assert as_fraction(float(decimal)) == Fraction(decimal)


@pytest.mark.parametrize(("settings", "mastered"), [({}, [10]), ({"at_accuracy": 0.7}, [7, 8, 9, 10])])
def test_reaching_the_bound_retires_and_by_default_only_full_marks(settings, mastered):
    policy = RetirementPolicy(**settings)
    assert [k for k in range(11) if policy.is_mastered(Fraction(k, 10))] == mastered
    assert not any(RetirementPolicy(at_accuracy=None).is_mastered(Fraction(k, 10)) for k in range(11)), "switched off"
