"""Rewards between 0 and 1 (paper, section 5.3): difficulty by the spread of a group's rewards, and what is stored."""

from __future__ import annotations

import statistics
from fractions import Fraction

import numpy as np
import pytest
from replay_builders import QUESTIONS, assemble, finish_step, mixer, trajectory

from exgrpo_orlhf.grader.grade import Grade
from exgrpo_orlhf.records import Rollout, RolloutGroup
from exgrpo_orlhf.replay import DifficultyBuckets, ReplayBuffer, RetirementPolicy
from exgrpo_orlhf.replay.difficulty import spread_levels, spread_of
from exgrpo_orlhf.replay.injection import LateInjection
from exgrpo_orlhf.replay.snapshot import load, load_for_new_run, save
from exgrpo_orlhf.replay.store_rule import AboveMean, AllFinished, Successes
from exgrpo_orlhf.testbed.modular_chains import ModularChains, grade_steps, right_reasoning

HALF = Fraction(1, 2)


def graded(rewards, question=QUESTIONS[0], finish="stop", success_at=1.0, replayed=False) -> RolloutGroup:
    """A group of these rewards; None: could not be graded."""
    verdicts = ["error" if one is None else "correct" if one >= success_at else "wrong" for one in rewards]
    rollouts = [
        Rollout(np.array([i + 1, 9], np.int32), finish, Grade(verdict, reward))
        for i, (verdict, reward) in enumerate(zip(verdicts, rewards, strict=True))
    ]
    return RolloutGroup(question, tuple(rollouts), replayed)


def by_spread(**settings) -> ReplayBuffer:
    return ReplayBuffer(RetirementPolicy(), difficulty="reward_spread", **settings)


def observed(buffer: ReplayBuffer, *groups: RolloutGroup, step=1) -> ReplayBuffer:
    buffer.advance(step)
    buffer.observe(groups, step, 4)
    return buffer


# -- the level --------------------------------------------------------------------------------------------------------


def test_the_level_is_the_standard_deviation_min_max_over_the_batch_in_k_plus_one_levels():
    """Against the formula with Python's own statistics; a level beside a rounding edge may go either way."""
    draw = np.random.default_rng(0)
    groups = [graded(draw.random(8).tolist(), question) for question in QUESTIONS]
    sigma = [statistics.pstdev(rollout.reward for rollout in group.rollouts) for group in groups]
    levels = spread_levels({group.question.id: spread_of(group) for group in groups}, 8)
    for value, level in zip(sigma, levels.values(), strict=True):
        exact = 8 * (value - min(sigma)) / (max(sigma) - min(sigma))
        assert abs(level * 8 - exact) <= 0.5 + 1e-9
    assert {0, 1} < set(levels.values()) <= {Fraction(i, 8) for i in range(9)}


def test_equal_rewards_have_no_level_and_equal_spreads_the_lowest():
    assert spread_levels({"equal": spread_of(graded([0.1, 0.1, 0.1])), "a": 0.2, "b": 0.4}, 4) == {
        **{"equal": None, "a": HALF, "b": Fraction(1)},
    }
    assert spread_levels({"alone": 0.3}, 4) == {"alone": 0}, "a batch of one"
    assert spread_levels({}, 4) == {}


def test_with_rewards_of_0_and_1_the_middle_of_the_accuracies_has_the_widest_spread():
    groups = [graded([1.0] * k + [0.0] * (8 - k), QUESTIONS[k]) for k in range(9)]
    levels = [*spread_levels({group.question.id: spread_of(group) for group in groups}, 8).values()]
    assert levels[0] is levels[8] is None
    assert levels[1:8] == levels[7:0:-1]
    assert sorted(levels[1:5]) == levels[1:5]
    assert levels[4] == 1


# -- what is a candidate, what goes -----------------------------------------------------------------------------------


