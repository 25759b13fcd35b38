"""Dynamic sampling: groups without a gradient make place for new questions, and nothing of them is lost or hidden."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from replay_builders import QUESTIONS as ALL_QUESTIONS
from replay_builders import K, trajectory
from replay_builders import group as graded_group
from run_builders import timeless, train_small

from exgrpo_orlhf.engines.local import TorchEngine
from exgrpo_orlhf.questions.fresh import FreshQuestions
from exgrpo_orlhf.records import Question, RolloutGroup
from exgrpo_orlhf.replay import Plan, ReplayBuffer, RetirementPolicy
from exgrpo_orlhf.replay.plan import DynamicSampling, SelectedBatch

QUESTIONS = ALL_QUESTIONS[:30]
STORED = trajectory((5, 1))


def group(question, correct: int, replayed: bool = False, ungraded: int = 0, n: int | None = None) -> RolloutGroup:
    verdicts = ["correct"] * correct + ["timeout"] * ungraded
    return graded_group(verdicts + ["wrong"] * ((n or K - replayed) - len(verdicts)), question, replayed)


class Rolls:
    """Groups in which so many rollouts are correct, by the question; every plan that was asked for is kept."""

    def __init__(self, correct: dict[str, int], otherwise: int, ungraded: int = 0) -> None:
        self.correct, self.otherwise, self.ungraded = correct, otherwise, ungraded
        self.plans: list[Plan] = []

    def __call__(self, plan: Plan) -> list[RolloutGroup]:
        self.plans.append(plan)
        marked = [(question, False) for question in plan.fresh] + [(question, True) for question in plan.replayed]
        return [group(q, self.correct.get(q.id, self.otherwise), replayed, self.ungraded) for q, replayed in marked]


def in_a_step(dynamic: DynamicSampling, plan: Plan, stored, rolls: Rolls, source, buffer) -> SelectedBatch:
    """As the training loop samples a step."""
    complete = lambda groups: [one.with_stored(stored.get(one.question.id), K) for one in groups]
    groups, rounds = complete(rolls(plan)), 1
    while more := dynamic.replacements(plan, groups, rounds, source, buffer):
        groups, rounds = [*groups, *complete(rolls(more))], rounds + 1
    return dynamic.select(plan, groups, rounds)


def questions_of(sampled: SelectedBatch) -> list[Question]:
    return [one.group.question for one in sampled.groups]


def sample(rolls: Rolls, max_rounds: int, fresh=4, replayed=0, buffer=None, questions=QUESTIONS, **between):
    source = FreshQuestions(questions, np.random.default_rng(3))
    old = questions[:replayed]
    plan = Plan(7, source.draw(fresh, {q.id for q in old}, (), 1), old, {})
    stored = {question.id: STORED for question in old}
    buffer = buffer or ReplayBuffer(RetirementPolicy())
    sampled = in_a_step(DynamicSampling(max_rounds, **between), plan, stored, rolls, source, buffer)
    return plan, sampled


def counted(sampled: SelectedBatch) -> tuple[float, float]:
    metrics = sampled.metrics()
    return metrics["rollout/rounds"], metrics["rollout/filtered_groups"]


def test_off_the_batch_is_what_was_planned():
    plan, sampled = sample(rolls := Rolls({}, otherwise=0), max_rounds=0, fresh=3, replayed=2)
    assert rolls.plans == [plan]
    assert sampled.plan is plan
    assert questions_of(sampled) == [*plan.fresh, *plan.replayed]
    assert "rollout/rounds" not in sampled.metrics()


def test_a_batch_in_which_all_have_a_signal_is_sampled_once():
    _, sampled = sample(rolls := Rolls({}, otherwise=1), max_rounds=5)
    assert len(rolls.plans) == 1
    assert (sampled.rounds, len(sampled.groups)) == (1, 4)


@pytest.mark.parametrize("same", [0, K])
def test_groups_all_wrong_and_all_correct_make_place_for_exactly_as_many_new_questions(same):
    first = FreshQuestions(QUESTIONS, np.random.default_rng(3)).draw(4, (), (), 1)
    plan, sampled = sample(rolls := Rolls({first[1].id: same, first[2].id: same}, otherwise=2), max_rounds=5)
    assert plan.fresh == first
    assert [len(p.fresh) for p in rolls.plans] == [4, 2]
    assert questions_of(sampled) == [first[0], first[3], *rolls.plans[1].fresh]
    assert sampled.plan.fresh == questions_of(sampled)
    assert counted(sampled) == (2.0, 2.0)
    assert {one.group.question.id for one in sampled.all_groups} == {q.id for p in rolls.plans for q in p.fresh}


def test_no_question_is_sampled_twice_in_a_step_also_where_the_epoch_ends():
    _, sampled = sample(rolls := Rolls({}, otherwise=0), max_rounds=50, fresh=6, replayed=2)
    ids = [q.id for p in rolls.plans for q in (*p.fresh, *p.replayed)]
    # The two replayed successes beside wrong rollouts are a signal. All the others are asked, once each, and no more.
    assert len(ids) == len(set(ids)) == len(QUESTIONS)
    assert len(sampled.groups) == 8


def test_the_stored_row_of_a_replayed_group_counts():
    """Wrong rollouts beside a stored success have a signal, correct ones have none, and a fresh question takes over."""
    _, wrong = sample(Rolls({}, otherwise=0), max_rounds=0, fresh=0, replayed=3)
    old = questions_of(wrong)
    correct = Rolls({old[0].id: K - 1, old[1].id: 0, old[2].id: 0}, otherwise=2)
    _, sampled = sample(correct, max_rounds=2, fresh=0, replayed=3)
    assert sampled.plan.replayed == old[1:]
    assert len(sampled.plan.fresh) == 1
    assert [one.group.planned_replay for one in sampled.groups] == [True, True, False]
    assert not correct.plans[1].replayed


@pytest.mark.parametrize(("correct", "signal"), [(0, True), (1, True), (K - 1, False), (K, False)])
def test_of_a_whole_group_what_counts_is_what_is_trained_on_after_the_stored_success_is_in(correct, signal):
    """It lifts a group that fails altogether, and takes the only failure from one that has no other."""
    old = QUESTIONS[0]
    plan, dynamic = Plan(7, [], [old], {}), DynamicSampling(1)
    groups = [group(old, correct, replayed=True, n=K).with_stored(STORED, K)]
    source, buffer = FreshQuestions(QUESTIONS, np.random.default_rng(3)), ReplayBuffer(RetirementPolicy())
    more = dynamic.replacements(plan, groups, 1, source, buffer)
    assert (more is None) == signal
    replaced = [*groups, *(group(question, 2).with_stored(None, K) for question in (more.fresh if more else ()))]
    sampled = dynamic.select(plan, replaced, 2)
    assert (sampled.plan.replayed == [old]) == signal


def test_rows_that_could_not_be_graded_are_no_signal():
    _, sampled = sample(rolls := Rolls({}, otherwise=K - 2, ungraded=2), max_rounds=1)
    assert len(rolls.plans) == 2, "two correct rollouts and two without a reward have no gradient"
    assert len(sampled.groups) == 4


def test_when_the_rounds_run_out_the_batch_is_filled_up_to_its_size():
    first = FreshQuestions(QUESTIONS, np.random.default_rng(3)).draw(4, (), (), 1)
    _, sampled = sample(rolls := Rolls({first[3].id: 1}, otherwise=0), max_rounds=2)
    assert [p.round for p in rolls.plans] == [0, 1, 2]
    assert questions_of(sampled) == first, "those sampled first, in their order"
    assert counted(sampled) == (3.0, 6.0)


@pytest.mark.parametrize(
    ("between", "kept"),
    [({"max_reward": 0.25}, [1]), ({"min_reward": 0.5, "max_reward": 0.5}, [2]), ({"min_reward": 0.75}, [3])],
)
def test_groups_of_another_difficulty_make_place_and_those_without_a_gradient_fill_up_before_them(between, kept):
    """K = 4. The bounds are inclusive; all correct or all wrong is never kept."""
    first = FreshQuestions(QUESTIONS, np.random.default_rng(3)).draw(5, (), (), 1)
    correct = {question.id: number for number, question in enumerate(first)}  # 0 to 4 of 4
    _, sampled = sample(rolls := Rolls(correct, otherwise=kept[0]), max_rounds=9, fresh=5, **between)
    assert [len(p.fresh) for p in rolls.plans] == [5, 4]
    assert questions_of(sampled) == [first[kept[0]], *rolls.plans[1].fresh]
    _, sampled = sample(Rolls(correct, otherwise=0), max_rounds=1, fresh=5, **between)
    assert questions_of(sampled)[:3] == [first[i] for i in (0, kept[0], 4)]
    assert len({q.id for q in questions_of(sampled)} & {q.id for q in first}) == 3, "none of another difficulty"


def test_the_stored_row_counts_in_the_difficulty_of_a_replayed_group():
    old, other = QUESTIONS[:2]
    _, sampled = sample(Rolls({old.id: 1, other.id: 0}, otherwise=2), max_rounds=1, fresh=0, replayed=2, min_reward=0.5)
    assert sampled.plan.replayed == [old], "2 of 4 and 1 of 4 with the stored success"


@pytest.mark.parametrize("leaves_fresh", [True, False])
def test_a_retired_question_is_drawn_into_a_place_unless_it_left_fresh_sampling(leaves_fresh):
    """Also where the draw into a place begins the epoch: retired questions are left out when one begins."""
    buffer = ReplayBuffer(RetirementPolicy(leaves_fresh=leaves_fresh))
    for question in QUESTIONS[10:]:
        buffer.record(question.id, 1, 1)
        buffer.retire(question.id, 1)
    drawn_from = QUESTIONS[:10] if leaves_fresh else QUESTIONS
    for fresh in (4, 0):
        source = FreshQuestions(QUESTIONS, np.random.default_rng(0))
        old = QUESTIONS[: 4 - fresh]
        plan = Plan(1, source.draw(fresh, (), buffer.retired if leaves_fresh else (), 1), old, {})
        stored = {question.id: STORED for question in old}
        rolls = Rolls({question.id: K - 1 for question in old}, otherwise=0)
        sampled = in_a_step(DynamicSampling(50), plan, stored, rolls, source, buffer)
        assert {one.group.question.id for one in sampled.all_groups} == {question.id for question in drawn_from}


# -- in a run ---------------------------------------------------------------------------------------------------------


def go(model: Path, run: Path, *more: str) -> list[dict]:
    train_small(model, run, "ModularChains.count = 200", "train.steps = 3", *more)
    return timeless(run)[1:]


@pytest.mark.slow
def test_a_run_trains_on_groups_with_a_signal_alone_and_counts_and_records_all_it_has_sampled(
    warm_model, tmp_path, monkeypatch
):
    rollout, counted = TorchEngine.rollout, []

    def counting(engine, plan, group_size):
        groups = plan.in_order(rollout(engine, plan, group_size))
        counted.append((plan, sum(len(r.token_ids) for g in groups for r in g.rollouts)))
        return groups

    monkeypatch.setattr(TorchEngine, "rollout", counting)
    plain = go(warm_model, tmp_path / "off", "ReplayMixer.rho = 0.5")
    assert any(row["reward/groups_with_signal"] < 1 for row in plain), "there is something to filter"
    assert not any("rollout/rounds" in row for row in plain)
    counted.clear()
    rows = go(warm_model, tmp_path / "on", "ReplayMixer.rho = 0.5", "DynamicSampling.max_rounds = 30")
    assert all(row["reward/groups_with_signal"] == 1 for row in rows)
    assert all(row["train/questions"] == 8 for row in rows)
    assert len(counted) == sum(row["rollout/rounds"] for row in rows) > len(rows)
    assert rows[-1]["cost/generated_tokens"] == sum(tokens for _, tokens in counted)
    ids = [question.id for plan, _ in counted for question in (*plan.fresh, *plan.replayed)]
    assert len(ids) == sum(8 + row["rollout/filtered_groups"] for row in rows)
    for step in (1, 2, 3):
        of_step = [q.id for plan, _ in counted if plan.step == step for q in (*plan.fresh, *plan.replayed)]
        assert len(of_step) == len(set(of_step))
    records = pq.read_table(tmp_path / "on" / "checkpoint-3" / "replay" / "questions.parquet").to_pydict()
    assert set(records["question_id"]) == set(ids), "accuracy or retirement, of the filtered ones too"


def test_an_epoch_that_nobody_can_draw_from_is_not_counted():
    source = FreshQuestions(QUESTIONS, np.random.default_rng(3))
    assert len(source.draw(20, (), (), 1)) == 20
    for _ in range(3):  # the second epoch begins once, and waits whole
        assert source.draw(4, {question.id for question in QUESTIONS}, (), 1) == []
        assert source.epoch == 1
    assert len(source.draw(30, (), (), 1)) == 30
    assert source.epoch == 1
