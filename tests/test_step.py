"""One step of the training loop, the real one: what is observed and stored of what was sampled."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
from engine_builders import LOGPROB_ERROR, plain_stats
from run_builders import small_bindings
from transformers import AutoModelForCausalLM

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.local import TorchEngine
from exgrpo_orlhf.records import Grade
from exgrpo_orlhf.rewards import verifier
from exgrpo_orlhf.training import TrainingRun


def begin(model: Path, run: Path, *more: str) -> TrainingRun:
    x = config.load(["base.gin"], small_bindings(model, *more))
    engine = TorchEngine(x.local, x.optimizer, x.sampling, x.prompts, model_path=model, seed=x.settings.seed)
    return TrainingRun(x, lambda checkpoint: engine, run, "unused", {})


def test_stored_log_probs_are_of_the_policy_that_sampled_also_where_a_batch_has_two_optimiser_steps(
    warm_model, tmp_path
):
    bindings = (
        "Optimizer.steps_per_batch = 2",
        "Optimizer.learning_rate = 0.05",
        "RetirementPolicy.at_accuracy = None",
    )
    run = begin(warm_model, tmp_path, *bindings, "train.questions_per_step = 24")
    metrics = run._step(1)
    assert metrics["policy/approx_kl"] > 0.01, "the second optimiser step's rows are measured by another policy"
    sampled_by = AutoModelForCausalLM.from_pretrained(warm_model)
    stored = [(run.fresh.question(q), t) for q in run.buffer.records for t in run.buffer.trajectories(q)]
    assert len(stored) > 6
    for question, trajectory in stored:
        expected, _ = plain_stats(sampled_by, run.engine.prompts.encode(question), trajectory.token_ids)
        np.testing.assert_allclose(trajectory.behaviour_logprobs, expected, atol=LOGPROB_ERROR, rtol=0)


@pytest.mark.parametrize("bound", [0.2, 0.01])
def test_the_delayed_start_looks_at_all_that_was_sampled_not_at_what_is_trained_on(
    bound, warm_model, tmp_path, monkeypatch
):
    """Seven of eight questions are always wrong: no group of theirs is in the batch, whose Pass@1 is at least 1/4."""

    def grade(question, response):
        correct = int(question.id, 16) % 8 == 0 and zlib.crc32(response.encode()) % 2 == 0
        return Grade("correct", 1.0) if correct else Grade("wrong", 0.0)

    monkeypatch.setitem(verifier._HERE, "modular_chain", grade)
    start = f"ReplayMixer.start_at_accuracy = {bound}"
    many = ("ModularChains.count = 300", "ModularChains.operands = (3, 4)")
    run = begin(warm_model, tmp_path, start, "DynamicSampling.max_rounds = 60", *many)
    metrics = run._step(1)
    assert metrics["reward/groups_with_signal"] == 1
    assert 0.01 < metrics["reward/pass_at_1"] < 0.2
    assert metrics["replay/started"] == (bound == 0.01)
