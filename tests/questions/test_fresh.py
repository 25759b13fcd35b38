"""Fresh questions: permutations, epochs, a cursor that continues exactly, and what holds for weighted draws too."""

from __future__ import annotations

import copy
import json
import logging
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from replay_builders import QUESTIONS, group

from exgrpo_orlhf.questions.fresh import FreshQuestions, FreshSampler, WeightedQuestions

IDS = [question.id for question in QUESTIONS]


def source(n: int, seed: int = 0) -> FreshQuestions:
    return FreshQuestions(QUESTIONS[:n], np.random.default_rng(seed))


def weighted(n=40, seed=0, floor=0.05, cooldown=0) -> WeightedQuestions:
    settings = FreshSampler(by="accuracy", floor=floor, cooldown=cooldown)
    return settings.over(QUESTIONS[:n], np.random.default_rng(seed))


of_both = pytest.mark.parametrize("source", [source, weighted])


def draw(fresh: FreshQuestions, n: int, exclude=(), retired=(), step=1) -> list[str]:
    return [question.id for question in fresh.draw(n, exclude, retired, step)]


def epochs(fresh: FreshQuestions, count: int) -> list[list[str]]:
    return [[*draw(fresh, len(fresh) - 3), *draw(fresh, 3)] for _ in range(count)]


def test_each_epoch_is_a_permutation_of_the_set_in_an_order_of_its_own():
    """T7."""
    fresh, ids, orders = source(20), sorted(question.id for question in QUESTIONS[:20]), set()
    for i in range(4):
        (epoch,) = epochs(fresh, 1)
        assert sorted(epoch) == ids
        assert (fresh.epoch, fresh.drawn) == (i, 20 * (i + 1))
        orders.add(tuple(epoch))
    assert len(orders) == 4
    across = source(7)
    assert all(len(set(draw(across, 5))) == 5 for _ in range(20)), "none twice in a batch across epochs"


@of_both
def test_the_order_comes_from_the_seed_alone(source):
    """T7: nothing is drawn from a global generator."""
    np.random.seed(1)  # noqa: NPY002
    first = epochs(source(20, seed=3), 3)
    np.random.seed(2)  # noqa: NPY002
    assert epochs(source(20, seed=3), 3) == first
    assert epochs(source(20, seed=4), 3) != first


def test_an_excluded_question_is_not_lost():
    """T8: it waits at the head of the queue and comes with the next batch."""
    order = draw(source(10), 10)
    fresh = source(10)
    assert draw(fresh, 3, exclude=order[:2]) == order[2:5]
    assert draw(fresh, 4) == [*order[:2], *order[5:7]]
    assert draw(fresh, 3) == order[7:]
    assert (fresh.epoch, fresh.drawn) == (0, 10)


@of_both
def test_fewer_questions_than_asked_give_all_of_them_once(source):
    fresh = source(5)
    ids = {question.id for question in QUESTIONS[:5]}
    for _ in range(4):
        batch = draw(fresh, 8)
        assert len(batch) == 5
        assert set(batch) == ids
    left_out = next(iter(ids))
    assert set(draw(fresh, 8, exclude={left_out})) == ids - {left_out}
    assert fresh.drawn == 4 * 5 + 4


def test_retired_questions_leave_only_from_the_next_epoch():
    """T21: the official code drops them at each epoch."""
    order = draw(source(10), 10)
    fresh, retired = source(10), set(order[5:8])
    first = draw(fresh, 4)
    assert [*first, *draw(fresh, 6, retired=retired)] == order
    for _ in range(3):
        assert set(draw(fresh, 7, retired=retired)) == set(order) - retired


@of_both
def test_all_retired_return_with_a_warning(source, caplog):
    """T14: the run does not end silently."""
    fresh, ids = source(6), {question.id for question in QUESTIONS[:6]}
    with caplog.at_level(logging.WARNING):
        assert set(draw(fresh, 6)) == ids
        assert not caplog.records
        assert set(draw(fresh, 6, retired=ids)) == ids
    (record,) = caplog.records
    assert "all 6 questions are retired" in record.getMessage()
    assert "RetirementPolicy.leaves_fresh" in record.getMessage()


def test_a_saved_state_does_not_change_with_later_draws_nor_by_drawing_nothing():
    fresh = source(10)
    draw(fresh, 3)
    state = fresh.state_dict()
    before = json.dumps(state)
    assert draw(fresh, 0) == []
    assert fresh.state_dict() == state
    draw(fresh, 12)
    assert json.dumps(state) == before


@of_both
def test_a_state_of_another_question_set_is_refused(source):
    state = source(10).state_dict()
    with pytest.raises(ValueError, match="another question set"):
        source(11).load_state_dict(state)
    state["fingerprint"] = FreshQuestions(QUESTIONS[9::-1], np.random.default_rng(0)).state_dict()["fingerprint"]
    with pytest.raises(ValueError, match="another question set"):
        source(10).load_state_dict(state)


@pytest.mark.parametrize(("source", "another"), [(source, weighted), (weighted, source)])
def test_a_state_with_missing_or_unknown_entries_or_of_the_other_sampler_is_refused(source, another):
    state = source(10).state_dict()
    others = [{**state, "extra": 1}, *({k: v for k, v in state.items() if k != entry} for entry in state)]
    for other in (*others, another(10).state_dict()):
        with pytest.raises(KeyError):
            source(10).load_state_dict(other)


