"""Rows packed with each prompt once, against padded rows: the same statistics, the same gradients, the same update."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen as varlen
from engine_builders import (
    SMALL,
    SMALL_GPT2,
    K,
    float32_error,
    make_engine,
    plain_stats,
    use_sgd,
    weights,
)
from plain_varlen import varlen_attn
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    FalconConfig,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from exgrpo_orlhf.attention.packing import Packed, Span, Table, packed_batches, repeated_share
from exgrpo_orlhf.engines.local import TorchEngine
from exgrpo_orlhf.engines.local import forward as forward_module
from exgrpo_orlhf.engines.local.forward import PolicyForward
from exgrpo_orlhf.engines.rows import ForwardRow, micro_batches
from exgrpo_orlhf.objective import MixedPolicyLoss
from exgrpo_orlhf.records import MixedBatch, Rollout
from exgrpo_orlhf.selftest.parity import random_batch
from exgrpo_orlhf.settings import LocalEngine, Optimizer
from exgrpo_orlhf.testbed.modular_chains import ModularChains
from exgrpo_orlhf.testbed.tiny_models import ChainModel

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler")  # some tests take another optimiser
CPU = torch.device("cpu")
# With weights of this size attention is sharp: a token that is seen or placed wrongly shows in the results.
SHARP = {**SMALL, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "initializer_range": 0.3}
LLAMA = LlamaConfig(**SHARP)
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SAME = 1e-5  # relative to the largest


@pytest.fixture(params=["tables", "one call"])
def one_call(request, monkeypatch) -> bool:
    """Whether attention is that of a GPU, computed here without the kernel."""
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    return request.param == "one call"


def model_of(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def rows_of(*groups: tuple[int, tuple[int, ...]]) -> list[ForwardRow]:
    """groups: length of the prompt, lengths of its responses. The rows are shuffled."""
    rng = np.random.default_rng(0)
    rows = []
    for prompt, responses in groups:
        ids = rng.integers(2, 18, prompt).tolist()
        rows += [ForwardRow(list(ids), rng.integers(2, 18, n).astype(np.int32)) for n in responses]
    return [rows[i] for i in rng.permutation(len(rows))]


# Mixed lengths, equal ones, a single row, responses of one token alone and among longer ones
MIXED = rows_of((20, (3, 9, 1, 25, 9)), (7, (4, 4, 4, 4)), (31, (12,)), (1, (2, 30, 1)), (12, (1, 1)))

# The same with some tokens of an environment's
EPISODES = [
    replace(row, actions=(np.arange(len(row.token_ids)) + i) % 3 > 0) if len(row.token_ids) > 2 else row
    for i, row in enumerate(MIXED)
]


def assert_same(tensors, expected) -> None:
    for ours, theirs in zip(tensors, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=SAME * float(theirs.abs().max()), rtol=0)


def gradients(model, values: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Of a sum in which each value has a weight of its own."""
    generator = torch.Generator().manual_seed(1)
    model.zero_grad()
    sum((value * torch.randn(value.shape, generator=generator)).sum() for value in values).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        Qwen2Config(**SHARP, tie_word_embeddings=True),
        Qwen3Config(**SHARP, head_dim=16),
        GPT2Config(**SMALL_GPT2, initializer_range=0.3),
    ],
    ids=["llama", "qwen2", "qwen3", "gpt2"],
)
@pytest.mark.parametrize("rows", [MIXED, EPISODES], ids=["responses", "episodes"])
def test_statistics_and_gradients_equal_those_of_padded_rows(config, rows, one_call):
    model = model_of(config)
    forward = PolicyForward(model, 0.8, torch.float32)
    assert forward.packs
    forward.one_call = one_call
    expected = forward(rows)
    slopes = gradients(model, expected)
    outputs = forward(rows, pack=True)
    assert_same(outputs, expected)
    assert_same(gradients(model, outputs), slopes)
    alone = plain_stats(model, rows[0].prompt, Rollout(rows[0].token_ids, "stop", actions=rows[0].actions), 0.8)[0]
    torch.testing.assert_close(outputs[0][: len(alone)].double(), alone, atol=1e-4, rtol=0)
    # After packed rows, the results of padded ones are still bit-identical.
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(forward(rows), expected, strict=True))


