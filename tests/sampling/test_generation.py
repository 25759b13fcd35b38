"""The generation loop: it samples the policy's distribution with every kind of model, and does no unnecessary work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_builders import SMALL, SMALL_GPT2, random_model, repeated_prompts
from generated import generated
from transformers import (
    BloomConfig,
    DeepseekV3Config,
    GenerationConfig,
    GPT2Config,
    GPTNeoConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from exgrpo_orlhf.attention import shared_prompt
from exgrpo_orlhf.sampling import batch
from exgrpo_orlhf.sampling.batch import check_rows
from exgrpo_orlhf.sampling.request import EngineLost, Request, StepSeed
from exgrpo_orlhf.sampling.torch_loop import BLOCK, CHECK_EVERY, LoopSampler, _taken, generate, sample

CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "gpt2: absolute positions": GPT2Config(**SMALL_GPT2),
    "bloom: no positions at all": BloomConfig(vocab_size=18, hidden_size=32, n_layer=2, n_head=2),
    "mistral: sliding window": MistralConfig(**SMALL, sliding_window=6),
    "lfm2: layers without keys and values": Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]),
}
ENDS = [1, 5, 7]


def responses(model, prompts, *, temperature=1.0, max_new_tokens=16, seed=0, end=ENDS):
    torch.manual_seed(seed)
    rollouts = generated(model, prompts, end=end, pad=0, max_new_tokens=max_new_tokens, temperature=temperature)
    return [(rollout.token_ids.tolist(), rollout.finish) for rollout in rollouts]


@pytest.mark.parametrize("lengths", [(5,) * 8, (3, 9, 4, 7, 11, 3, 6, 10)], ids=["one length", "many lengths"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_greedy_responses_are_those_of_transformers(config, lengths):
    model, prompts = random_model(config), repeated_prompts(lengths, 3)
    width = max(lengths)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    attention = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    model.generation_config = GenerationConfig(pad_token_id=0)
    theirs = model.generate(ids, attention_mask=attention, max_new_tokens=16, do_sample=False)[:, width:].tolist()
    ends = [theirs[0][2], theirs[9][7]]
    ours = responses(model, prompts, temperature=None, end=ends)
    assert len({len(tokens) for tokens, _ in ours}) > 1, "no row left the batch before another"
    for (tokens, finish), row in zip(ours, theirs, strict=True):
        assert tokens == row[: len(tokens)]
        assert not set(tokens[:-1]) & set(ends)
        assert (tokens[-1] in ends) == (finish == "stop")
        assert finish == "stop" or len(tokens) == 16


def test_a_prompt_is_computed_once_and_an_ended_row_leaves_the_batch():
    model, prompts = random_model(CONFIGS["qwen2"]), repeated_prompts((5, 5, 5, 5), 3)
    forwarded = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: forwarded.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    lengths = [len(tokens) for tokens, _ in responses(model, prompts)]
    assert min(lengths) < max(lengths)
    still_running = [sum(length > position for length in lengths) for position in range(1, max(lengths))]
    assert forwarded == [(4, 5), *((rows, 1) for rows in still_running)]


def test_what_a_row_samples_does_not_depend_on_the_other_rows():
    """Other rows may end earlier or later or have other prompts: the row gets the same numbers and the same tokens."""
    model, prompts = random_model(CONFIGS["qwen2"]), repeated_prompts((5, 5, 5, 5), 3)
    first = responses(model, prompts)
    others = [[2, 3, 4, 6, 8]] * 6 + prompts[6:]
    second = responses(model, others)
    assert second[6:] == first[6:]
    assert second[:6] != first[:6]
    assert responses(model, prompts, seed=1) != first
    endless = responses(model, prompts, end=[-1])
    assert all(long[: len(tokens)] == tokens for (tokens, _), (long, _) in zip(first, endless, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_whole_responses_have_the_frequencies_of_the_policy(temperature):
    """Compared with the exact probability of every possible response of at most three tokens, to prompts of two
    lengths."""
    n = 6000
    config = Qwen2Config(**{**SMALL, "vocab_size": 5, "pad_token_id": None})
    model = random_model(config)
    prompts = [[2, 3]] * n + [[4, 2, 3, 2]] * n
    sampled = [
        tuple(tokens) for tokens, _ in responses(model, prompts, temperature=temperature, max_new_tokens=3, end=[1])
    ]

    def probabilities(prompt, response=(), p=1.0):
        if len(response) == 3 or 1 in response:
            return {response: p}
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0, -1].double()
        endings = {}
        for token, share in enumerate((logits / temperature).softmax(0).tolist()):
            endings |= probabilities(prompt, (*response, token), p * share)
        return endings

    for prompt, part in (([2, 3], sampled[:n]), ([4, 2, 3, 2], sampled[n:])):
        expected = probabilities(prompt)
        assert sum(expected.values()) == pytest.approx(1)
        assert set(part) <= set(expected)
        likely = {response: n * p for response, p in expected.items() if n * p >= 5}
        chi_square = sum((part.count(response) - e) ** 2 / e for response, e in likely.items())
        degrees = len(likely)
        assert degrees > 15
        assert chi_square < degrees + 4 * (2 * degrees) ** 0.5, "four standard deviations"


def test_a_token_is_chosen_by_its_share_of_the_unit_interval_and_an_impossible_one_never():
    logits = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0]).log().expand(4, -1)
    uniform = torch.tensor([0.0, 0.2499999, 0.25, 1 - 2**-53], dtype=torch.float64)
    assert sample(logits, 1.0, uniform).tolist() == [1, 1, 3, 3]
    flat = torch.zeros(1, 150_000)
    last = sample(flat, 1.0, torch.tensor([1 - 2**-53], dtype=torch.float64))
    assert last.tolist() == [149_999]
    rare = torch.full((1, 150_000), -20.0)  # each has the probability 2e-9, all of them together 3e-4
    rare[0, 0] = 0.0
    total = float((rare[0].double().exp()).sum())
    middle = sample(rare, 1.0, torch.tensor([(1 + 75_000 * np.exp(-20)) / total], dtype=torch.float64))
    assert middle.item() == pytest.approx(75_000, abs=100), "no step of the cumulative sum is lost"


@pytest.mark.parametrize("vocabulary", [18, 256, 1000])
def test_a_sampled_token_is_the_first_whose_cumulative_probability_exceeds_the_number(vocabulary):
    """Also next to borders of blocks, and where most tokens are impossible."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4000, vocabulary, generator=generator)
    logits[2000:, torch.rand(vocabulary, generator=generator) < 0.9] = -torch.inf
    logits[2000:, vocabulary // 2] = 0
    cumulative = logits.softmax(1).cumsum(1, dtype=torch.float64)
    uniform = torch.rand(4000, dtype=torch.float64, generator=generator)
    uniform[:2] = torch.tensor([0.0, 1 - 2**-53])
    uniform[2000:2002] = uniform[:2]
    tokens = sample(logits, 1.0, uniform)
    expected = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True).squeeze(1)
    assert (tokens == expected)[2:].sum() >= 3995, "a border of two tokens may be within a rounding of float64"
    assert logits.gather(1, tokens[:, None]).isfinite().all()


