"""Decoding with one copy of each prompt: the responses of copied prompts, for every model that it fits."""

from __future__ import annotations

import copy
import weakref
from functools import partial

import engine_builders
import numpy as np
import pytest
import torch
from engine_builders import SMALL, SMALL_GPT2, repeated_prompts
from generated import generated
from transformers import (
    DiffLlamaConfig,
    Gemma3Config,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from exgrpo_orlhf.attention import packing, shared_prompt
from exgrpo_orlhf.attention.packing import Unfit
from exgrpo_orlhf.attention.shared_prompt import SharedPromptCache, first
from exgrpo_orlhf.engines.local.forward import PolicyForward
from exgrpo_orlhf.engines.rows import ForwardRow
from exgrpo_orlhf.sampling import batch
from exgrpo_orlhf.sampling.batch import Batch

random_model = partial(engine_builders.random_model, biases=True)
GROUPED = {**SMALL, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "experts_implementation": "eager"}
CONFIGS = {
    "llama": LlamaConfig(**GROUPED),
    "llama without groups": LlamaConfig(**{**GROUPED, "num_key_value_heads": 6}),
    "qwen2, with biases": Qwen2Config(**{**SMALL, "num_attention_heads": 4}),
    "qwen3, with norms of queries and keys": Qwen3Config(**GROUPED),
    "qwen3-moe, with experts": Qwen3MoeConfig(**GROUPED, **EXPERTS),
    "gpt2, absolute positions": GPT2Config(**SMALL_GPT2, tie_word_embeddings=False),
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
UNFIT = {
    "a sliding window": MistralConfig(**SMALL, sliding_window=6),
    "layers without keys and values": Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]),
    "an attention of its own": LlamaConfig(**SMALL, attn_implementation="eager"),
    "values changed after the cache": DiffLlamaConfig(**{**SMALL, "num_key_value_heads": 2}),
    "images too, and a window": Gemma3Config(text_config={**SMALL, "head_dim": 16}, vision_config=VISION),
}
LENGTHS = (4, 1, 9, 4, 12)  # of the prompts
COUNTS = (5, 1, 3, 8, 2)  # of their responses
SETTINGS = {
    "sampled": {"temperature": 1.0},
    "greedy": {"temperature": None},
    "with seeds and top_p": {"temperature": 1.3, "top_p": 0.9, "seeds": list(range(sum(COUNTS)))},
}


@pytest.fixture(autouse=True)
def also_small_batches(monkeypatch):
    monkeypatch.setattr(shared_prompt, "LEAST", 0)


@pytest.fixture
def attended(monkeypatch) -> list[int]:
    """The number of rows of each call of the attention function."""
    rows, attend = [], SharedPromptCache.attend

    def count(self, query, key, value):
        output = attend(self, query, key, value)
        rows.append(len(key))
        return output

    monkeypatch.setattr(SharedPromptCache, "attend", count)
    return rows


def responses(model, *, counts=COUNTS, lengths=LENGTHS, tokens=24, **settings):
    prompts = repeated_prompts(lengths, counts)
    torch.manual_seed(1)
    rollouts = generated(model, prompts, end=[1, 5], pad=0, max_new_tokens=tokens, **settings)
    return [(rollout.token_ids.tolist(), rollout.finish) for rollout in rollouts]


def assert_as_copied(model, attended, **settings) -> list:
    """The responses, which are those of copied prompts; `attended` counts those of shared ones alone."""
    ours, calls = responses(model, **settings), len(attended)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "fits", lambda *_: False)
        assert ours == responses(model, **settings)
    assert len(attended) == calls
    return ours


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_responses_are_those_of_copied_prompts(config, settings, attended, monkeypatch):
    """In float64, in which rounding changes no token. Rows end at different times, and prompts lose all rows."""
    monkeypatch.setattr(shared_prompt, "BLOCK", 5)  # the buffers grow several times
    assert_as_copied(random_model(config).double(), attended, **settings)
    assert len(set(attended)) > 1, "no row left the batch before another"


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [((7, 7), (4, 4)), ((3, 8), (4, 4)), ((5,), (6,)), ((2, 6, 4, 7, 3), (1, 1, 1, 1, 1))],
    ids=["one length", "two lengths", "one prompt", "a response each"],
)
def test_responses_are_those_of_copied_prompts_in_other_batches(lengths, counts, attended):
    model = random_model(CONFIGS["llama"]).double()
    assert_as_copied(model, attended, lengths=lengths, counts=counts, temperature=1.0)
    assert attended


