"""Flags of OpenRLHF that are passed on and that no other test runs: each changes what it should, and nothing else.

One optimiser step of the whole actor, in this process. The layouts' flags are in test_openrlhf_matrix.py.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import openrlhf_on_cpu  # noqa: F401  (first: without CUDA OpenRLHF cannot be imported before it)
import pytest
import torch
from engine_builders import SMALL, sampled_batch, saved_model
from openrlhf.models import Actor
from openrlhf_actor import actor_weights, make_actor, rows_of, update
from transformers import AutoModelForCausalLM, MixtralConfig

from exgrpo_orlhf.engines.openrlhf import flags as openrlhf_flags
from exgrpo_orlhf.selftest.actors import record_gradients
from exgrpo_orlhf.selftest.parity import Difference, Gradients

pytestmark = pytest.mark.openrlhf


@pytest.fixture(scope="module")
def experts_model(raw_model, tmp_path_factory) -> Path:
    """Two layers of four experts each."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.weight)  # so that rounding changes the choice of few tokens
    return saved_model(model, raw_model, tmp_path_factory.mktemp("experts"))


@cache
def gradients(model: Path, **flags) -> Gradients:
    """Of one optimiser step, and of one micro-batch."""
    actor, recorded = make_actor(model, **{"train.micro_batch_size": 32, **flags}), []
    record_gradients(actor, recorded)
    update(actor, sampled_batch(model))
    return recorded


def test_layers_that_are_computed_twice_by_reentrant_checkpoints_have_the_same_gradient(raw_model):
    flags = {"actor.gradient_checkpointing_enable": True, "actor.gradient_checkpointing_reentrant": True}
    assert Difference.between(gradients(raw_model, **flags), gradients(raw_model)).error == 0


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_added_up_as_the_flag_says_and_checked_before_the_step_or_the_flag_is_refused(
    stage, dtype, offload, raw_model, monkeypatch
):
    flags = {"ds.zero_stage": stage, "ds.adam_offload": offload, "train.micro_batch_size": 4}
    accumulated = flags | {"ds.grad_accum_dtype": dtype}
    if dtype == "fp32" and (stage == 2 or (stage == 1 and not offload)):
        with pytest.raises(ValueError, match=rf"fp32' with ds\.zero_stage = {stage}: .* use ds\.zero_stage = 3"):
            make_actor(raw_model, **accumulated)
        # Where this fails, DeepSpeed has learned it, and the refusal can go.
        monkeypatch.setattr(openrlhf_flags, "_check_layout", lambda *_: None)
        if stage == 1:
            assert type(make_actor(raw_model, **accumulated).actor.model.optimizer).__name__ == "BF16_Optimizer"
        else:
            assert Difference.between(gradients(raw_model, **accumulated), gradients(raw_model, **flags)).error == 0
        return
    actor = make_actor(raw_model, "Optimizer.skip_above_grad_norm = 1e-9", **accumulated)
    before, metrics = actor_weights(actor), update(actor, sampled_batch(raw_model))
    assert metrics["policy/grad_norm"] > 0
    assert metrics["policy/skipped_updates"] == 1
    assert torch.equal(actor_weights(actor), before)
    plain = gradients(raw_model)  # in one micro-batch
    slopes = [gradients(raw_model, **each) for each in (accumulated, flags)]
    added, in_bfloat16 = (Difference.between(each, plain).error for each in slopes)
    assert added <= 0.02
    assert (added < in_bfloat16) == (dtype == "fp32")


def test_full_determinism_trains_and_is_on(raw_model, monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ})  # transformers sets variables
    plain = gradients(raw_model)
    try:
        slopes = gradients(raw_model, **{"train.full_determinism_enable": True})
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert Difference.between(slopes, plain).error == 0


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_every_way_to_compute_experts_has_the_same_gradient(experts_model, implementation):
    slopes = gradients(experts_model, **{"ds.experts_implementation": implementation})
    assert Difference.between(slopes, gradients(experts_model)).error < 0.03  # bfloat16's own rounding


def test_the_balancing_loss_of_experts_is_added_with_its_coefficient(experts_model):
    """Its gradient is that of transformers' own `aux_loss` over the same rows, times the coefficient."""
    [plain], [balanced] = gradients(experts_model), gradients(experts_model, **{"actor.aux_loss_coef": 0.5})
    model = AutoModelForCausalLM.from_pretrained(experts_model, dtype=torch.bfloat16, output_router_logits=True)
    actor, batch = make_actor(experts_model), sampled_batch(experts_model)
    rows = [torch.tensor([*row.prompt, *row.token_ids.tolist()]) for row in rows_of(actor, batch)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True)
    (0.5 * model(ids, attention_mask=mask.long()).aux_loss).backward()
    name = "model.layers.0.mlp.gate.weight"
    ours, theirs = balanced[name] - plain[name], model.get_parameter(name).grad
    assert theirs.norm() > 0
    assert (ours - theirs).norm() < 0.2 * theirs.norm()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_an_offloaded_reference_model_has_the_same_log_probs(raw_model, stage):
    """As OpenRLHF's reference actor makes it. It is offloaded with ZeRO-3."""
    actor = make_actor(raw_model, "MixedPolicyLoss.kl_coef = 0.1", **{"ds.zero_stage": stage, "ref.offload": True})
    strategy, rows = actor.strategy, torch.randint(2, 18, (3, 9))
    assert strategy.args.ref.offload
    logprobs = []
    for offload in (False, True):
        config = strategy.get_ds_eval_config(offload=offload)
        model = Actor(str(raw_model), attn_implementation="sdpa", ds_config=config)
        model._offload = offload
        model = strategy.prepare(model).eval()
        with torch.no_grad():
            logprobs.append(model(rows, torch.ones(3, 8), attention_mask=torch.ones_like(rows)))
    assert torch.equal(*logprobs)