class GoesOn(Packed):
    """A fault: the positions of a response go on from the response before it."""

    def __init__(self, rows, device, one_call=False):
        super().__init__(rows, device, one_call)
        self.positions = torch.arange(self.ids.shape[1])[None]


class OneSequence(Packed):
    """A fault: plain causal attention, so that a response sees the responses before it."""

    def __init__(self, rows, device, one_call=False):
        super().__init__(rows, device, one_call)
        length = self.ids.shape[1]
        self.tables, self.order = [Table([Span(0, length)], device)], torch.arange(length)


class NextPrompt(Packed):
    """A fault: the first token of each response is predicted from the place before it, which is another response's."""

    def __init__(self, rows, device, one_call=False):
        super().__init__(rows, device, one_call)
        first = np.cumsum([0, *(len(row.token_ids) for row in rows)])[:-1]
        for at, row in zip(first, rows, strict=True):
            if len(row.token_ids) > 1:
                self.predicts[at] = self.predicts[at + 1] - 1


@pytest.mark.parametrize("fault", [GoesOn, OneSequence, NextPrompt])
def test_a_fault_in_the_packing_shows_in_the_statistics_and_in_the_comparison_at_load(fault, monkeypatch):
    forward = PolicyForward(model_of(LLAMA), 1.0, torch.float32)
    expected = forward(MIXED)[0]
    monkeypatch.setattr(forward_module, "Packed", fault)
    assert (forward(MIXED, pack=True)[0] - expected).abs().max() > 0.1
    assert not PolicyForward(forward.model, 1.0, torch.float32).packs


def sees_too_little(query, key, value, ends, *rest, **more):
    """A fault: the first query of a span sees its first key alone, which is a prompt's."""
    begins = zip(ends.tolist(), rest[0].tolist(), ends.tolist()[1:], strict=False)
    keys = torch.cat([torch.arange(first, first + end - begin) for begin, first, end in begins])
    return varlen_attn(query, key[keys], value[keys], ends, ends, rest[1], rest[1], **more)


def loses_a_gradient(query, key, *rest, **more):
    return varlen_attn(query, key.detach(), *rest, **more)


@pytest.mark.parametrize(
    ("kernel", "right"), [(varlen_attn, True), (sees_too_little, False), (loses_a_gradient, False)]
)
@pytest.mark.parametrize("trained", [True, False], ids=["policy", "reference"])
def test_a_fault_of_the_kernel_shows_in_the_comparison_at_load(kernel, right, trained, monkeypatch):
    forward = PolicyForward(model_of(LLAMA).requires_grad_(trained), 1.0, torch.bfloat16)
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    assert forward._only_rounds(MIXED) == right


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SHARP, sliding_window=16),
        Qwen3Config(**SHARP, head_dim=16, use_sliding_window=True, sliding_window=16, max_window_layers=1),
        FalconConfig(**{**SHARP, "bos_token_id": 1}, alibi=True),
        Gemma3Config(text_config={**SHARP, "head_dim": 8, "sliding_window": 16}, vision_config=VISION),
    ],
    ids=["mistral", "qwen3", "falcon", "gemma3"],
)
def test_a_model_with_a_window_or_with_an_attention_of_its_own_gets_padded_rows(config):
    """The window is longer than the rows that are compared at load."""
    forward = PolicyForward(model_of(config), 1.0, torch.float32)
    assert not forward.packs
    rows = rows_of((20, (9, 10, 11, 12)))
    assert [pack for _, pack in forward.batches(rows, 4096)] == [False] * len(list(micro_batches(rows, 4096)))
    for row, measured in zip(rows, forward.measure(rows, 4096), strict=True):
        alone = plain_stats(forward.model, row.prompt, row.token_ids)[0]
        assert measured.logprobs == pytest.approx(alone.numpy(), abs=1e-4)