def test_candidates_lie_at_their_spread_and_equal_rewards_make_none():
    groups = [graded([0.1, 0.9], QUESTIONS[0]), graded([0.4, 0.6], QUESTIONS[1]), graded([0.5, 0.5], QUESTIONS[2])]
    groups.append(graded([0.5, None], QUESTIONS[3]))  # too few could be graded: its question keeps what it had
    for unsolved in (False, True):
        buffer = observed(by_spread(replays_unsolved=unsolved), *groups)
        assert QUESTIONS[3].id not in buffer.records
        buffer.store((question.id, trajectory([1], reward=0.8)) for question in QUESTIONS[:3])
        expected = {Fraction(1): [QUESTIONS[0].id], Fraction(1, 4): [QUESTIONS[1].id]}
        expected |= {Fraction(0): [QUESTIONS[2].id]} if unsolved else {}
        assert {level: [*ids] for level, ids in buffer.candidates.items()} == expected
        metrics = buffer.metrics(DifficultyBuckets())
        assert metrics["replay/spread_mean"] == pytest.approx((0.4 + 0.1 + 0) / 3)
        assert metrics["replay/bucket_unsolved"] == 3, "buckets are by accuracy, and no reward is a success"
    observed(buffer, graded([0.2, 0.2], QUESTIONS[0]), graded([0.1, 0.3], QUESTIONS[2]), step=2)
    assert buffer.records[QUESTIONS[0].id].spread is None
    assert QUESTIONS[2].id in buffer.candidates[Fraction(1)]


def test_a_trajectory_goes_that_is_not_above_the_mean_of_the_newest_group():
    buffer = observed(by_spread(), graded([0.1, 0.5]))
    id_ = QUESTIONS[0].id
    buffer.store((id_, trajectory([i], reward=reward)) for i, reward in enumerate((0.6, 0.9, 0.7), 1))
    observed(buffer, graded([0.7, 0.7, 0.7]), step=2)
    assert [one.reward for one in buffer.trajectories(id_)] == [0.9], "one that is equal goes, exactly"
    assert buffer.changes.evicted == [id_, id_]
    assert not buffer.candidates, "equal rewards"
    observed(buffer, graded([0.9, 1.0]), step=3)
    assert not buffer.candidates
    assert buffer.n_trajectories == 0
    assert buffer.metrics(DifficultyBuckets())["replay/evicted"] == 1


def test_retirement_follows_the_accuracy():
    buffer = observed(by_spread(), graded([0.8, 1.0], QUESTIONS[0], success_at=0.7), graded([0.1, 0.3], QUESTIONS[1]))
    assert [*buffer.retired] == [QUESTIONS[0].id]


# -- what is stored ---------------------------------------------------------------------------------------------------


def test_what_is_above_its_groups_mean_is_stored_or_what_is_a_success():
    groups = [graded([0.1, 0.4, 0.6, 0.8], QUESTIONS[0]), graded([0.5] * 4, QUESTIONS[1])]
    groups.append(graded([0.9, 0.2, 0.2, None], QUESTIONS[2], success_at=0.9))
    groups.append(graded([1.0, 0.0] * 2, QUESTIONS[3], "length"))
    finished = [*((0, r) for r in (0.1, 0.4, 0.6, 0.8)), *[(1, 0.5)] * 4, (2, 0.9), (2, 0.2), (2, 0.2)]
    kept = {AboveMean(): [(0, 0.6), (0, 0.8), (2, 0.9)], Successes(): [(2, 0.9)], AllFinished(): finished}
    for rule, expected in kept.items():
        batch = assemble(groups)
        logprobs = [np.zeros(2, np.float32)] * 16
        experience = mixer(store_rule=rule).collect(batch, logprobs, 1)
        ids = [question.id for question in QUESTIONS]
        assert [(ids.index(question_id), stored.reward) for question_id, stored in experience] == expected


