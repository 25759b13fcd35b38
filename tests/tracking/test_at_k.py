"""pass@k and maj@k of questions, against closed forms and enumeration."""

import itertools
import math

import numpy as np
import pytest

from exgrpo_orlhf.tracking.at_k import maj_at_k, pass_at_k


@pytest.mark.parametrize("n", [1, 2, 4, 5, 8])
def test_pass_at_k_equals_enumeration_of_all_subsets(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k([c], n, k)[0] == pytest.approx(sum(map(any, subsets)) / len(subsets)), (c, k)
    exact = 1 - math.comb(4096 - 3, 1024) / math.comb(4096, 1024)  # of integers: exact for many samples
    assert pass_at_k([3], 4096, 1024)[0] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(
    ("keys", "correct", "k", "expected"),
    [
        (["7", "7", "8"], [1, 1, 0], 3, 1),
        (["7", "8", "8"], [1, 0, 0], 3, 0),
        ([None, None, "8"], [0, 0, 1], 3, 1),
        ([None, None, None], [0, 0, 0], 3, 0),
        (["1", "2", "3", None], [0, 1, 0, 0], 4, 1 / 3),  # tied answers count as if one were drawn
        (["1", "2", "2", "1"], [1, 0, 0, 1], 4, 0.5),
        (["1", "1", "1", "2"], [1, 1, 0, 0], 4, 2 / 3),  # an answer graded both ways counts by its share
        (["1", "1", "2", "2", "1"], [1, 1, 0, 0, 1], 2, 0.5),  # the mean over disjoint blocks; the fifth is in none
        (["1", "1", "2", "2", "1"], [1, 1, 0, 0, 1], 1, 3 / 5),
    ],
)
def test_majority_votes_by_answer(keys, correct, k, expected):
    assert maj_at_k([keys], np.array([correct]), k).tolist() == pytest.approx([expected])
