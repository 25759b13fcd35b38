"""Compares the local engine with OpenRLHF's actor (DeepSpeed, forward pass, update) on the same groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import openrlhf_on_cpu  # noqa: F401  (first: without CUDA OpenRLHF cannot be imported before it)
import pytest
import torch
from engine_builders import ADDING, SMALL, SMALL_GPT2, make_engine, sampled_batch, with_added
from openrlhf.models import Actor
from openrlhf_actor import LOSS, EngineWithoutRay, actor_weights, experience_of, fit, make_actor, rows_of, update
from openrlhf_matrix import COPYING
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config, Qwen3Config

from exgrpo_orlhf.engines.engine import NonFiniteUpdate
from exgrpo_orlhf.engines.weight_decay import decay_groups
from exgrpo_orlhf.objective import ConvexKL, MixedPolicyLoss
from exgrpo_orlhf.selftest.parity import generated_ahead
from exgrpo_orlhf.settings import Optimizer

pytestmark = pytest.mark.openrlhf

# bfloat16 rounds a logit, at most 6 here, by up to 2^-8 of it, 0.023. Two such roundings change a log-prob at
# temperature 0.7 by 0.07; the limit is four times that. In the mean entropy of a response they nearly cancel; the limit
# is about one rounding.
LOGPROB_ERROR, ENTROPY_ERROR = 0.25, 0.03


@pytest.mark.parametrize("packing", [False, True])
def test_log_probs_are_those_of_openrlhfs_own_forward_pass(warm_model, packing):
    """Our forward pass makes no logits. It gives the same values as OpenRLHF's, which computes them from all logits,
    with temperature and packing."""
    batch = sampled_batch(warm_model, n=6)
    flags = {"ds.packing_samples": packing}
    actor = make_actor(warm_model, "Sampling.temperature = 0.7", questions_per_step=6, **flags)
    rows = rows_of(actor, batch)
    for experience, row, measured in zip(experience_of(actor, batch), rows, actor.measure(rows), strict=True):
        theirs, output = Actor.forward(
            actor.actor, experience.sequences, experience.action_mask, experience.attention_mask, return_output=True
        )
        logprobs = theirs[0, len(row.prompt) - 1 :].detach()
        np.testing.assert_allclose(logprobs, measured.logprobs, atol=LOGPROB_ERROR, rtol=0)
        logits = output.logits[0, len(row.prompt) - 1 : -1].detach() * 0.7  # they have divided by it
        plain = torch.distributions.Categorical(logits=logits).entropy().mean()
        assert measured.entropy == pytest.approx(float(plain), abs=ENTROPY_ERROR)


ONE_BY_ONE = {"train.micro_batch_size": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ONE_BY_ONE,
        {**ONE_BY_ONE, "ds.packing_samples": True, "actor.gradient_checkpointing_enable": True},
        {**ONE_BY_ONE, "ds.zero_stage": 3},
        {"train.dynamic_batch_enable": True, "train.max_tokens_per_gpu": 96, "rollout.max_tokens_per_gpu": 96},
    ],
    ids=lambda flags: "-".join(flag.rpartition(".")[2] for flag in flags),
)
def test_a_single_pass_records_log_probs_and_entropies_before_its_optimiser_step(warm_model, flags):
    """Bit-identical ones, if a row has a pass of its own; beside other rows bfloat16 rounds differently. Short groups
    are filled up, a row could not be graded, and layers that are computed twice record their values once."""
    batch = sampled_batch(warm_model, beside=1)
    batch.rows[0][1] = replace(batch.rows[0][1], in_loss=False, advantage=0.0)
    loss = MixedPolicyLoss(response_length=24, entropy_coef=0.01)
    bindings = ("Optimizer.learning_rate = 1e-2", "MixedPolicyLoss.entropy_coef = 0.01")
    actor = make_actor(warm_model, *bindings, loss=loss, **flags)
    rows = rows_of(actor, batch)
    before = [actor.measure([row]) for row in rows]
    fit(actor, batch)
    recorded = actor.recorded()
    assert set(recorded) == {i for i, row in enumerate(batch.flat_rows()) if row.in_loss}
    moved = 0.0
    for i, (logprobs, entropy) in recorded.items():
        [measured] = before[i]
        assert logprobs.dtype == np.float32
        if ONE_BY_ONE.items() <= flags.items():
            assert logprobs.tobytes() == measured.logprobs.tobytes()
            assert entropy == measured.entropy
        np.testing.assert_allclose(logprobs, measured.logprobs, atol=0.1)
        assert entropy == pytest.approx(measured.entropy, abs=0.02)
        moved = max(moved, np.abs(actor.measure([rows[i]])[0].logprobs - measured.logprobs).max())
    assert moved > 0.3, "the policy has changed after the step"


@pytest.mark.parametrize("limit", [None, 1e-9])
@pytest.mark.parametrize("stage", [2, 3])
def test_an_update_above_the_bound_is_skipped_and_counted_and_the_warm_up_waits_for_it(warm_model, stage, limit):
    batch = sampled_batch(warm_model)
    bindings = [f"Optimizer.skip_above_grad_norm = {limit}", "Optimizer.steps_per_batch = 2"]
    bindings += ["Optimizer.learning_rate = 1e-2", "Optimizer.warmup_steps = 4"]
    actor = make_actor(warm_model, *bindings, **{"ds.zero_stage": stage})
    before = actor_weights(actor)
    metrics = update(actor, batch)
    assert metrics["policy/skipped_updates"] == (0 if limit is None else 2)
    assert metrics["policy/learning_rate"] == pytest.approx(1e-2 * (2 if limit is None else 1) / 4)
    assert torch.equal(before, actor_weights(actor)) == (limit is not None)
    assert metrics["policy/grad_norm"] > 1e-3


@pytest.mark.parametrize("trained", ["all", "norms alone", "no bias"])
@pytest.mark.parametrize("config", [Qwen2Config(**SMALL), Qwen3Config(**SMALL, head_dim=16), GPT2Config(**SMALL_GPT2)])
def test_weight_decay_takes_what_openrlhfs_takes(config, trained):
    from openrlhf.utils.deepspeed.deepspeed_utils import get_optimizer_grouped_parameters

    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = {"all": True, "norms alone": "norm" in name, "no bias": "bias" not in name}[trained]
    theirs = [group for group in get_optimizer_grouped_parameters(model, 0.1) if group["params"]]
    ours = torch.optim.AdamW(decay_groups(model, 0.1), weight_decay=0.1).param_groups if theirs else []
    for mine, its in zip(ours, theirs, strict=True):
        assert mine["weight_decay"] == its["weight_decay"]
        assert [*map(id, mine["params"])] == [*map(id, its["params"])]


def test_the_rates_are_the_local_engines_and_none_of_them_is_0(warm_model):
    bindings = {"warmup_steps": 2, "schedule": "cosine", "decay_steps": 6, "steps_per_batch": 2}
    engine = make_engine(warm_model, optimizer=Optimizer(learning_rate=1e-3, **bindings))
    actor = make_actor(warm_model, *(f"Optimizer.{name} = {value!r}" for name, value in bindings.items()),
                       "Optimizer.learning_rate = 1e-3", "train.steps = 3")  # fmt: skip
    batch = sampled_batch(warm_model)
    both = [[engine.update(batch, LOSS).metrics, update(actor, batch)] for _ in range(3)]
    rates = [[metrics["policy/learning_rate"] for metrics in step] for step in both]
    assert rates == [[pytest.approx(1e-3 * share)] * 2 for share in (1, 0.6545085, 0.0954915)]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_that_is_not_finite_changes_no_weight(warm_model, stage):
    batch = sampled_batch(warm_model)
    actor = make_actor(warm_model, **{"ds.zero_stage": stage})
    before = actor_weights(actor)
    for experience in experience_of(actor, batch):
        experience.advantages = experience.advantages * float("inf")
        actor.append(experience)
    assert np.isnan(actor.fit()["policy/grad_norm"])
    assert torch.equal(before, actor_weights(actor))


# -- OpenRLHFEngine.update, with this actor and without Ray -----------------------------------------------------------


def without_ray(model: Path, *bindings: str):
    """An engine, and a batch with short groups, two rows of which could not be graded."""
    batch = sampled_batch(model, beside=1)
    for group, row in ((0, 1), (5, 0)):
        batch.rows[group][row] = replace(batch.rows[group][row], in_loss=False, advantage=0.0)
    more = ("Optimizer.learning_rate = 1e-2", "OpenRLHF.score_tokens = 200")
    return EngineWithoutRay(make_actor(model, *more, *bindings)), batch


@pytest.mark.parametrize("bindings", [[], ["Optimizer.steps_per_batch = 2"], ["Optimizer.passes_per_batch = 2"]])
def test_an_update_returns_log_probs_and_entropy_of_every_row_under_the_policy_before_it(warm_model, bindings):
    """With one optimiser step only the rows that could not be graded are measured for that."""
    engine, batch = without_ray(warm_model, *bindings)
    rows, flat = rows_of(engine.actor, batch), batch.flat_rows()
    before = [engine.actor.measure([row]) for row in rows]
    stats = engine.update(batch, LOSS)
    assert len(engine.measured) == (len(flat) if bindings else 2)
    expected = [row.token_ids.tolist() for row in flat if bindings or not row.in_loss]
    assert sorted(row.token_ids.tolist() for row in engine.measured) == sorted(expected)
    for i, (measured,) in enumerate(before):
        assert stats.policy_logprobs[i].dtype == np.float32
        np.testing.assert_allclose(stats.policy_logprobs[i], measured.logprobs, atol=0.1)
        assert stats.entropies[i] == pytest.approx(measured.entropy, abs=0.02)
        stored = stats.policy_logprobs[i] if flat[i].trajectory is None else flat[i].trajectory.behaviour_logprobs
        assert stats.behaviour_logprobs[i].tobytes() == stored.tobytes()


@pytest.mark.parametrize("bindings", [[], ["Optimizer.steps_per_batch = 2"], ["Optimizer.passes_per_batch = 2"]])
def test_an_update_weighs_rows_that_were_generated_ahead_by_the_log_probs_that_they_came_with(warm_model, bindings):
    """So it measures only those that could not be graded, also with several optimiser steps: what it returns of the
    others is of their first pass. For the rows of the first step that is the policy before the update."""
    engine, batch = without_ray(warm_model, "train.generate_ahead = True", *bindings)
    batch = generated_ahead(make_engine(warm_model), batch)
    flat, rows = batch.flat_rows(), rows_of(engine.actor, batch)
    before = [engine.actor.measure([row]) for row in rows]
    stats = engine.update(batch, LOSS)
    assert len(engine.measured) == sum(not row.in_loss for row in flat) == 2
    steps = 2 if "Optimizer.steps_per_batch = 2" in bindings else 1
    group_of = [g for g, members in enumerate(batch.rows) for _ in members]
    for i in (i for i, g in enumerate(group_of) if g % steps == 0):
        np.testing.assert_allclose(stats.policy_logprobs[i], before[i][0].logprobs, atol=0.1)
        assert stats.entropies[i] == pytest.approx(before[i][0].entropy, abs=0.02)
    for row, behaviour in zip(flat, stats.behaviour_logprobs, strict=True):
        assert behaviour.tobytes() == row.response.behaviour_logprobs.tobytes()
    assert stats.metrics["policy/clip_share"] > 0.01
    assert stats.metrics["policy/approx_kl"] > 0.01


def test_the_rows_of_an_update_that_is_not_finite_come_with_their_log_probs(warm_model):
    engine, batch = without_ray(warm_model)
    batch.rows[1][0] = replace(batch.rows[1][0], advantage=float("inf"))
    with pytest.raises(NonFiniteUpdate) as raised:
        engine.update(batch, LOSS)
    assert len(raised.value.dump) == len(batch.flat_rows())
    for row, dumped in zip(batch.flat_rows(), raised.value.dump, strict=True):
        assert dumped["token_ids"] == row.token_ids.tolist()
        assert len(dumped["policy_logprobs"]) == len(row.token_ids)
        assert np.isfinite(dumped["policy_logprobs"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_an_actor_with_frozen_copies_goes_on_through_a_reincarnation_as_one_that_was_never_stopped(
    stage, warm_model, tmp_path
):
    """Saved before it, and after it: bit by bit. Behind it a batch is gone through once."""
    kinds = {"normalizer": "sequences", "divisors": "together", "clip_around": "policy", "kl_coef": 0.5}
    loss = MixedPolicyLoss(shaping=False, clips_replayed=True, kl_convex=ConvexKL(), **kinds)
    bindings = [*ADDING, *COPYING, *(f"MixedPolicyLoss.{name} = {value!r}" for name, value in kinds.items())]
    bindings += ["Optimizer.passes_per_batch = 2", "Optimizer.learning_rate = 1e-2"]
    batch = replace(with_added(sampled_batch(warm_model), loss), base_share=0.6)
    later = replace(batch, reincarnated=True)
    make = lambda resume=None: make_actor(warm_model, *bindings, loss=loss, resume=resume, **{"ds.zero_stage": stage})

    def train(actor, reincarnates: bool, batch) -> list[float]:
        trainer = EngineWithoutRay(actor)
        if reincarnates:
            trainer.reincarnate()
        trainer.update(batch, loss)
        return actor_weights(actor)

    actor, expected = make(), []
    for number, (reincarnates, of_step) in enumerate([(False, batch), (True, later), (False, later)]):
        expected.append(train(actor, reincarnates, of_step))
        actor.save_state(str(tmp_path / str(number)), number)
    assert len(actor.guard.norms) == 1
    assert not torch.equal(expected[0], expected[1])
    for number, reincarnates in ((0, True), (1, False)):
        again = make(tmp_path / str(number))
        for name, kept in again.copies.items():
            assert any((a != b).any() for a, b in zip(kept._kept, kept._weights(), strict=True)), name
        assert torch.equal(train(again, reincarnates, later), expected[number + 1])
