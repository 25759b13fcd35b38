"""Late injection: after grading, a group without a success gets a stored one; nothing else of the step changes."""

from __future__ import annotations

import zlib
from fractions import Fraction

import numpy as np
import pytest
from replay_builders import QUESTIONS, choices, filled, group, mixer, source, trajectory
from step_builders import begin, decide_verdicts, watched

from exgrpo_orlhf.objective import MixedPolicyLoss
from exgrpo_orlhf.records import Trajectory
from exgrpo_orlhf.replay import ReplayBuffer, RetirementPolicy
from exgrpo_orlhf.replay.injection import LateInjection, UnlessSolved

LATE = ("ReplayMixer.rho = 0.0", "ReplayMixer.injection = @LateInjection()")
SELECTED = ("ReplayMixer.rho = 0.0", "ReplayMixer.injection = @LateInjection()", "LateInjection.choice = 'selected'")
IN_PLACE = ("ReplayMixer.rho = 1.0", "ReplayMixer.injection = @InPlace()", "ReplayBuffer.replays_unsolved = True")
EVERY_STEP = ("ModularChains.count = 8", "RetirementPolicy.at_accuracy = None")  # a step has all eight questions


@pytest.fixture
def verdict(monkeypatch) -> dict[str, bool]:
    """While `right`, half of all responses are correct, by their text; else none is."""
    say = {"right": True}
    decide_verdicts(monkeypatch, lambda _, text: say["right"] and zlib.crc32(text.encode()) % 2)
    return say


def stored(run) -> dict[str, list]:
    return {id: run.buffer.trajectories(id) for id in run.buffer.records if run.buffer.records[id].stored}


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("option", [LATE, SELECTED, IN_PLACE], ids=["newest", "selected", "in place"])
def test_importance_weights_of_rows_put_into_a_group_use_the_stored_log_probs_bit_identical(
    option, ratio, steps, verdict, warm_model, tmp_path, monkeypatch
):
    """What the loss divides by, token for token, and what the metrics are of."""
    weighed, weigh = [], MixedPolicyLoss.__call__

    def recording(loss, batch):
        weighed.append(batch.behaviour_logprobs[batch.replayed].numpy().copy())
        return weigh(loss, batch)

    update = (f"Optimizer.steps_per_batch = {steps}", f"MixedPolicyLoss.ratio = {ratio!r}")
    run = begin(warm_model, tmp_path, *option, *EVERY_STEP, *update)
    seen = watched(run, monkeypatch)
    run.step()
    kept = {id: {t.key: t.behaviour_logprobs.tobytes() for t in its} for id, its in stored(run).items()}
    verdict["right"] = False
    monkeypatch.setattr(MixedPolicyLoss, "__call__", recording)
    metrics = run.step()
    batch, stats = seen[-1]
    rows = list(zip(batch.flat_rows(), stats.policy_logprobs, stats.behaviour_logprobs, strict=True))
    injected = [(row, policy, behaviour) for row, policy, behaviour in rows if row.trajectory is not None]
    assert len(injected) == len(kept) == metrics.get("replay/injected", 0) + 8 * metrics["replay/actual_share"] > 4
    for row, _, behaviour in injected:
        assert behaviour.tobytes() == kept[row.question.id][row.trajectory.key]
    expected = np.concatenate([behaviour for _, _, behaviour in injected])
    logprobs = np.concatenate(weighed)
    assert sorted(logprobs.view(np.uint32)) == sorted(expected.view(np.uint32))
    log_weights = np.concatenate([policy.astype(np.float64) - behaviour for _, policy, behaviour in injected])
    assert metrics["replay/log_weight_max"] == log_weights.max() != 0


@pytest.mark.slow
def test_until_the_first_injection_a_run_is_the_on_policy_one_and_after_it_in_questions_and_group_sizes(
    warm_model, tmp_path, monkeypatch
):
    """No token more, no update more, no question displaced: only rows change."""
    runs = []
    for name, more in (("on policy", ("ReplayMixer.rho = 0.0",)), ("late", LATE)):
        (tmp_path / name).mkdir()
        run = begin(warm_model, tmp_path / name, *more, "RetirementPolicy.at_accuracy = None")
        seen = watched(run, monkeypatch)
        runs.append([(run.step(), seen[-1][0]) for _ in range(8)])
    assert not any(name.startswith("replay/") for metrics, _ in runs[0] for name in metrics)
    injected = [metrics["replay/injected"] for metrics, _ in runs[1]]
    first = next(i for i, number in enumerate(injected) if number)
    assert 0 < first < 7
    for i, ((plain, plain_batch), (late, late_batch)) in enumerate(zip(*runs, strict=True)):
        assert [g.question for g in plain_batch.groups] == [g.question for g in late_batch.groups]
        assert [len(g.rollouts) for g in late_batch.groups] == [len(rows) for rows in late_batch.rows] == [4] * 8
        assert late["replay/actual_share"] == late["replay/candidates_scored"] == 0
        if i <= first:
            assert late["cost/generated_tokens"] == plain["cost/generated_tokens"]
        if i < first:
            assert late["policy/loss"] == plain["policy/loss"]
    fresh = [[row.response for row in rows if row.trajectory is None] for rows in runs[1][first][1].rows]
    for group_, rows in zip(runs[1][first][1].groups, fresh, strict=True):
        assert rows == list(group_.rollouts)[: len(rows)], "the last one gives way"
    with_signal = [[metrics["reward/groups_with_signal"] for metrics, _ in run] for run in runs]
    assert with_signal[1][first] == with_signal[0][first] + injected[first] / 8