def continued(model, dropping=(), dtype=torch.float32):
    """Logits (rows, V) of each of 6 positions of a batch, and of forward passes over whole sequences in float32."""
    prompts, owner = repeated_prompts(LENGTHS, 1), [i for i, count in enumerate(COUNTS) for _ in range(count)]
    sequences = [list(prompts[i]) for i in owner]
    rng, logits = np.random.default_rng(1), []
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            rows = Batch(model, prompts, owner, 0, 6)
        for position in range(6):
            expected = [model(torch.tensor([sequence])).logits[0, -1] for sequence in sequences]
            logits.append((rows.logits.float(), torch.stack(expected)))
            if position in dropping:
                kept = torch.from_numpy(np.sort(rng.permutation(len(sequences))[: len(sequences) // 2]))
                sequences = [sequences[i] for i in rows.keep(kept)]
            tokens = rng.integers(2, 18, len(sequences))
            for sequence, token in zip(sequences, tokens, strict=True):
                sequence.append(int(token))
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                rows.append(torch.from_numpy(tokens))
    return logits


def test_under_autocast_logits_are_as_near_to_float32_as_those_of_copied_prompts(attended, monkeypatch):
    model = random_model(CONFIGS["llama"])

    def error() -> float:
        logits = continued(model, dropping=(1,), dtype=torch.bfloat16)
        return float(
            torch.cat([(ours.softmax(1) - expected.softmax(1)).abs().sum(1) for ours, expected in logits]).mean()
        )

    ours = error()
    assert attended
    monkeypatch.setattr(batch, "fits", lambda *_: False)
    assert 0 < ours < 1.2 * error()


@pytest.mark.parametrize("config", UNFIT.values(), ids=UNFIT.keys())
def test_other_models_are_given_copies(config, attended):
    assert_as_copied(random_model(config).double(), attended, lengths=(7, 7), counts=(4, 4), temperature=1.0)
    assert not attended


def test_a_model_that_asks_more_of_attention_is_given_copies_at_the_first_token(attended):
    """Here for sinks, which this model's own attention does not know either. Some rows have ended by then."""
    model, implementations = random_model(CONFIGS["llama"]).double(), []

    def ask(module, args, kwargs):
        implementations.append(model.config._attn_implementation)
        return args, {**kwargs, "s_aux": 50.0}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(ask, with_kwargs=True)
    ours = assert_as_copied(model, attended, temperature=1.0)
    assert not attended
    assert implementations.count(packing.SHARED) == 1
    assert min(len(tokens) for tokens, _ in ours) == 1


def test_a_model_with_a_layer_that_attends_by_itself_is_given_copies_at_the_first_token(attended):
    model = random_model(CONFIGS["llama"]).double()
    model.model.layers[1].self_attn.config = copy.deepcopy(model.config)
    assert_as_copied(model, attended, temperature=1.0)
    assert len(attended) == 1, "the first layer, at the first token"


def test_a_model_that_asks_more_of_attention_later_is_an_error(attended):
    """Copies made then would lack the tokens of the response so far."""
    model = random_model(CONFIGS["llama"])

    def ask(module, args, kwargs):
        return args, {**kwargs, **({"s_aux": 50.0} if len(attended) >= 4 else {})}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(ask, with_kwargs=True)
    with pytest.raises(Unfit, match="attention is called with s_aux"):
        responses(model, temperature=1.0)


def test_small_batches_are_given_copies(attended, monkeypatch):
    """Two key-value heads of 8 features, prompts of 4 columns: 64 numbers a row."""
    model = random_model(CONFIGS["llama"])
    monkeypatch.setattr(shared_prompt, "LEAST", 64 * 6)
    responses(model, lengths=(4,), counts=(5,), temperature=1.0)
    assert not attended
    responses(model, lengths=(4,), counts=(6,), temperature=1.0)
    assert attended


def test_the_models_own_attention_is_back_after_every_token_and_every_error():
    model, seen = random_model(CONFIGS["llama"]), []
    model.register_forward_hook(lambda *_: seen.append(model.config._attn_implementation))
    responses(model, temperature=1.0)
    assert {"sdpa", packing.SHARED} == set(seen), "for the prompts, and for the rest"
    assert model.config._attn_implementation == "sdpa"

    def fail(module, args):
        if model.config._attn_implementation != "sdpa":
            raise MemoryError

    model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        responses(model, temperature=1.0)
    assert model.config._attn_implementation == "sdpa"


def test_prompts_are_shared_after_an_update_with_packed_rows_too(attended):
    """Packing leaves its own attention function in the model's configuration."""
    model, prompts = random_model(CONFIGS["llama"]), repeated_prompts(LENGTHS, 4)
    settings = {"end": [1], "pad": 0, "max_new_tokens": 6, "temperature": None}
    before = generated(model, prompts, **settings)
    calls, forward = len(attended), PolicyForward(model, 1.0, torch.float32)
    rows = [ForwardRow(prompt, rollout.token_ids) for prompt, rollout in zip(prompts, before, strict=True)]
    forward(rows, pack=True)[0].sum().backward()
    after = generated(model, prompts, **settings)
    assert len(attended) == 2 * calls > 0
    assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(before, after, strict=True))


def test_a_prompt_is_held_once_whatever_the_number_of_its_rows(monkeypatch):
    model, made = random_model(CONFIGS["llama"]), []
    create = SharedPromptCache.__init__
    monkeypatch.setattr(SharedPromptCache, "__init__", lambda self, *args: (create(self, *args), made.append(self))[0])
    responses(model, lengths=(9, 4), counts=(7, 7), tokens=4, temperature=1.0)
    for pair in made[0].prompts:
        assert {tuple(tensor.shape[1:]) for tensor in pair} == {(2, 9, 8)}
        assert all(len(tensor) <= 2 for tensor in pair)


@torch.no_grad()
def test_after_the_first_token_no_copy_of_the_prompts_is_kept():
    rows = Batch(random_model(CONFIGS["llama"]), repeated_prompts((9, 4), 1), [0, 0, 1], 0, 2)
    filled = weakref.ref(rows.cache)
    rows.append(torch.tensor([2, 3, 4]))
    assert filled() is None


def test_the_memory_of_dropped_rows_is_given_back_when_more_than_half_are_dropped():
    rows = torch.randn(8, 3)
    five = first(rows, 5)
    assert five.data_ptr() == rows.data_ptr()
    three = first(five, 3)
    assert torch.equal(three, rows[:3])
    assert three.untyped_storage().nbytes() == three.nbytes
