"""Groups of K, or of fewer around a stored trajectory, and what is collected of them."""

import itertools

import numpy as np
import pytest
from replay_builders import (
    QUESTIONS,
    REWARDS,
    K,
    assemble,
    choices,
    filled,
    group,
    ids_of,
    mixer,
    rollout,
    source,
    trajectory,
)

from exgrpo_orlhf.grader.grade import Grade
from exgrpo_orlhf.objective import GroupAdvantages
from exgrpo_orlhf.records import Rollout, RolloutGroup, Trajectory
from exgrpo_orlhf.replay.injection import Beside, InPlace
from exgrpo_orlhf.replay.store_rule import OneSuccess, Successes


def test_a_replayed_group_ends_with_its_stored_row_bit_for_bit():
    stored = Trajectory(np.array([3, 1, 4], np.int32), np.array([-1e-30, -0.1, -7.7], np.float32), 1.0, 2)
    ids, logprobs = stored.token_ids.tobytes(), stored.behaviour_logprobs.tobytes()
    batch = assemble([group(["wrong"] * 3, QUESTIONS[1], replayed=True)], {QUESTIONS[1].id: stored})
    *fresh, last = batch.flat_rows()
    assert last.trajectory is stored
    assert (last.token_ids.tobytes(), last.trajectory.behaviour_logprobs.tobytes()) == (ids, logprobs)
    assert [row.trajectory for row in fresh] == [None] * 3
    assert last.advantage == 0.75
    assert [row.advantage for row in fresh] == [-0.25] * 3


@pytest.mark.parametrize(
    ("n", "replayed", "beside", "message"),
    [
        *((n, False, None, f"{n} rollouts.* do not make a group of K = 4") for n in (3, 5)),
        *((n, True, None, f"{n} rollouts.* do not make a group of K = 4") for n in (4, 2)),
        *((n, True, 2, f"{n} rollouts and a stored one do not .* K = 4 with 2 beside a stored one") for n in (1, 3)),
    ],
)
def test_groups_of_another_size_are_refused(n, replayed, beside, message):
    """T9: a replayed question comes with K−1 fresh rollouts; K would be compute thrown away."""
    with pytest.raises(ValueError, match=f"question {QUESTIONS[0].id}: {message}"):
        assemble([group(["wrong"] * n, replayed=replayed)], {QUESTIONS[0].id: trajectory()}, injection=Beside(beside))


def test_groups_that_are_ungraded_or_without_their_trajectory_are_refused():
    ungraded = RolloutGroup(QUESTIONS[0], tuple(Rollout(np.array([1], np.int32), "stop") for _ in range(4)), False)
    with pytest.raises(ValueError, match="not been graded"):
        assemble([ungraded])
    with pytest.raises(KeyError, match=QUESTIONS[0].id):
        assemble([group(["wrong"] * 3, replayed=True)])


# -- fewer fresh rollouts beside a stored one --------------------------------------------------------------------------


@pytest.mark.parametrize("beside", [1, 2, 3, None])
def test_advantages_are_over_the_stored_row_and_the_few_or_k_minus_one_beside_it(beside):
    """Every outcome of the few: A = r − mean over the beside + 1 rows, nothing of the places up to K. T17: the stored
    row is never graded again and keeps its reward, whatever became of the others."""
    n = beside or K - 1
    for verdicts in itertools.product(("correct", "wrong", "timeout"), repeat=n):
        groups = [group(["correct", "wrong", "wrong", "wrong"], QUESTIONS[1]), group(verdicts, replayed=True)]
        batch = assemble(groups, {QUESTIONS[0].id: trajectory([8, 8], reward=0.6)}, injection=Beside(beside))
        fresh, replayed = batch.rows
        assert [row.advantage for row in fresh] == [0.75, -0.25, -0.25, -0.25]
        assert (len(replayed), batch.group_size) == (n + 1, K)
        assert [row.trajectory is not None for row in replayed] == [False] * n + [True]
        rewards = [*(REWARDS[verdict] for verdict in verdicts), 0.6]
        numbers = [r for r in rewards if r is not None]
        mean = sum(numbers) / len(numbers)
        assert [r.advantage for r in replayed] == pytest.approx([0 if r is None else r - mean for r in rewards])
        assert [row.in_loss for row in replayed] == [r is not None for r in rewards]


def test_fewer_rollouts_change_no_draw_and_each_rollout_keeps_its_own_logprobs():
    short, default, buffer = mixer(8, injection=Beside(1)), mixer(8), filled(20)
    plans = [m.plan(source(), buffer, 1) for m in (short, default)]
    assert ids_of(plans[0]) == ids_of(plans[1])
    assert [plan.rollout_counts(K) for plan in plans] == [[K] * 4 + [1] * 4, [K] * 4 + [K - 1] * 4]
    groups = [group(["correct"], q, replayed=True) for q in plans[0].replayed] + [group(["correct"] * K, QUESTIONS[39])]
    completed = short.complete(groups, choices({q.id: trajectory() for q in plans[0].replayed}))
    batch = short.assemble(completed, GroupAdvantages())
    logprobs = [np.full(2, -i, np.float32) for i in range(len(batch.flat_rows()))]
    collected = short.collect(batch, logprobs, 1)
    assert [question_id for question_id, _ in collected] == [g.question.id for g in groups for _ in g.rollouts]
    assert [int(-t.behaviour_logprobs[0]) for _, t in collected] == [0, 2, 4, 6, 8, 9, 10, 11]


# -- instead of the worst of K -----------------------------------------------------------------------------------------


