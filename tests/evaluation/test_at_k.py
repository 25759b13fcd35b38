"""pass@k and maj@k of questions, against closed forms and enumeration."""

import itertools
import math

import numpy as np
import pytest

from exgrpo_orlhf.evaluation.at_k import maj_at_k, pass_at_k


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
    assert maj_at_k([keys], [correct], k).tolist() == pytest.approx([expected])


def test_majority_of_fewer_is_unbiased():
    """3 answers with chances 0.45, 0.35, 0.2: P(majority of 3 right) by enumeration; 20,000 questions of 9 samples."""
    chances = [0.45, 0.35, 0.2]
    truth = 0.0
    for triple in itertools.product(range(3), repeat=3):
        most = max(map(triple.count, triple))
        winners = {answer for answer in triple if triple.count(answer) == most}
        truth += math.prod(chances[answer] for answer in triple) * (0 in winners) / len(winners)
    drawn = np.random.default_rng(0).choice(3, (20_000, 9), p=chances)
    shares = maj_at_k([[str(key) for key in row] for row in drawn], drawn == 0, 3)
    assert abs(shares.mean() - truth) < 3 * shares.std() / math.sqrt(len(shares))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pass_at_k([1], 4, 5), "k must be from 1 to the number of samples, n = 4; got 5"),
        (lambda: pass_at_k([1], 4, 0), "got 0"),
        (lambda: pass_at_k([5], 4, 2), "whole numbers from 0 to n = 4"),
        (lambda: pass_at_k([0.5], 4, 2), "whole numbers"),
        (lambda: maj_at_k([["1", "2"]], [[1, 0]], 3), "n = 2; got 3"),
        (lambda: maj_at_k([["1"]], [[1, 0]], 1), "2 keys for each of 1 questions"),
    ],
)
def test_what_makes_no_sense_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
