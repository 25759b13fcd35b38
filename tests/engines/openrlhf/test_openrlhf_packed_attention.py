"""Packed rows by torch's varlen_attn against padded rows by sdpa, in float32. A plain attention with the kernel's
arguments takes its place, because it needs CUDA."""

from __future__ import annotations

from functools import partial

import openrlhf_on_cpu  # noqa: F401
import pytest
import torch
from openrlhf.models import Actor
from plain_varlen import varlen_attn
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig, Qwen3Config, modeling_flash_attention_utils

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.openrlhf import launch, packed_attention
from exgrpo_orlhf.engines.openrlhf.actor import MixedActor

pytestmark = pytest.mark.openrlhf

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {"full": Qwen3Config(**SHAPE), "window": MistralConfig(**SHAPE, sliding_window=3)}
LENGTHS, PROMPT = (9, 2, 5, 12), 1


@pytest.fixture
def varlen(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)


def actor_of(shape, attention: str, packed: bool, wrapper: type = MixedActor):
    """OpenRLHF's model wrapper without DeepSpeed."""
    torch.manual_seed(0)
    actor = wrapper.__new__(wrapper)
    torch.nn.Module.__init__(actor)
    model = AutoModelForCausalLM.from_config(shape, attn_implementation=attention)
    engine = partial(model)  # stands for DeepSpeed's
    engine.module = model
    actor.model = model if wrapper is Actor else engine
    actor.temperature, actor.packing_samples, actor.is_vlm = 0.9, packed, False
    return actor, model


def batch():
    width = max(LENGTHS)
    ids = torch.randint(64, (len(LENGTHS), width), generator=torch.Generator().manual_seed(1))
    real = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    return ids, (real[:, 1:] & (torch.arange(1, width) >= PROMPT)).long(), real.long()


def values_and_gradient(actor, model, checkpointing=False):
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
    log_probs, output = actor(*batch(), return_output=True, return_entropy=True)
    (log_probs.sum() + output.entropy.square().sum()).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return log_probs.detach(), output.entropy.detach(), gradient


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_packed_rows_have_the_values_and_gradients_of_padded_ones(varlen, monkeypatch, kind, checkpointing):
    """Where the rows begin is known from one look at the mask: no layer asks for it again."""
    padded = values_and_gradient(*actor_of(MODELS[kind], "sdpa", False))
    in_a_layer = "prepare_fa_kwargs_from_position_ids"
    monkeypatch.setattr(modeling_flash_attention_utils, in_a_layer, None)
    packed = values_and_gradient(*actor_of(MODELS[kind], packed_attention.ATTENTION, True), checkpointing)
    for ours, right in zip(packed, padded, strict=True):
        assert right.norm() > 0
        assert (ours - right).norm() < 1e-5 * right.norm()


def test_a_reference_models_own_forward_pass_gives_the_same_log_probs(varlen):
    """OpenRLHF's: it knows positions alone."""
    padded, packed = (
        actor_of(MODELS["full"], attention, packed, Actor)[0](*batch())
        for attention, packed in (("sdpa", False), (packed_attention.ATTENTION, True))
    )
    assert (padded - packed).abs().max() < 1e-5 < padded.abs().max()


def test_what_the_kernel_cannot_compute_is_refused(varlen):
    capped, _ = actor_of(Gemma2Config(**SHAPE), packed_attention.ATTENTION, True)
    with pytest.raises(ValueError, match=r"Gemma2Attention: .* cannot compute softcap; install flash-attn"):
        capped(*batch())
    padded, _ = actor_of(MODELS["full"], packed_attention.ATTENTION, False)
    with pytest.raises(ValueError, match="cannot compute padded rows"):
        padded(*batch())


@pytest.mark.parametrize(
    ("asked", "packs", "gets"),
    [
        ("flash_attention_2", True, packed_attention.ATTENTION),
        ("flash_attention_2", False, "sdpa"),
        ("flash_attention_3", True, "flash_attention_3"),
    ],
)
def test_without_flash_attn_a_layout_that_asks_for_it_starts_all_the_same(monkeypatch, tmp_path, asked, packs, gets):
    flags = {"ds.attn_implementation": asked, "ds.packing_samples": packs, "train.dynamic_batch_enable": packs}
    experiment = config.load(["toy.gin", "engines/openrlhf_1gpu.gin"], [f"OpenRLHF.more_flags = {flags!r}"])
    parse = lambda: launch.parse(experiment, "model", tmp_path, resume=False).ds.attn_implementation
    assert parse() == gets
    monkeypatch.setattr(packed_attention, "is_needed", lambda: False)
    assert parse() == asked
