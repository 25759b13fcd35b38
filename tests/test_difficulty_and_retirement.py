"""Accuracy → difficulty level, and when a question retires."""

from fractions import Fraction

import pytest

from exgrpo_orlhf.replay import DifficultyBuckets, RetirementPolicy
from exgrpo_orlhf.replay.difficulty import LEVELS, as_fraction


def test_levels_of_eight_rollouts():
    levels = [DifficultyBuckets().level(Fraction(k, 8)) for k in range(9)]
    assert levels == ["unsolved", "hard", "hard", "medium", "medium", "medium", "medium", "easy", "solved"]


def test_levels_of_seven_fresh_rollouts_beside_a_replayed_one():
    levels = [DifficultyBuckets().level(Fraction(k, 7)) for k in range(8)]
    assert levels == ["unsolved", "hard", "medium", "medium", "medium", "medium", "easy", "solved"]


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


@pytest.mark.parametrize(
    "thresholds", [(0.75, 0.25), (0.5, 0.5), (0.0, 0.5), (0.5, 1.0), (-0.1, 0.5), (0.2, 0.5, 0.8), (float("nan"), 0.5)]
)
def test_thresholds_out_of_order_are_refused_with_the_binding_named(thresholds):
    with pytest.raises(ValueError, match=r"DifficultyBuckets\.thresholds .* 0 < low < high < 1"):
        DifficultyBuckets(thresholds)


@pytest.mark.parametrize("accuracy", [Fraction(-1, 8), Fraction(9, 8)])
def test_level_of_no_accuracy_is_an_error(accuracy):
    with pytest.raises(ValueError, match="an accuracy lies in"):
        DifficultyBuckets().level(accuracy)


@pytest.mark.parametrize("decimal", ["0.35", "0.1", "0.7", "0.125", "0.333333", "1"])
def test_as_fraction_is_what_the_decimal_says(decimal):
    assert as_fraction(float(decimal)) == Fraction(decimal)


def test_only_full_marks_retire_by_default():
    policy = RetirementPolicy()
    assert [policy.retires(Fraction(k, 8)) for k in range(9)] == [False] * 8 + [True]
    assert policy.retires(Fraction(7, 7))


def test_reaching_the_bound_retires():
    policy = RetirementPolicy(at_accuracy=0.7)
    assert not policy.retires(Fraction(6, 10))
    assert policy.retires(Fraction(7, 10))
    assert policy.retires(Fraction(8, 10))


def test_retirement_can_be_off():
    assert not any(RetirementPolicy(at_accuracy=None).retires(Fraction(k, 8)) for k in range(9))


def test_retired_questions_stay_in_fresh_sampling_by_default():
    """T21: the paper takes them out of the buffer only."""
    assert not RetirementPolicy().leaves_fresh
    assert RetirementPolicy(leaves_fresh=True).leaves_fresh


@pytest.mark.parametrize("at_accuracy", [0, -0.5, 1.01, float("nan")])
def test_an_accuracy_nobody_can_retire_at_is_refused(at_accuracy):
    with pytest.raises(ValueError, match=r"RetirementPolicy\.at_accuracy must lie in \(0, 1\]"):
        RetirementPolicy(at_accuracy=at_accuracy)


def test_leaving_fresh_sampling_without_retirement_is_refused():
    with pytest.raises(ValueError, match=r"RetirementPolicy\.leaves_fresh .* needs retirement"):
        RetirementPolicy(at_accuracy=None, leaves_fresh=True)
