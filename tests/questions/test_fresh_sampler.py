"""Fresh questions drawn by their latest accuracy: weights, rest, and a state that continues exactly."""

from __future__ import annotations

import copy
import json
from collections import Counter

import numpy as np
import pytest
from replay_builders import QUESTIONS, group

from exgrpo_orlhf.questions.fresh import FreshSampler, WeightedQuestions

IDS = [question.id for question in QUESTIONS]


def source(n=40, seed=0, floor=0.05, cooldown=0) -> WeightedQuestions:
    sampler = FreshSampler(by="accuracy", floor=floor, cooldown=cooldown)
    return sampler.over(QUESTIONS[:n], np.random.default_rng(seed))


def of(accuracy: float, i: int):
    """A graded group of question i."""
    right = round(4 * accuracy)
    return group(["correct"] * right + ["wrong"] * (4 - right), QUESTIONS[i])


def draw(fresh, n: int, exclude=(), retired=(), step=1) -> list[str]:
    return [question.id for question in fresh.draw(n, exclude, retired, step)]


def test_questions_come_in_proportion_to_their_weights():
    fresh, floor = source(5, floor=0.05), 0.05
    fresh.observe([of(0, 0), of(0.25, 1), of(0.5, 2), of(1, 3)], 1)  # nothing is known of the fifth: as at 1/2
    weights = np.array([floor, 0.1875 + floor, 0.25 + floor, floor, 0.25 + floor])
    drawn = Counter(draw(fresh, 1)[0] for _ in range(8000))
    shares = [drawn[name] / 8000 for name in IDS[:5]]
    assert shares == pytest.approx(weights / weights.sum(), abs=0.02)  # four standard errors


def test_several_are_drawn_one_after_the_other_without_replacement():
    """The second of a batch, given the first, has the weights of those that are left."""
    fresh = source(3, floor=0.1)
    fresh.observe([of(0.5, 0), of(0, 1), of(0, 2)], 1)  # weights 0.35, 0.1, 0.1
    batches = Counter(tuple(draw(fresh, 2)) for _ in range(8000))
    expected = (0.35 / 0.55) * 0.5  # first the likely one, then one of two that are alike
    assert batches[IDS[0], IDS[1]] / 8000 == pytest.approx(expected, abs=0.025)
    assert all(len(set(batch)) == 2 for batch in batches)


def test_the_latest_accuracy_counts_and_a_group_that_could_not_be_graded_leaves_it():
    fresh = source(2, floor=1e-6)
    fresh.observe([of(0.5, 0), of(0.5, 1)], 1)
    fresh.observe([of(0, 0), group(["timeout"] * 4, QUESTIONS[1])], 2)
    assert {draw(fresh, 1)[0] for _ in range(100)} == {IDS[1]}
    assert fresh.metrics() == {
        "train/epoch": 50.0,
        "train/fresh_drawn": 100.0,
        "train/fresh_known": 1.0,
        "train/fresh_between": 0.5,
    }


def test_excluded_and_retired_questions_do_not_come():
    fresh = source(10)
    for _ in range(50):
        assert set(draw(fresh, 9, exclude=IDS[:2], retired=IDS[2:5])) == set(IDS[5:10])
    assert draw(fresh, 4, exclude=IDS[:10]) == []


def test_a_question_rests_for_as_many_steps_as_said():
    fresh, rest = source(40, cooldown=3), {}
    for step in range(1, 60):
        batch = draw(fresh, 8, step=step)
        assert all(step - rest.get(name, -9) > 3 for name in batch)
        rest |= dict.fromkeys(batch, step)
        fresh.observe([of(0.5, IDS.index(name)) for name in batch], step)
    assert set(rest) == set(IDS), "and comes again"


def test_if_too_few_others_are_left_those_that_have_rested_longest_come():
    fresh = source(6, cooldown=10)
    fresh.observe([of(0.5, 0), of(0.5, 1)], 1)
    fresh.observe([of(0.5, 2), of(0.5, 3)], 2)
    fresh.observe([of(0.5, 0)], 3)  # as a replayed question: it rests again
    assert set(draw(copy.deepcopy(fresh), 2, step=4)) == {IDS[4], IDS[5]}
    assert set(draw(copy.deepcopy(fresh), 3, step=4)) == {IDS[4], IDS[5], IDS[1]}
    assert draw(fresh, 6, step=4)[-1] == IDS[0]


@pytest.mark.parametrize("cooldown", [1, 3])
def test_a_question_rests_too_where_the_next_step_is_drawn_before_this_one_is_observed(cooldown):
    """train.generate_ahead: the batch of step t+1 is drawn in step t."""
    fresh, last = source(cooldown=cooldown), {}
    batch = draw(fresh, 8, step=1)
    for step in range(1, 40):
        assert all(step - last.get(name, -9) > cooldown for name in batch)
        last |= dict.fromkeys(batch, step)
        coming = draw(fresh, 8, step=step + 1)
        fresh.observe([of(0.5, IDS.index(name)) for name in batch], step)
        batch = coming
    assert set(last) == set(IDS)


def steps(fresh, first: int, last: int) -> list[list[str]]:
    batches = []
    for step in range(first, last):
        batches.append(draw(fresh, 6, step=step))
        fresh.observe([of((step + i) % 5 / 4, IDS.index(name)) for i, name in enumerate(batches[-1])], step)
    return batches


@pytest.mark.parametrize("done", [0, 1, 5, 17])
def test_a_restored_state_continues_exactly(done):
    """T7: through a file and whatever the other seed was."""
    straight, interrupted = source(seed=5, cooldown=2), source(seed=5, cooldown=2)
    assert steps(straight, 1, 1 + done) == steps(interrupted, 1, 1 + done)
    resumed = source(seed=99, cooldown=2)
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    assert steps(resumed, 1 + done, 20 + done) == steps(straight, 1 + done, 20 + done)
    assert resumed.state_dict() == straight.state_dict()
    assert resumed.metrics() == straight.metrics()