def test_a_model_that_makes_a_mask_of_its_own_gets_padded_rows():
    """The engine must not fail when it is made, and the model keeps its attention."""
    model = model_of(DogeConfig(**SHARP))
    assert not PolicyForward(model, 1.0, torch.float32).packs
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_asks_more_of_attention_gets_padded_rows():
    """Here for sinks, which no attention but its own would compute."""
    model = model_of(LLAMA)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "s_aux": 50.0}), with_kwargs=True
        )
    assert not PolicyForward(model, 1.0, torch.float32).packs


def test_all_layers_keep_one_mask_of_the_responses_and_none_of_the_prompts():
    """For the backward pass. 3 responses of 9 tokens, of which 8 are computed, and a prompt of 20."""
    forward, kept = PolicyForward(model_of(LLAMA), 1.0, torch.float32), []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward(rows_of((20, (9, 9, 9))), pack=True)
    masks = [tensor.data_ptr() for tensor in kept if tensor.shape == (3, 1, 3 * 8, 20 + 8)]
    assert len(masks) == forward.model.config.num_hidden_layers
    assert len(set(masks)) == 1
    assert not [tensor for tensor in kept if tensor.shape[-2:] in ((20, 20), (3 * 20, 20))]
    assert not [tensor for tensor in kept if tensor.dtype == torch.bool and tensor.numel() > 20 * 20]