def test_empty_and_repeating_sets_are_refused():
    with pytest.raises(ValueError, match="empty"):
        FreshQuestions([], np.random.default_rng(0))
    with pytest.raises(ValueError, match="twice"):
        FreshQuestions([*QUESTIONS[:3], QUESTIONS[0]], np.random.default_rng(0))


# -- drawn by their latest accuracy ------------------------------------------------------------------------------------


def of(accuracy: float, i: int):
    """A graded group of question i."""
    right = round(4 * accuracy)
    return group(["correct"] * right + ["wrong"] * (4 - right), QUESTIONS[i])


def test_questions_come_in_proportion_to_their_weights():
    fresh, floor = weighted(5, floor=0.05), 0.05
    fresh.observe([of(0, 0), of(0.25, 1), of(0.5, 2), of(1, 3)], 1)  # nothing is known of the fifth: as at 1/2
    weights = np.array([floor, 0.1875 + floor, 0.25 + floor, floor, 0.25 + floor])
    drawn = Counter(draw(fresh, 1)[0] for _ in range(8000))
    shares = [drawn[name] / 8000 for name in IDS[:5]]
    assert shares == pytest.approx(weights / weights.sum(), abs=0.02)  # four standard errors


def test_several_are_drawn_one_after_the_other_without_replacement():
    """The second of a batch, given the first, has the weights of those that are left."""
    fresh = weighted(3, floor=0.1)
    fresh.observe([of(0.5, 0), of(0, 1), of(0, 2)], 1)  # weights 0.35, 0.1, 0.1
    batches = Counter(tuple(draw(fresh, 2)) for _ in range(8000))
    expected = (0.35 / 0.55) * 0.5  # first the likely one, then one of two that are alike
    assert batches[IDS[0], IDS[1]] / 8000 == pytest.approx(expected, abs=0.025)
    assert all(len(set(batch)) == 2 for batch in batches)


def test_the_latest_accuracy_counts_and_a_group_that_could_not_be_graded_leaves_it():
    fresh = weighted(2, floor=1e-6)
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
    fresh = weighted(10)
    for _ in range(50):
        assert set(draw(fresh, 9, exclude=IDS[:2], retired=IDS[2:5])) == set(IDS[5:10])
    assert draw(fresh, 4, exclude=IDS[:10]) == []


def test_a_group_that_was_given_its_beginning_rests_and_its_accuracy_is_not_the_questions():
    fresh = weighted(6, cooldown=3)
    given = of(1.0, 0)
    given = replace(given, rollouts=tuple(replace(one, given=1) for one in given.rollouts))
    fresh.observe([of(0.5, 0)], 1)
    fresh.observe([given], 2)
    assert fresh.metrics()["train/fresh_between"] == 1 / 6
    assert IDS[0] not in draw(copy.deepcopy(fresh), 5, step=5)
    assert IDS[0] in draw(fresh, 6, step=6)


def test_if_too_few_others_are_left_those_that_have_rested_longest_come():
    fresh = weighted(6, cooldown=10)
    fresh.observe([of(0.5, 0), of(0.5, 1)], 1)
    fresh.observe([of(0.5, 2), of(0.5, 3)], 2)
    fresh.observe([of(0.5, 0)], 3)  # as a replayed question: it rests again
    assert set(draw(copy.deepcopy(fresh), 2, step=4)) == {IDS[4], IDS[5]}
    assert set(draw(copy.deepcopy(fresh), 3, step=4)) == {IDS[4], IDS[5], IDS[1]}
    assert draw(fresh, 6, step=4)[-1] == IDS[0]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("cooldown", [1, 3])
def test_a_question_rests_for_as_many_steps_as_said(cooldown, ahead):
    """ahead: as with train.generate_ahead, the batch of step t+1 is drawn in step t, before that is observed."""
    fresh, last, coming = weighted(cooldown=cooldown), {}, []
    for step in range(1, 60):
        batch = coming or draw(fresh, 8, step=step)
        assert all(step - last.get(name, -9) > cooldown for name in batch)
        last |= dict.fromkeys(batch, step)
        coming = draw(fresh, 8, step=step + 1) if ahead else []
        fresh.observe([of(0.5, IDS.index(name)) for name in batch], step)
    assert set(last) == set(IDS), "and comes again"


def steps(fresh, first: int, last: int) -> list[list[str]]:
    """4 questions a step, of which the second step and every third after it replays two others."""
    batches = []
    for step in range(first, last):
        batches.append(draw(fresh, 4, exclude=IDS[step % 30 :][:2] if step % 3 == 2 else (), step=step))
        fresh.observe([of((step + i) % 5 / 4, IDS.index(name)) for i, name in enumerate(batches[-1])], step)
    return batches


@pytest.mark.parametrize("done", [0, 1, 5, 8, 17])
@pytest.mark.parametrize("source", [partial(source, 32), partial(weighted, cooldown=2)], ids=["epochs", "weighted"])
def test_a_restored_state_continues_exactly(source, done):
    """T7: mid-epoch, on an epoch's border, before the first draw; through a file and whatever the other seed was."""
    straight, interrupted = source(seed=5), source(seed=5)
    assert steps(straight, 1, 1 + done) == steps(interrupted, 1, 1 + done)
    resumed = source(seed=99)
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    assert steps(resumed, 1 + done, 20 + done) == steps(straight, 1 + done, 20 + done)
    assert resumed.state_dict() == straight.state_dict()
    assert resumed.metrics() == straight.metrics()
