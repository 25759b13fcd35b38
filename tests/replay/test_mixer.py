"""ρ, the delayed start, and which questions a step has."""

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from replay_builders import QUESTIONS, filled, finish_step, group, ids_of, mixer, source, train

from exgrpo_orlhf.questions.fresh import FreshQuestions
from exgrpo_orlhf.records import RolloutGroup
from exgrpo_orlhf.replay import QuestionSampler, ReplayBuffer, RetirementPolicy
from exgrpo_orlhf.replay.injection import LateInjection
from exgrpo_orlhf.replay.share import Reincarnation
from exgrpo_orlhf.replay.stored_rows import StoredRows


def graded(n_correct: int, n: int) -> list[RolloutGroup]:
    """A batch of fresh rollouts of which n_correct of n are right, in groups of ten."""
    verdicts = ["correct"] * n_correct + ["wrong"] * (n - n_correct)
    return [group(verdicts[i : i + 10], QUESTIONS[i // 10]) for i in range(0, n, 10)]


# -- how much is replayed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rho", "b", "replayed"),
    [
        (0, 8, 0),
        (1, 8, 8),
        (0.5, 8, 4),
        (0.5, 7, 3),
        (0.5, 5, 2),
        (0.25, 7, 1),
        (0.3, 10, 3),
        (0.7, 10, 7),
    ],
)
def test_rho_times_b_is_rounded_down_to_whole_questions(rho, b, replayed):
    """Algorithm 1, line 7. 0.3 · 10 and 0.7 · 10 are whole numbers, and below or above them as binary floats."""
    plan = mixer(b, rho=rho).plan(source(), filled(20), 1)
    assert len(plan.replayed) == replayed
    assert len(plan.fresh) == b - replayed


def test_mu_above_k_successes_is_refused():
    with pytest.raises(ValueError, match=r"QuestionSampler\.mu must lie in \[0, K\] = \[0, 4\]"):
        mixer(sampler=QuestionSampler(mu=4.5, unit="successes"))


# -- the end of replay ------------------------------------------------------------------------------------------------


def test_a_reincarnation_ends_what_is_planned_injected_and_stored_behind_its_step():
    late = mixer(rho=0.0, injection=LateInjection(), reincarnation=Reincarnation(after_step=2))
    failed, buffer = [group(["wrong"] * 4, QUESTIONS[1])], filled(20)
    begins = []
    for step in (1, 2, 3, 4):
        begins.append(late.share.begin(step))
        assert late.collecting == bool(late.late_stored(failed, buffer)) == (step <= 2)
    assert begins == [False, False, True, False]
    planned = mixer(8, rho=0.5, reincarnation=Reincarnation(after_step=2))
    assert [len(planned.plan(source(), filled(20), step).replayed) for step in (1, 2, 3)] == [4, 4, 0]


def test_a_reincarnation_by_its_rule_comes_after_the_first_batch_above_the_accuracy_and_is_in_the_state():
    replay = mixer(rho=0.5, reincarnation=Reincarnation(at_accuracy=0.5))
    for step, right in ((1, 5), (2, 6), (3, 9)):
        assert not replay.share.begin(step) or step == 3
        replay.share.observe(graded(right, 10), step)
    assert replay.share.last_step == 2, "exactly one half is not above it, and the first one counts"
    again = mixer(rho=0.5, reincarnation=Reincarnation(at_accuracy=0.5))
    again.load_state_dict(json.loads(json.dumps(replay.state_dict())))
    assert [again.share.begin(step) for step in (2, 3, 4)] == [False, True, False]
    assert again.share.at(2) > again.share.at(3) == 0
    with pytest.raises(KeyError, match="last_step"):
        again.load_state_dict(mixer(rho=0.5).state_dict())
    for message, settings in (
        (r"ReplayMixer\.reincarnation ends a replay, and with ReplayMixer\.rho = 0",
         {"rho": 0.0, "reincarnation": Reincarnation(after_step=2)}),
        (r"at_accuracy = 0\.3 ends replay before it starts, at ReplayMixer\.start_at_accuracy = 0\.3",
         {"start_at_accuracy": 0.3, "reincarnation": Reincarnation(at_accuracy=0.3)}),
        (r"StoredRows\.first_step = 6 lies behind Reincarnation\.after_step = 5",
         {"rho": 0.0, "injection": StoredRows(first_step=6), "reincarnation": Reincarnation(after_step=5)}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            mixer(**settings).check(filled(20))


# -- ρ on a schedule --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "replayed"),
    [
        ({"rho": 0.0, "rho_end": 1.0, "rho_steps": 4}, [0, 2, 4, 6, 8, 8, 8]),
        ({"rho": 1.0, "rho_end": 0.25, "rho_steps": 3}, [8, 6, 4, 2, 2, 2, 2]),
        ({"rho": 0.25, "rho_end": 0.75, "rho_steps": 1}, [2, 6, 6, 6, 6, 6, 6]),
        ({"rho": 0.3, "rho_end": 0.7, "rho_steps": 8}, [2, 2, 3, 3, 4, 4, 4]),  # 2.4 2.8 3.2 3.6 4 4.4 4.8
        ({"rho": 0.5}, [4] * 7),
    ],
)
def test_rho_goes_linearly_to_its_end_and_stays_there(schedule, replayed):
    scheduled, buffer = mixer(8, **schedule), filled(20)
    assert [len(scheduled.plan(source(), buffer, step).replayed) for step in range(1, 8)] == replayed


def test_replay_and_its_schedule_begin_in_the_step_after_the_start_and_never_stop_again():
    delayed, buffer = mixer(8, rho=0.25, rho_end=1.0, rho_steps=3, start_at_accuracy=0.35), filled(20)
    for step in range(1, 5):
        assert delayed.plan(source(), buffer, step).replayed == []
    delayed.share.observe(graded(9, 10), 4)
    delayed.share.observe(graded(0, 10), 5)
    assert delayed.share.started_at == 4
    assert [len(delayed.plan(source(), buffer, step).replayed) for step in range(5, 10)] == [2, 4, 6, 8, 8]


def test_experience_is_collected_from_the_start_where_rho_rises_from_zero():
    assert mixer(rho=0.0, rho_end=0.5, rho_steps=10).collecting
    assert mixer(rho=0.5, rho_end=0.0, rho_steps=10).collecting
    assert not mixer(rho=0.0, rho_end=0.0, rho_steps=10).collecting
    assert not mixer(rho=0.0).collecting


def test_replay_off_draws_only_fresh_questions_and_no_random_number():
    off = mixer(8, rho=0)
    before = off.rng.bit_generator.state
    plan = off.plan(source(), filled(20), 1)
    assert (plan.replayed, plan.stored) == ([], {})
    assert off.rng.bit_generator.state == before


def test_a_stored_question_that_is_not_in_the_question_set_stops():
    with pytest.raises(KeyError):
        mixer(8, rho=1.0).plan(source(3), filled(8), 1)


# -- the delayed start ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("percent", range(1, 100))
def test_replay_starts_strictly_above_the_bound_compared_as_an_exact_fraction(percent):
    delayed = mixer(start_at_accuracy=percent / 100)
    delayed.share.observe(graded(percent, 100), 1)
    assert not delayed.share.started
    delayed.share.observe(graded(percent + 1, 100), 2)
    assert delayed.share.started_at == 2


def test_ungradable_rollouts_do_not_count_towards_the_start():
    delayed = mixer(start_at_accuracy=0.35)
    delayed.share.observe([group(["timeout", "error"])], 1)
    assert not delayed.share.started
    delayed.share.observe([group(["correct", "wrong", "timeout", "timeout", "error", "error"])], 2)
    assert delayed.share.started_at == 2


def test_nothing_is_collected_or_retires_before_the_batch_that_triggers_the_start():
    delayed = mixer(start_at_accuracy=0.7)
    buffer = ReplayBuffer(RetirementPolicy())
    low = [group(["correct", "wrong", "wrong", "wrong"], QUESTIONS[0]), group(["correct"] * 4, QUESTIONS[1])]
    assert finish_step(delayed, buffer, low, {}, 1) == 0
    assert (buffer.records, buffer.retired) == ({}, {})
    high = [group(["correct", "correct", "correct", "wrong"], QUESTIONS[2])]
    assert finish_step(delayed, buffer, high, {}, 2) == 3
    assert QUESTIONS[2].id in buffer.records


# -- many steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.25, 0.5, 1.0])
def test_no_question_is_twice_in_any_batch_and_none_is_lost(rho):
    """T8: over many epochs each question is drawn fresh at most once per epoch, and none to be thrown away. One that
    was replayed instead waits, and waits once, however many epochs that takes."""
    fresh, buffer, drawn = source(), ReplayBuffer(RetirementPolicy()), Counter()
    replays, seen = 0, set()
    for plan in train(mixer(8, rho=rho), fresh, buffer, 80):
        new, replayed = ids_of(plan)
        assert len({*new, *replayed}) == len(new) + len(replayed) == 8
        drawn.update(new)
        seen.update(new, replayed)
        replays += len(replayed)
    assert replays > 40
    assert seen == {q.id for q in QUESTIONS}
    waiting = Counter(QUESTIONS[position].id for position in fresh.state_dict()["queue"])
    assert all(drawn[q.id] + waiting[q.id] <= fresh.epoch + 1 for q in QUESTIONS)
    assert max(waiting.values(), default=0) <= 1
    assert fresh.drawn == drawn.total()


def test_an_engine_that_needs_whole_batches_gets_them_from_retired_questions():
    """T14, where the optimiser step has a fixed number of rows: retired questions return, and none comes twice."""
    buffer = ReplayBuffer(RetirementPolicy(leaves_fresh=True))
    for question in QUESTIONS[:9]:
        buffer.record(question.id, Fraction(1), 0)
        buffer.retire(question.id, 0)
    for fills_batch, size in ((False, 3), (True, 8)):
        fresh = source(12)
        for step in range(5):
            drawn = ids_of(mixer(8).plan(fresh, buffer, step, fills_batch))[0]
            assert len(set(drawn)) == len(drawn) == size


def test_questions_that_fill_a_batch_up_do_not_bring_an_epoch_of_retired_ones():
    """6 of 100 are active, and a batch has 8."""
    questions = [replace(QUESTIONS[0], id=f"q{i:03}") for i in range(100)]
    buffer = ReplayBuffer(RetirementPolicy(leaves_fresh=True))
    for question in questions[6:]:
        buffer.record(question.id, Fraction(1), 0)
        buffer.retire(question.id, 0)
    fresh, active = FreshQuestions(questions, np.random.default_rng(0)), []
    for step in range(1, 21):
        drawn = ids_of(mixer(8).plan(fresh, buffer, step, fills_batch=True))[0]
        assert len({*drawn}) == 8
        active.append(sum(name < "q006" for name in drawn))
    assert active == [6] * 20


def test_a_retired_question_leaves_fresh_sampling_only_where_asked():
    """T21: the paper takes them out of the buffer only."""
    for leaves_fresh, policy in ((False, RetirementPolicy()), (True, RetirementPolicy(leaves_fresh=True))):
        buffer = ReplayBuffer(policy)
        buffer.record(QUESTIONS[0].id, Fraction(1), 0)
        buffer.retire(QUESTIONS[0].id, 0)
        fresh, seen = source(8), set()
        for step in range(4):
            seen.update(ids_of(mixer(4).plan(fresh, buffer, step))[0])
        assert (QUESTIONS[0].id in seen) is not leaves_fresh


def test_a_restored_mixer_continues_the_same_draws_and_its_schedule():
    """T7: the generator and the start are part of the state, which survives a file."""
    settings = {"start_at_accuracy": 0.1, "rho": 0.0, "rho_end": 1.0, "rho_steps": 16}
    straight_mixer, straight_source, straight = mixer(**settings), source(), ReplayBuffer(RetirementPolicy())
    before = [ids_of(plan) for plan in train(straight_mixer, straight_source, straight, 10)]
    assert any(replayed for _, replayed in before)
    first_mixer, first_source, buffer = mixer(**settings), source(), ReplayBuffer(RetirementPolicy())
    for _ in train(first_mixer, first_source, buffer, 10):
        pass
    states = json.loads(json.dumps([first_mixer.state_dict(), first_source.state_dict()]))
    resumed_mixer, resumed_source = mixer(seed=77, **settings), source(seed=78)
    assert not resumed_mixer.share.started
    resumed_mixer.load_state_dict(states[0])
    resumed_source.load_state_dict(states[1])
    assert resumed_mixer.share.started_at == straight_mixer.share.started_at == 1
    ahead, again = (
        [ids_of(plan) for plan in train(*parts, 10, seed=9, first=11)]
        for parts in ((straight_mixer, straight_source, straight), (resumed_mixer, resumed_source, buffer))
    )
    assert ahead == again
    assert [len(replayed) for _, replayed in ahead] == [(step - 2) // 2 for step in range(11, 19)] + [8, 8]
    assert resumed_mixer.state_dict() == straight_mixer.state_dict()


def test_a_mixers_state_with_missing_or_unknown_entries_is_refused():
    state = mixer().state_dict()
    for wrong in ({"rng": state["rng"]}, {"started_at": 1}, {**state, "rho": 0.5}, {}):
        with pytest.raises(KeyError):
            mixer().load_state_dict(wrong)
