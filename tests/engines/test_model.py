"""What both engines test of a model before they use it, on small random models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from engine_builders import SMALL, SMALL_GPT2
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
)

from exgrpo_orlhf.engines.model import changes_logits, mixing_of_rows
from exgrpo_orlhf.engines.rows import ForwardRow
from exgrpo_orlhf.records import Measured

HEADS = {**SMALL, "head_dim": 16}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
MAMBA = {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}


def made(config: PretrainedConfig, dtype: torch.dtype = torch.float32, **more: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **more)
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.3)  # logits that differ
    return model.to(dtype).eval()


@torch.no_grad()
def log_probs(model: PreTrainedModel, rows: Sequence[ForwardRow], **more: torch.Tensor) -> list[Measured]:
    """All rows in one, as the OpenRLHF actor packs them."""
    sequences = [torch.tensor([*row.prompt, *row.token_ids.tolist()]) for row in rows]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    logits = model(torch.cat(sequences)[None], use_cache=False, **{"position_ids": positions, **more}).logits[0].float()
    parts = logits.log_softmax(-1).split([len(row) for row in rows])
    of_tokens = (part[:-1].gather(1, ids[1:, None])[:, 0] for part, ids in zip(parts, sequences, strict=True))
    return [Measured(part[len(row.prompt) - 1 :].numpy(), 0.0) for part, row in zip(of_tokens, rows, strict=True)]


def mixing(model: PreTrainedModel, measure: Callable[..., list[Measured]] = log_probs) -> float | None:
    return mixing_of_rows(lambda rows: measure(model, rows), model.config.vocab_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**HEADS),
        GPT2Config(**SMALL_GPT2),
        Gemma3TextConfig(**HEADS, **SLIDING),
        MixtralConfig(**SMALL, num_local_experts=4),
    ],
    ids=lambda config: config.model_type,
)
def test_rows_of_a_model_with_attention_alone_are_not_mixed(config, dtype):
    assert mixing(made(config, dtype)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config", "more"),
    [
        (Qwen3NextConfig(**HEADS, **LINEAR), {}),
        (BambaConfig(**SMALL, **MAMBA), {}),
        # Attention that ignores positions, so that a row sees those before it.
        (
            GptOssConfig(**HEADS, **SLIDING, num_local_experts=2, num_experts_per_tok=1),
            {"attn_implementation": "eager"},
        ),
    ],
    ids=["qwen3_next", "bamba", "gpt_oss, eager"],
)
def test_rows_are_mixed_by_recurrent_layers_and_by_attention_that_ignores_positions(config, more, dtype):
    model = made(config, dtype, **more)
    first, second = (ForwardRow([a], np.array([b, 5, 6], np.int32)) for a, b in ((3, 4), (7, 8)))
    packed, alone = log_probs(model, [first, second])[1], log_probs(model, [second])[0]
    apart = abs(packed.logprobs - alone.logprobs).max()
    assert apart > 0.01
    assert mixing(model) > 0.01


def test_positions_that_do_not_restart_are_mixing_too():
    """A mask keeps the rows apart, and what the first row contains changes nothing."""

    def measure(model: PreTrainedModel, rows: Sequence[ForwardRow]) -> list[Measured]:
        owner = torch.cat([torch.full((len(row),), i) for i, row in enumerate(rows)])
        sees = (owner[:, None] == owner) & torch.ones(len(owner), len(owner)).tril().bool()
        mask = torch.zeros(sees.shape).masked_fill(~sees, float("-inf"))[None, None]
        return log_probs(model, rows, position_ids=torch.arange(len(owner))[None], attention_mask=mask)

    model = made(GPT2Config(**SMALL_GPT2))
    torch.nn.init.normal_(model.transformer.wpe.weight, std=0.3)
    assert mixing(model) is None
    assert mixing(model, measure) > 0.1


CHANGES = {
    "cap": Gemma2Config(**HEADS, final_logit_softcapping=30.0),
    "another name of the cap": RecurrentGemmaConfig(**SMALL, lru_width=32, block_types=["recurrent", "attention"]),
    "scale": CohereConfig(**SMALL, logit_scale=0.25),
    "divisor": GraniteConfig(**SMALL, logits_scaling=8.0),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", CHANGES)
def test_logits_that_a_model_changes_are_seen_without_its_weights(name, device):
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(CHANGES[name])
    assert changes_logits(model)


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**HEADS),
        GPT2Config(**SMALL_GPT2),
        Gemma2Config(**HEADS, final_logit_softcapping=None),
        GraniteConfig(**SMALL, logits_scaling=1.0),
        MixtralConfig(**SMALL),
        Qwen3NextConfig(**HEADS, **LINEAR),
    ],
    ids=lambda config: config.model_type,
)
def test_logits_of_the_output_layer_are_not_taken_for_changed_ones(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert not changes_logits(model)
    forward = type(model.base_model).forward
    assert model.base_model.forward.__func__ is forward, "the model is as it was"
