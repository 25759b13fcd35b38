"""Accuracy → difficulty level, and when a question retires."""

from collections import Counter
from fractions import Fraction

import numpy as np
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


# -- levels at the buffer's quantiles ---------------------------------------------------------------------------------

THIRDS = DifficultyBuckets(quantiles=(0.333, 0.667))


def candidates(sizes: dict[Fraction, int]) -> dict[Fraction, range]:
    return {accuracy: range(size) for accuracy, size in sizes.items()}


def test_fixed_thresholds_do_not_adapt():
    fixed = DifficultyBuckets((0.3, 0.6))
    assert fixed.adapted(candidates({Fraction(9, 10): 5})) is fixed


@pytest.mark.parametrize("quantiles", [(0.333, 0.667), (0.1, 0.5), (0.25, 0.26)])
def test_adaptive_levels_are_those_of_every_candidates_mean_rank(quantiles):
    """Counted one candidate at a time: those of lower accuracy, and half of those of the same."""
    draw = np.random.default_rng(3)
    buckets = DifficultyBuckets(quantiles=quantiles)
    for _ in range(100):
        among = [Fraction(k, n) for n in (7, 8) for k in range(1, n)]
        accuracies = [
            among[i] for i in draw.integers(0, int(draw.integers(1, len(among) + 1)), int(draw.integers(1, 60)))
        ]
        adapted = buckets.adapted(candidates(Counter(accuracies)))
        for accuracy in accuracies:
            lower = sum(other < accuracy for other in accuracies)
            rank = (lower + sum(other == accuracy for other in accuracies) / 2) / len(accuracies)
            expected = "hard" if rank <= quantiles[0] else "medium" if rank <= quantiles[1] else "easy"
            assert adapted.level(accuracy) == expected


def test_unsolved_and_solved_candidates_are_levels_of_their_own_and_do_not_move_the_others():
    few = {Fraction(k, 8): 3 for k in range(1, 7)}
    adapted = THIRDS.adapted(candidates({**few, Fraction(0): 300, Fraction(1): 500}))
    levels = [adapted.level(Fraction(k, 8)) for k in range(9)]
    assert levels == ["unsolved", "hard", "hard", "medium", "medium", "easy", "easy", "easy", "solved"]


def test_adaptive_levels_do_not_depend_on_order_or_history():
    sizes = {Fraction(k, 8): k for k in range(1, 8)}
    adapted = THIRDS.adapted(candidates(sizes))
    again = adapted.adapted(candidates(dict(reversed(sizes.items()))))
    assert (again.low, again.high) == (adapted.low, adapted.high)
    assert adapted.low < adapted.high
    assert THIRDS.adapted({}).level(Fraction(0)) == "unsolved"


@pytest.mark.parametrize("decimal", ["0.35", "0.1", "0.7", "0.125", "0.333333", "1"])
def test_as_fraction_is_what_the_decimal_says(decimal):
    assert as_fraction(float(decimal)) == Fraction(decimal)


@pytest.mark.parametrize(("settings", "mastered"), [({}, [10]), ({"at_accuracy": 0.7}, [7, 8, 9, 10])])
def test_reaching_the_bound_retires_and_by_default_only_full_marks(settings, mastered):
    policy = RetirementPolicy(**settings)
    assert [k for k in range(11) if policy.is_mastered(Fraction(k, 10))] == mastered
    assert not any(RetirementPolicy(at_accuracy=None).is_mastered(Fraction(k, 10)) for k in range(11)), "switched off"
