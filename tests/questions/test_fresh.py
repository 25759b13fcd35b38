"""Fresh questions: permutations, epochs, a cursor that continues exactly, and what holds for weighted draws too."""

import json
import logging

import numpy as np
import pytest
from replay_builders import QUESTIONS

from exgrpo_orlhf.questions.fresh import FreshQuestions, FreshSampler


def source(n: int, seed: int = 0) -> FreshQuestions:
    return FreshQuestions(QUESTIONS[:n], np.random.default_rng(seed))


def weighted(n: int, seed: int = 0) -> FreshQuestions:
    return FreshSampler(by="accuracy").over(QUESTIONS[:n], np.random.default_rng(seed))


of_both = pytest.mark.parametrize("source", [source, weighted])


def draw(fresh: FreshQuestions, n: int, exclude=(), retired=()) -> list[str]:
    return [question.id for question in fresh.draw(n, exclude, retired, 1)]


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


@pytest.mark.parametrize("consumed", [0, 1, 4, 10, 13, 27])
def test_a_restored_cursor_continues_exactly(consumed):
    """T7: mid-epoch, on an epoch boundary, before the first draw; through a file and whatever the other seed was."""
    straight, interrupted = source(10, seed=5), source(10, seed=5)
    for fresh in (straight, interrupted):
        for i in range(consumed):
            draw(fresh, 1, exclude=[QUESTIONS[i % 10].id])
    resumed = source(10, seed=99)
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    assert [draw(resumed, 3) for _ in range(20)] == [draw(straight, 3) for _ in range(20)]
    assert (resumed.epoch, resumed.drawn) == (straight.epoch, straight.drawn)


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


@of_both
def test_a_state_with_missing_or_unknown_entries_is_refused(source):
    state = source(10).state_dict()
    for other in ({**state, "extra": 1}, *({k: v for k, v in state.items() if k != entry} for entry in state)):
        with pytest.raises(KeyError):
            source(10).load_state_dict(other)


def test_a_state_of_the_other_sampler_is_refused():
    with pytest.raises(KeyError):
        weighted(10).load_state_dict(source(10).state_dict())


def test_empty_and_repeating_sets_are_refused():
    with pytest.raises(ValueError, match="empty"):
        FreshQuestions([], np.random.default_rng(0))
    with pytest.raises(ValueError, match="twice"):
        FreshQuestions([*QUESTIONS[:3], QUESTIONS[0]], np.random.default_rng(0))