def test_a_prompt_is_computed_once_and_nothing_is_padded():
    model, tokens = model_of(LLAMA), []
    forward = PolicyForward(model, 1.0, torch.float32)
    model.model.layers[0].mlp.register_forward_hook(lambda _, inputs, out: tokens.append(inputs[0].numel() // 48))
    rows = rows_of((20, (3, 9, 1, 25)), (7, (4, 4)))
    with torch.no_grad():
        forward(rows, pack=True)
    assert tokens == [20 + 2 + 8 + 0 + 24 + 7 + 3 + 3]


@pytest.mark.parametrize(
    ("groups", "packed"),
    [
        ([(90, (30,) * 8)] * 4, True),
        ([(90, (120,) * 8)] * 4, True),
        ([(90, (480,) * 8)] * 2, False),
        ([(10, (27,) * 8)] * 32, False),  # the chain models
        ([(90, (30,))] * 8, False),
        ([(90, (30,) * 8)] * 2 + [(10, (27,) * 8)] * 2, True),
    ],
)
def test_rows_are_packed_where_copies_of_prompts_are_a_third_of_the_tokens(groups, packed):
    rows = rows_of(*groups)
    forward = PolicyForward(model_of(LLAMA), 1.0, torch.float32)
    batches = list(forward.batches(rows, 2048))
    assert {pack for _, pack in batches} == {packed}
    if not packed:
        assert [part for part, _ in batches] == list(micro_batches(rows, 2048))


@pytest.mark.parametrize("budget", [1, 60, 200, 10_000])
def test_packed_batches_hold_each_row_once_within_the_budget_and_a_prompts_rows_together(budget):
    batches = list(packed_batches(MIXED, budget))
    assert sorted(i for part in batches for i in part) == list(range(len(MIXED)))
    for part in batches:
        packed = Packed([MIXED[i] for i in part], CPU)
        assert packed.ids.shape[1] <= budget or len(part) == 1
    prompts = [tuple(MIXED[i].prompt) for part in batches for i in part]
    changes = sum(before != after for before, after in pairwise(prompts))
    assert changes == len(set(prompts)) - 1
    for one, next_one in pairwise(batches):
        rows = [MIXED[i] for i in one + next_one]
        tokens = sum(map(len, {tuple(row.prompt) for row in rows})) + sum(len(row.token_ids) for row in rows)
        assert tokens > budget


# -- the update -------------------------------------------------------------------------------------------------------


RATE = 0.02  # of SGD: with a larger one each step multiplies the rounding error of those before it


@pytest.fixture(scope="module")
def sharp_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sharp")
    model_of(LLAMA).save_pretrained(folder)
    ChainModel.tokenizer().save_pretrained(folder)
    return folder


def batch() -> MixedBatch:
    """Six groups with prompts of 23 tokens and responses of up to 8, the last three around a stored trajectory; one row
    that could not be graded, and one group without a signal."""
    made = random_batch(ModularChains(count=6, operands=(12,)).load(), K, 18, 8)
    made.rows[1] = [replace(row, advantage=0.0) for row in made.rows[1]]
    return made


def updated(path: Path, pack: bool, **settings) -> tuple[torch.Tensor, list, TorchEngine]:
    """Where the weights moved, and what was measured, in an update of several optimiser steps and passes with a KL."""
    optimizer = Optimizer(learning_rate=RATE, max_grad_norm=1e9, steps_per_batch=2, passes_per_batch=2)
    engine = make_engine(path, optimizer=optimizer, settings=LocalEngine(device="cpu", **settings), reference=True)
    assert engine.forward.packs
    engine.forward.packs = pack
    use_sgd(engine, RATE)
    start = weights(engine)
    stats = engine.update(batch(), MixedPolicyLoss(response_length=8, entropy_coef=0.01, kl_coef=0.1))
    statistics = [*stats.policy_logprobs, *stats.behaviour_logprobs, np.array(stats.entropies)]
    return weights(engine) - start, [*statistics, np.array([stats.metrics["policy/approx_kl"]])], engine


def test_an_update_of_several_steps_and_passes_equals_that_of_padded_rows(sharp_model):
    moved, measured, engine = updated(sharp_model, pack=False)
    assert moved.abs().max() > 5e-3
    bound = float32_error(weights(engine), batch(), moved, steps=4)
    assert repeated_share(engine.forward_rows(batch())) > 0.5
    for settings in ({}, {"micro_batch_tokens": 50}, {"gradient_checkpointing": True}):
        ours, statistics, _ = updated(sharp_model, pack=True, **settings)
        torch.testing.assert_close(ours, moved, atol=bound, rtol=0)
        for values, expected in zip(statistics, measured, strict=True):
            assert values == pytest.approx(expected, abs=1e-4)


def test_gradient_checkpointing_computes_packed_rows_again_as_they_were(sharp_model, one_call):
    """In the backward pass, also with a padded pass of the same model in between."""
    model = AutoModelForCausalLM.from_pretrained(sharp_model)
    forward = PolicyForward(model, 1.0, torch.float32)
    forward.one_call = one_call
    expected = gradients(model, forward(MIXED))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer.training = True
    values = forward(MIXED, pack=True)
    with torch.no_grad():
        forward(MIXED)
    assert_same(gradients(model, values), expected)


def test_bfloat16_rounds_packed_rows_as_much_as_padded_ones(sharp_model, one_call):
    model = AutoModelForCausalLM.from_pretrained(sharp_model)
    exact = PolicyForward(model, 1.0, torch.float32)(MIXED)
    slopes = torch.cat([slope.flatten() for slope in gradients(model, exact)])
    rounded = PolicyForward(model, 1.0, torch.bfloat16)
    rounded.one_call = one_call
    errors, angles = [], []
    for pack in (False, True):
        values = rounded(MIXED, pack)
        errors.append(float((values[0] - exact[0]).abs().mean()))
        ours = torch.cat([slope.flatten() for slope in gradients(model, values)])
        angles.append(1 - float(torch.cosine_similarity(ours, slopes, dim=0)))
    assert 0 < errors[1] < 1.5 * errors[0]
    assert 0 < angles[1] < 2 * angles[0]
