"""Group-relative advantages."""

import math
import statistics

import numpy as np
import pytest
import torch

from exgrpo_orlhf.objective import GroupAdvantages


def advantages(rewards, gradable=None, **settings) -> list[list[float]]:
    rewards = np.array(rewards, float)
    gradable = np.ones(rewards.shape, bool) if gradable is None else np.array(gradable)
    return GroupAdvantages(**settings)(rewards, gradable).tolist()


@pytest.mark.parametrize("scale_by_std", [False, True])
def test_an_advantage_is_the_reward_minus_its_own_groups_mean_and_divided_by_the_samples_std_where_asked(scale_by_std):
    rewards = np.random.default_rng(0).uniform(-1, 1, (5, 6)).tolist()
    stds = [statistics.stdev(group) + 1e-6 if scale_by_std else 1 for group in rewards]
    plain = [[(r - sum(group) / 6) / std for r in group] for group, std in zip(rewards, stds, strict=True)]
    assert np.allclose(advantages(rewards, scale_by_std=scale_by_std), plain, rtol=1e-12, atol=1e-15)


def test_the_std_may_be_that_of_all_gradable_rewards_of_the_batch():
    rewards = np.random.default_rng(1).uniform(-1, 1, (5, 6))
    gradable = np.random.default_rng(2).random((5, 6)) < 0.8
    std = statistics.stdev(rewards[gradable].tolist())
    plain = np.array(advantages(rewards, gradable))
    assert np.allclose(advantages(rewards, gradable, scale_by_std=True, std_over="batch"), plain / (std + 1e-6))
    assert advantages([[0.1, 0.1], [1.0, 1.0]], scale_by_std=True, std_over="batch") == [[0, 0], [0, 0]]
    assert advantages([[1.0, 0.0]], [[True, False]], scale_by_std=True, std_over="batch") == [[0, 0]]
    with pytest.raises(ValueError, match="std_over = 'batch' needs"):
        GroupAdvantages(std_over="batch")


def test_the_baseline_may_be_the_mean_of_the_others():
    rewards, gradable = [[1.0, 0.0, 0.5, 0.25, 9.0], [0.1] * 5], [[True] * 4 + [False], [True] * 5]
    expected = [1 - 0.25, 0 - 1.75 / 3, 0.5 - 1.25 / 3, 0.25 - 0.5, 0]
    rows = advantages(rewards, gradable, baseline="leave_one_out")
    assert rows[0] == pytest.approx(expected, rel=1e-14)
    assert rows[1] == [0.0] * 5


@pytest.mark.parametrize("scale_by_std", [False, True])
def test_an_ungradable_row_gets_nothing_and_is_out_of_the_mean_and_the_std(scale_by_std):
    rewards = [[1.0, 0.0, math.nan, 0.5], [9.0, 0.0, 1.0, 0.0]]
    gradable = [[True, True, False, True], [False, True, True, True]]
    rows = advantages(rewards, gradable, scale_by_std=scale_by_std)
    for row, present in zip(rows, ([0, 1, 3], [1, 2, 3]), strict=True):
        rest = rewards[rows.index(row)]
        (expected,) = advantages([[rest[i] for i in present]], scale_by_std=scale_by_std)
        assert [row[i] for i in present] == pytest.approx(expected)
        assert sum(row) == pytest.approx(0)
    assert rows[0][2] == rows[1][0] == 0


@pytest.mark.parametrize("scale_by_std", [False, True])
def test_a_group_without_a_signal_gets_exactly_zero(scale_by_std):
    """Not a rounding error: an advantage of 0 is what takes a row out of the update. Rewards that differ by rounding
    are equal, and fewer than two of them say nothing."""
    equal = [[reward] * size for reward in (0.0, 1.0, -1.0, 0.1, 0.3) for size in range(2, 20)]
    for rewards in (*equal, [1.0, 1.0, float(np.float32(0.99999994)), 1.0], [3e5, 3e5 + 0.1, 3e5]):
        assert advantages([rewards], scale_by_std=scale_by_std) == [[0.0] * len(rewards)]
    for gradable in ([True, False, False], [False, False, False]):
        assert advantages([[1.0, 0.0, 0.5]], [gradable], scale_by_std=scale_by_std) == [[0.0] * 3]
    assert all(one != 0 for one in advantages([[1.0, 1.0 - 1e-5]], scale_by_std=scale_by_std)[0])


def test_tensors_and_arrays_give_the_same_in_float64():
    rewards, ok = np.random.default_rng(3).uniform(size=(2, 4)), np.array([[True] * 4, [True, False, True, True]])
    from_arrays = GroupAdvantages()(rewards, ok)
    from_tensors = GroupAdvantages()(torch.tensor(rewards), torch.tensor(ok))
    assert from_arrays.dtype == torch.float64
    assert torch.equal(from_arrays, from_tensors)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"must both be \(groups, K\)"):
        GroupAdvantages()(np.zeros((2, 3)), np.ones((2, 4), bool))
    with pytest.raises(ValueError, match=r"must both be \(groups, K\)"):
        GroupAdvantages()(np.zeros(3), np.ones(3, bool))