def test_an_impossible_first_token_of_a_block_is_not_chosen_at_the_border_of_two_blocks():
    """There rounding decides which side of the border a number is on."""
    logits = 3 * torch.randn(2000, 1024, generator=torch.Generator().manual_seed(0))
    logits[:, ::BLOCK] = -torch.inf
    cumulative = logits.softmax(1).unflatten(1, (-1, BLOCK)).sum(2, dtype=torch.float64).cumsum(1)
    border = cumulative[:, :-1] / cumulative[:, -1:]
    for uniform in (border, border.nextafter(torch.zeros_like(border)), border.nextafter(torch.ones_like(border))):
        for one in uniform.T:
            assert logits.gather(1, sample(logits, 1.0, one)[:, None]).isfinite().all()


NOT_FINITE = {  # from which token on, how many are computed until it is noticed, what ends a row, temperature
    "at once": (1, CHECK_EVERY, [], None),
    "sampled": (1, CHECK_EVERY, [], 1.0),
    "early": (3, CHECK_EVERY, [], None),
    "at a look": (CHECK_EVERY, CHECK_EVERY, [], None),
    "after a look": (CHECK_EVERY + 1, 2 * CHECK_EVERY, [], None),
    "near the end": (2 * CHECK_EVERY + 2, 2 * CHECK_EVERY + 6, [], None),
    "where the row ends": (3, 3, [0], None),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_logits_that_are_not_finite_are_named_by_token_before_a_response_is_returned(name):
    """In the case 'where the row ends' the argmax of NaN logits is token 0, which ends the row."""
    begin, computed, ends, temperature = NOT_FINITE[name]
    model, forwarded = random_model(Qwen2Config(**{**SMALL, "max_position_embeddings": 256})), []

    def overflow(module, args, logits):
        forwarded.append(logits)
        only = torch.full_like(logits, float("nan") if len(forwarded) >= begin else 0.0)
        only[..., 4] += 1
        return only

    model.lm_head.register_forward_hook(overflow)
    with pytest.raises(ArithmeticError, match=f"the logits of token {begin} of a response are not finite"):
        responses(model, [[2, 3]], temperature=temperature, end=[*ends, 99], max_new_tokens=2 * CHECK_EVERY + 6)
    assert len(forwarded) == computed


@pytest.mark.parametrize("lengths", [(5,) * 4, (3, 9, 4, 7)], ids=["one length", "many lengths"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_cache_with_room_holds_what_a_growing_one_does(config, lengths, monkeypatch):
    """Under autocast, where the reserved cache is used on a CPU too: the same responses, from keys that are kept in
    bfloat16. There is room for 3 tokens at a time, so that the buffers grow several times, between the ends of rows."""
    model, prompts = random_model(config), repeated_prompts(lengths, 3)
    kinds = set()

    def look(module, args, kwargs, output):
        for layer in output.past_key_values.layers:
            kinds.add((type(layer).__name__, getattr(layer, "keys", None) is not None and layer.keys.dtype))

    with torch.autocast("cpu", torch.bfloat16):
        monkeypatch.setattr(shared_prompt, "BLOCK", 3)
        model.register_forward_hook(look, with_kwargs=True)
        ours = responses(model, prompts)
        reserved = kinds & {("ReservedLayer", torch.bfloat16), ("DynamicSlidingWindowLayer", torch.float32)}
        monkeypatch.setattr(batch, "reserve", lambda *_: None)
        assert ours == responses(model, prompts)
    assert reserved
    assert len({len(tokens) for tokens, _ in ours}) > 1, "no row left the batch before another"


def test_a_cache_with_room_stays_where_it_is_while_tokens_are_appended():
    model, at = random_model(CONFIGS["qwen2"]), []

    def look(module, args, kwargs, output):
        at.append([layer.keys.data_ptr() for layer in output.past_key_values.layers])

    model.register_forward_hook(look, with_kwargs=True)
    with torch.autocast("cpu", torch.bfloat16):
        responses(model, [[2, 3, 4]] * 2, end=[-1], max_new_tokens=40)
    assert len(at) == 40
    assert len(set(map(tuple, at[1:]))) == 1, "all but the prompt's"


def test_a_model_without_a_cache_of_rows_is_refused():
    model = random_model(MambaConfig(vocab_size=18, hidden_size=32, num_hidden_layers=2, state_size=8))
    with pytest.raises(ValueError, match="MambaForCausalLM keeps no cache whose rows can be selected"):
        responses(model, [[2, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_model_that_generates_as_transformers_does_passes_the_test_of_its_rows(config, dtype):
    check_rows(random_model(config).to(dtype), 0, turns=True)


def test_a_model_whose_positions_are_shifted_by_padding_is_refused(monkeypatch):
    model = random_model(CONFIGS["gpt2: absolute positions"])
    forward = model.forward

    def without_positions(input_ids, attention_mask=None, past_key_values=None, use_cache=None, logits_to_keep=0):
        kept = {"past_key_values": past_key_values, "use_cache": use_cache, "logits_to_keep": logits_to_keep}
        return forward(input_ids, attention_mask=attention_mask, **kept)

    monkeypatch.setattr(model, "forward", without_positions)
    with pytest.raises(ValueError, match=r"rows of a batch, .* do not have the logits .*\(they differ\)"):
        check_rows(model, 0)


def test_a_model_that_cannot_go_on_from_what_was_computed_is_refused_for_episodes():
    model = random_model(CONFIGS["llama"])

    def positions_from_0(module, args, kwargs):
        if kwargs.get("past_key_values") is not None and kwargs["input_ids"].shape[1] == 2:
            return args, kwargs | {"position_ids": torch.arange(2)[None].expand(2, -1)}
        return None

    model.register_forward_pre_hook(positions_from_0, with_kwargs=True)
    check_rows(model, 0)
    with pytest.raises(ValueError, match=r"do not have the logits .*\(they differ\)"):
        check_rows(model, 0, turns=True)


@pytest.mark.slow
def test_top_p_keeps_the_most_probable_tokens_that_together_reach_it():
    """Frequencies of 200,000 draws against the distribution that is left, ties by position."""
    probabilities = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1])
    uniform = torch.rand(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits = probabilities.log().expand(len(uniform), -1)
    for top_p, kept in ((0.39, [1]), (0.41, [1, 3]), (0.75, [1, 2, 3]), (0.96, [*range(5)]), (1.0, [*range(5)])):
        drawn = torch.bincount(sample(logits, 1.0, uniform, top_p), minlength=5) / len(uniform)
        expected = torch.zeros(5)
        expected[kept] = probabilities[kept] / probabilities[kept].sum()
        assert (drawn > 0).nonzero().flatten().tolist() == kept
        torch.testing.assert_close(drawn, expected, atol=0.005, rtol=0)


@pytest.mark.slow
def test_a_seeded_response_depends_on_its_seed_and_not_on_the_rows_beside_it():
    """In float64, in which the shape of a batch changes no token. 80 tokens are more than the numbers drawn ahead."""
    model = random_model(Qwen2Config(**{**SMALL, "max_position_embeddings": 128})).double()
    prompts = repeated_prompts((3, 5, 4, 6), 3)
    settings = {"end": [], "pad": 0, "max_new_tokens": 80, "temperature": 1.3, "top_p": 0.9}
    seeds = list(range(100, 100 + len(prompts)))
    together = generated(model, prompts, seeds=seeds, **settings)
    backwards = generated(model, prompts[::-1], seeds=seeds[::-1], **settings)[::-1]
    alone = [
        generated(model, [prompt], seeds=[seed], **settings)[0] for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    for a, b, c in zip(together, backwards, alone, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_array_equal(a.token_ids, c.token_ids)
    other = generated(model, prompts, seeds=[seed + 1000 for seed in seeds], **settings)
    assert all((a.token_ids != b.token_ids).any() for a, b in zip(together, other, strict=True))


def turns(model, keep, count=3):
    """Tokens of each episode and what is kept, after some turns, with 0 to 3 tokens observed after each."""
    rng = np.random.default_rng(2)
    playing = dict(enumerate(repeated_prompts((3, 9, 4, 7), 3)))
    kept, texts = {}, dict(playing)
    for turn in range(count):
        prompts = list(texts.values())
        settings = {"end": ENDS, "pad": 0, "max_new_tokens": 40, "limits": [40 - i for i in texts], "temperature": 1.0}
        sessions = {"sessions": [*texts], "kept": kept} if keep else {}
        rollouts = generated(model, prompts, seeds=[100 * turn + i for i in texts], **sessions, **settings)
        for i, one in zip(texts, rollouts, strict=True):
            playing[i] = [*texts[i], *one.token_ids.tolist()]
        texts = {i: [*playing[i], *rng.integers(2, 18, i % 4).tolist()] for i in texts if i % 5 != turn}
    return list(playing.values()), kept


LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
KEPT_OTHERWISE = {
    "deepseek: latents": DeepseekV3Config(**{**SMALL, "num_key_value_heads": 2}, **LATENT, **EXPERTS),
    "gpt-neo: a window of columns": GPTNeoConfig(
        **{"vocab_size": 18, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "window_size": 6},
        attention_types=[[["global", "local"], 1]],
    ),
    "llama: rotated by length": LlamaConfig(**{**SMALL, "max_position_embeddings": 16}, rope_parameters=ROPE),
}


@pytest.mark.parametrize("least", [0, 10**9], ids=["one copy of each prompt", "a copy for each row"])
@pytest.mark.parametrize("config", [*CONFIGS.values(), *KEPT_OTHERWISE.values()], ids=[*CONFIGS, *KEPT_OTHERWISE])
def test_a_turn_computes_what_has_been_added_to_its_context_alone_and_is_the_same(config, least, monkeypatch):
    """A model with other layers than those of full attention computes its context again."""
    monkeypatch.setattr(shared_prompt, "LEAST", least)
    model, widths = random_model(config), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    anew, _ = turns(model, keep=False)
    assert sum(width > 9 for width in widths) == 2, "a context at the beginning of the second and the third turn"
    widths.clear()
    episodes, kept = turns(model, keep=True)
    assert episodes == anew
    keeps = config in [CONFIGS[name] for name in ("llama", "qwen2", "qwen3", "gpt2: absolute positions")]
    assert any(width > 9 for width in widths) != keeps
    lengths = {i: states.shape[2] for i, states in kept.items()}
    assert lengths == {i: len(tokens) - 1 for i, tokens in enumerate(episodes) if keeps}, "all but the last token"


def test_what_was_computed_is_taken_where_each_prompt_has_it_and_left_where_a_turn_follows():
    tensor, row = torch.zeros(4, 1, 2, 3), torch.ones(4, 1, 2, 3)
    requests, kept = [Request((), 0, 4, 0.0, session=i) for i in range(3)], {0: tensor, 1: tensor, 2: row}
    first, second = _taken(kept, requests, [0, 0, 1])
    assert first is tensor
    assert second is row
    assert kept == {}
    assert _taken({0: tensor, 1: tensor}, requests, [0, 0, 1]) is None
    settings = {"end": ENDS, "pad": 0, "max_new_tokens": 4, "temperature": None}
    for last in (True, False):
        of_turns = {"sessions": range(3), "last_turn": last, "kept": kept}
        generated(random_model(CONFIGS["llama"]), [[2, 3]] * 3, **of_turns, **settings)
        assert [*kept] == ([] if last else [0, 1, 2])


def test_a_turn_under_autocast_goes_on_from_keys_and_values_of_either_dtype(monkeypatch):
    for least in (0, 10**9):  # float32, bfloat16
        monkeypatch.setattr(shared_prompt, "LEAST", least)
        model = random_model(CONFIGS["llama"])
        with torch.autocast("cpu", torch.bfloat16):
            episodes, kept = turns(model, keep=True)
            anew, _ = turns(model, keep=False)
        assert {states.dtype for states in kept.values()} == {torch.bfloat16 if least else torch.float32}
        same = [a == b for a, b in zip(episodes, anew, strict=True)]
        assert np.mean(same) > 0.6, "the rest differ by rounding"


def test_too_little_memory_for_a_chunk_is_said_with_what_helps_a_run_that_has_a_checkpoint(monkeypatch):
    """A resumed run keeps the rows of a chunk: its draws are theirs (tests/scripts/test_begin_from.py)."""

    def too_large(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("exgrpo_orlhf.sampling.torch_loop.generate", too_large)
    sampler = LoopSampler(random_model(Qwen2Config(**SMALL)), None, ENDS, 0, rows=4)
    with pytest.raises(EngineLost, match=r"2 responses.*LocalEngine\.generation_rows.*--from CHECKPOINT --with-buffer"):
        [*sampler.sample([Request([1, 2], StepSeed(0, 1), 4, 1.0, n=2)])]


@pytest.mark.parametrize("other", [{"temperature": 0.5}, {"top_p": 0.9}, {"end": (3,)}, {"stop": ("x",)}])
def test_requests_that_differ_in_what_is_one_for_all_are_refused(other):
    request = Request([2, 3], 0, 4, 1.0)
    with pytest.raises(ValueError, match="requests of one call differ"):
        generate(random_model(CONFIGS["llama"]), [request, replace(request, **other)], end=ENDS, pad=0)