def test_late_injection_acts_on_equal_rewards_below_a_stored_one():
    buffer, late = by_spread(), mixer(rho=0, injection=LateInjection())
    observed(buffer, *(graded([0.1, 0.3], question) for question in QUESTIONS[:3]))
    buffer.store((question.id, trajectory([1], reward=0.5)) for question in QUESTIONS[:3])
    groups = [graded([0.2] * 4, QUESTIONS[0]), graded([0.6] * 4, QUESTIONS[1]), graded([0.0, 0.1], QUESTIONS[2])]
    assert [*late.late_stored(groups, buffer)] == [QUESTIONS[0]]


# -- on disk, and in a run --------------------------------------------------------------------------------------------


def test_a_snapshot_brings_the_levels_and_their_order_back(tmp_path):
    buffer, draw = by_spread(), np.random.default_rng(1)
    observed(buffer, *(graded(draw.random(4).round(1).tolist(), question) for question in QUESTIONS))
    observed(buffer, graded([0.3] * 4, QUESTIONS[5]), step=2)
    buffer.store((question.id, trajectory([1], reward=1.0)) for question in QUESTIONS)
    save(buffer, tmp_path / "replay", "f")
    loaded = load(tmp_path / "replay", by_spread(), "f")
    assert {k: [*v] for k, v in loaded.candidates.items()} == {k: [*v] for k, v in buffer.candidates.items()}
    assert all(loaded.records[id_].spread == record.spread for id_, record in buffer.records.items())
    ids = {question.id for question in QUESTIONS}
    assert load_for_new_run(tmp_path / "replay", by_spread(), "f", ids).candidates.keys() == buffer.candidates.keys()


def test_experience_of_a_run_by_accuracy_is_a_candidate_where_some_were_right_and_some_wrong(tmp_path):
    buffer = ReplayBuffer(RetirementPolicy())
    for question, accuracy in zip(QUESTIONS, (0, HALF), strict=False):
        buffer.record(question.id, Fraction(accuracy), 0)
        buffer.store([(question.id, trajectory([1]))])
    save(buffer, tmp_path / "replay", "f")
    loaded = load_for_new_run(tmp_path / "replay", by_spread(), "f", {question.id for question in QUESTIONS})
    assert {level: [*ids] for level, ids in loaded.candidates.items()} == {HALF: [QUESTIONS[1].id]}


def test_the_share_of_right_steps_and_the_success_are_two_things():
    question = next(q for q in ModularChains(operands=(3,)).load() if q.prompt.count("*") == 0)
    first, second, answer = right_reasoning(question.prompt).split(";")
    assert grade_steps(question, f"{first};{second};{answer}") == Grade("correct", 1.0, True, answer[1:])
    lucky = grade_steps(question, f"0+0=9;{second};{answer}")
    assert (lucky.correct, lucky.sound, lucky.reward) == (True, False, pytest.approx(2 / 3))
    wrong = grade_steps(question, f"{first};{second};#x")
    assert (wrong.verdict, wrong.reward) == ("wrong", pytest.approx(2 / 3))
    assert grade_steps(question, f"{first};{second};{answer};{answer}").reward == 3 / 4, "a step too many"
    assert grade_steps(question, "").reward == 0


def test_with_rewards_of_0_and_1_storage_is_that_of_successes():
    """A success is above the mean of its group unless all succeed: then its question retires."""
    kept = []
    for rule in (Successes(), AboveMean()):
        buffer, mixing = ReplayBuffer(RetirementPolicy()), mixer(store_rule=rule)
        rewards = np.random.default_rng(2).integers(0, 2, (len(QUESTIONS), 4)).astype(float)
        finish_step(mixing, buffer, [graded(r.tolist(), q) for r, q in zip(rewards, QUESTIONS, strict=True)], {}, 1)
        kept.append([(id_, [t.key for t in buffer.trajectories(id_)]) for id_ in buffer.records])
    assert kept[0] == kept[1]