@pytest.mark.slow
def test_exactly_the_groups_that_failed_and_have_one_stored_get_the_newest(warm_model, tmp_path, monkeypatch):
    run = begin(warm_model, tmp_path, *LATE, *EVERY_STEP, "Optimizer.learning_rate = 1e-5")
    seen, passed = watched(run, monkeypatch), 0
    for _ in range(8):
        before = stored(run)
        metrics = run.step()
        for one, rows in zip(seen[-1][0].groups, seen[-1][0].rows, strict=True):
            its = before.get(one.question.id, [])
            expected = [max(its, key=lambda t: (t.step, [-b for b in t.key]))] if its and not one.correct else []
            assert [row.trajectory for row in rows if row.trajectory is not None] == expected
            assert run.buffer.records[one.question.id].accuracy == Fraction(one.correct, 4), "of fresh rollouts alone"
            passed += len(expected)
            assert one.correct or not expected or run.buffer.trajectories(one.question.id) == its, "it stays stored"
        assert metrics["replay/candidates_scored"] == 0
    assert passed > 3


def test_one_that_is_selected_is_scored_after_grading_by_the_current_policy_and_its_time_is_told(
    verdict, warm_model, tmp_path, monkeypatch
):
    run = begin(warm_model, tmp_path, *SELECTED, *EVERY_STEP)
    for _ in range(2):
        run.step()
    verdict["right"] = False
    several = {run.fresh.question(id): its for id, its in stored(run).items() if len(its) > 1}
    entropies = {q: [one.entropy for one in measured] for q, measured in run.engine.score(several).items()}
    seen = watched(run, monkeypatch)
    metrics = run.step()
    assert metrics["replay/candidates_scored"] == sum(map(len, several.values())) > len(several) > 4
    chosen = {row.question: row.trajectory for row in seen[0][0].flat_rows() if row.trajectory is not None}
    assert all(chosen[q] is several[q][int(np.argmin(values))] for q, values in entropies.items())
    assert 0 < metrics["time/inject"] < metrics["time/step"]
    assert metrics["time/score"] < metrics["time/inject"], "nothing was planned to be scored before the rollouts"


def test_dynamic_sampling_leaves_out_groups_without_a_signal_after_the_injection(
    verdict, warm_model, tmp_path, monkeypatch
):
    run = begin(warm_model, tmp_path, *LATE, "DynamicSampling.max_rounds = 2", "RetirementPolicy.at_accuracy = None")
    seen = watched(run, monkeypatch)
    run.step()
    trajectories, verdict["right"] = stored(run), False
    sampled = []
    rollout = run.engine.rollout
    monkeypatch.setattr(
        run.engine, "rollout", lambda plan, k: sampled.append(plan.in_order(rollout(plan, k))) or sampled[-1]
    )
    metrics = run.step()
    batch = seen[-1][0]
    ids = [one.question.id for groups in sampled for one in groups]
    able = [id for id in ids if id in trajectories]
    assert 0 < len(able) < len(ids) == 8 + metrics["rollout/filtered_groups"]
    assert metrics["replay/injected"] == min(len(able), 8)
    assert set(able[:8]) <= {one.question.id for one in batch.groups}
    assert metrics["reward/groups_with_signal"] == min(len(able), 8) / 8


def test_what_can_be_injected():
    """Groups known to have failed, once replay has started, with something stored; whatever their latest accuracy."""
    buffer = ReplayBuffer(RetirementPolicy())
    for question, accuracy in zip(QUESTIONS[:4], (0, Fraction(1, 2), Fraction(1, 2), Fraction(1, 2)), strict=True):
        buffer.record(question.id, accuracy, 0)
    buffer.store([(question.id, trajectory([i, 1])) for i, question in enumerate(QUESTIONS[:3])])
    failed = [group(["wrong"] * 4, question) for question in QUESTIONS[:5]]
    ungraded = group(["wrong", "timeout", "timeout", "error"], QUESTIONS[1])
    solved = group(["wrong", "wrong", "wrong", "correct"], QUESTIONS[2])
    delayed = mixer(rho=0, injection=LateInjection(), start_at_accuracy=0.35)
    assert delayed.late_stored(failed, buffer) == {}
    delayed.share.observe([group(["correct"] * 4)], 1)
    assert list(delayed.late_stored(failed, buffer)) == QUESTIONS[:3]
    assert delayed.late_stored([ungraded, solved], buffer) == {}
    assert mixer(rho=0).late_stored(failed, buffer) == {}
    assert delayed.collecting
    assert not mixer(rho=0).collecting


def test_a_planned_revisit_gets_its_stored_success_only_where_all_rollouts_fail():
    planning = mixer(rho=0.5, injection=UnlessSolved(late=LateInjection()))
    failed, solved = (group(["wrong"] * 3 + [last], QUESTIONS[i], True) for i, last in enumerate(("wrong", "correct")))
    ungraded, late = group(["timeout"] * 4, QUESTIONS[2], True), group(["wrong"] * 4, QUESTIONS[3])
    groups = [failed, solved, ungraded, late]
    chosen = {QUESTIONS[i].id: trajectory([i, 1]) for i in range(4)}
    rows = [members for _, members in planning.complete(groups, choices(chosen))]
    stored = [[one for one in members if isinstance(one, Trajectory)] for members in rows]
    assert [len(members) for members in rows] == [4] * 4
    assert stored == [[chosen[QUESTIONS[0].id]], [], [], [chosen[QUESTIONS[3].id]]]
    assert planning.metrics(groups, choices(chosen))["replay/injected"] == 2
    buffer = filled(4)
    assert planning.plan(source(), buffer, 1).rollout_counts(4) == [4] * 8
    assert [*planning.late_stored(groups, buffer)] == [QUESTIONS[3]], "the others are planned"