def test_the_stored_success_takes_the_place_of_the_worst_row_and_of_equal_ones_of_the_last():
    """Every outcome of K rollouts: the group keeps its size and order; one without a grade is the worst."""
    for verdicts in itertools.product(("correct", "wrong", "timeout"), repeat=K):
        batch = assemble([group(verdicts, replayed=True)], {QUESTIONS[0].id: trajectory([8, 8])}, injection=InPlace())
        worst = next(kind for kind in ("timeout", "wrong", "correct") if kind in verdicts)
        place = K - 1 - verdicts[::-1].index(worst)
        rows = batch.flat_rows()
        assert [row.token_ids.tolist() for row in rows] == [[8, 8] if i == place else [i + 1, 9] for i in range(K)]
        assert [i for i, row in enumerate(rows) if row.trajectory is not None] == [place]
        rewards = [1.0 if i == place else REWARDS[verdict] for i, verdict in enumerate(verdicts)]
        numbers = [r for r in rewards if r is not None]
        mean = sum(numbers) / len(numbers)
        expected = [0 if r is None or len(numbers) < 2 else r - mean for r in rewards]
        assert [row.advantage for row in rows] == pytest.approx(expected)
        assert [row.in_loss for row in rows] == [r is not None for r in rewards]
        assert batch.groups[0].correct == verdicts.count("correct"), "its accuracy is that of all K"


def test_the_lowest_of_rewards_in_between_gives_way():
    rewards = (0.5, 0.2, 0.2, 0.9)
    rollouts = tuple(Rollout(np.array([i], np.int32), "stop", Grade("wrong", r)) for i, r in enumerate(rewards))
    one = RolloutGroup(QUESTIONS[0], rollouts, True)
    batch = assemble([one], {QUESTIONS[0].id: trajectory([8])}, injection=InPlace())
    assert [int(row.token_ids[0]) for row in batch.flat_rows()] == [0, 1, 8, 3]


def test_a_success_that_gave_way_is_not_stored_and_the_others_keep_their_own_logprobs():
    groups = [group(["correct"] * K, QUESTIONS[0], replayed=True), group(["correct"] * K, QUESTIONS[1])]
    batch = assemble(groups, {QUESTIONS[0].id: trajectory([8, 8])}, injection=InPlace())
    logprobs = [np.full(2, -i, np.float32) for i in range(2 * K)]
    collected = mixer(injection=InPlace()).collect(batch, logprobs, 1)
    assert [int(-t.behaviour_logprobs[0]) for _, t in collected] == [0, 1, 2, 4, 5, 6, 7]


# -- collecting -------------------------------------------------------------------------------------------------------


def test_only_correct_finished_fresh_rollouts_are_collected_with_their_logprobs_bit_for_bit():
    rollouts = (
        rollout("correct", (1, 2, 3), sound=False),
        rollout("wrong", (4, 5)),
        rollout("correct", (6,), finish="length"),
        rollout("correct", (7, 8)),
    )
    groups = [
        group(["wrong", "correct", "timeout"], QUESTIONS[1], replayed=True),
        RolloutGroup(QUESTIONS[0], rollouts, planned_replay=False),
    ]
    batch = assemble(groups, {QUESTIONS[1].id: trajectory([9, 9, 9, 9])})
    draw = np.random.default_rng(0)
    logprobs = [-draw.exponential(size=len(row.token_ids)).astype(np.float32) for row in batch.flat_rows()]
    logprobs[4][0] = np.float32(-1e-42)  # a denormal survives too
    collected = mixer().collect(batch, logprobs, 12)
    assert [(question_id, t.token_ids.tolist()) for question_id, t in collected] == [
        (QUESTIONS[1].id, [2, 9]),
        (QUESTIONS[0].id, [1, 2, 3]),
        (QUESTIONS[0].id, [7, 8]),
    ]
    measured = [logprobs[1], logprobs[4], logprobs[7]]
    for (_, kept), behaviour in zip(collected, measured, strict=True):
        assert kept.behaviour_logprobs.tobytes() == behaviour.tobytes()
        assert (kept.step, kept.reward, kept.finish) == (12, 1.0, "stop")
    assert [kept.sound for _, kept in collected] == [None, False, None]


def test_the_bound_looks_at_the_graded_fresh_rollouts_alone():
    """Not at the stored row, nor at those without a grade; a success that was cut off is one."""
    cut = rollout("correct", (3,), finish="length")
    groups = [
        group(["correct", "wrong", "wrong"], QUESTIONS[0], replayed=True),
        group(["correct", "correct", "timeout"], QUESTIONS[1], replayed=True),
        RolloutGroup(QUESTIONS[2], (cut, *group(["correct", "wrong", "timeout"]).rollouts), False),
    ]
    batch = assemble(groups, {QUESTIONS[i].id: trajectory([9, 9]) for i in (0, 1)})
    logprobs = [np.zeros(len(row.token_ids), np.float32) for row in batch.flat_rows()]
    for rule, ids in (
        (OneSuccess(), [0]),
        (Successes(1 / 3), [0]),
        (Successes(0.34), [0]),
        (Successes(0.33), []),
        (Successes(2 / 3), [0, 2]),
        (Successes(1.0), [0, 1, 1, 2]),
    ):
        collected = mixer(store_rule=rule).collect(batch, logprobs, 1)
        assert [question_id for question_id, _ in collected] == [QUESTIONS[i].id for i in ids], rule


def test_a_group_without_an_accuracy_gives_no_experience():
    """Its question may have no record yet, so the buffer could not take it."""
    batch = assemble([group(["correct", "timeout", "error", "error"])])
    assert mixer().collect(batch, [np.zeros(2, np.float32)] * 4, 1) == []
