"""One step of the training loop, the real one: what is observed and stored of what was sampled."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from engine_builders import LOGPROB_ERROR, plain_stats
from step_builders import begin, decide_verdicts
from transformers import AutoModelForCausalLM


def test_stored_log_probs_are_of_the_policy_that_sampled_also_where_a_batch_has_two_optimiser_steps(
    warm_model, tmp_path
):
    bindings = (
        "Optimizer.steps_per_batch = 2",
        "Optimizer.learning_rate = 0.05",
        "RetirementPolicy.at_accuracy = None",
    )
    run = begin(warm_model, tmp_path, *bindings, "train.questions_per_step = 24")
    metrics = run.step()
    assert metrics["policy/approx_kl"] > 0.01, "the second optimiser step's rows are measured by another policy"
    sampled_by = AutoModelForCausalLM.from_pretrained(warm_model)
    stored = [(run.fresh.question(q), t) for q in run.buffer.records for t in run.buffer.trajectories(q)]
    assert len(stored) > 6
    for question, trajectory in stored:
        expected, _ = plain_stats(sampled_by, run.engine.prompts.encode(question), trajectory.token_ids)
        np.testing.assert_allclose(trajectory.behaviour_logprobs, expected, atol=LOGPROB_ERROR, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0.2, 0.01])
def test_the_delayed_start_looks_at_all_that_was_sampled_not_at_what_is_trained_on(
    bound, warm_model, tmp_path, monkeypatch
):
    """Seven of eight questions are always wrong: no group of theirs is in the batch, whose Pass@1 is at least 1/4."""

    decide_verdicts(monkeypatch, lambda q, text: int(q.id, 16) % 8 == 0 and zlib.crc32(text.encode()) % 2 == 0)
    start = f"ReplayMixer.start_at_accuracy = {bound}"
    many = ("ModularChains.count = 300", "ModularChains.operands = (3, 4)")
    run = begin(warm_model, tmp_path, start, "DynamicSampling.max_rounds = 60", *many)
    metrics = run.step()
    assert metrics["reward/groups_with_signal"] == 1
    assert 0.01 < metrics["reward/pass_at_1"] < 0.2
    assert metrics["replay/started"] == (bound == 0.01)


@pytest.mark.slow
def test_fresh_questions_rest_as_long_as_bound_and_are_known_by_all_that_was_sampled(warm_model, tmp_path, monkeypatch):
    """Groups that dynamic sampling leaves out count too: two of three questions are never solved."""

    decide_verdicts(monkeypatch, lambda q, text: int(q.id, 16) % 3 == 0 and zlib.crc32(text.encode()) % 2)
    more = ("FreshSampler.by = 'accuracy'", "FreshSampler.cooldown = 2", "DynamicSampling.max_rounds = 1")
    run = begin(warm_model, tmp_path, *more, "ModularChains.count = 80", "ReplayMixer.rho = 0.0")
    rollout, step, plans = run.engine.rollout, [0], {}
    accuracies, observe = {}, run.fresh.observe

    def asking(plan, group_size):
        plans.setdefault(step[0], []).extend(question.id for question in plan.fresh)
        return rollout(plan, group_size)

    def observing(groups, at):
        accuracies.update({group.question.id: float(group.accuracy) for group in groups})
        observe(groups, at)

    monkeypatch.setattr(run.engine, "rollout", asking)
    monkeypatch.setattr(run.fresh, "observe", observing)
    for step[0] in range(1, 6):
        assert run.step()["rollout/filtered_groups"] > 0
        recent = [id for earlier in (1, 2) for id in plans.get(step[0] - earlier, [])]
        assert not {*recent} & {*plans[step[0]]}
        estimates = {id: run.fresh._accuracy[place] for id, place in run.fresh._place.items()}
        assert {id: float(p) for id, p in estimates.items() if not np.isnan(p)} == accuracies
    assert sum(len(ids) for ids in plans.values()) > len({id for ids in plans.values() for id in ids}), "some came back"
