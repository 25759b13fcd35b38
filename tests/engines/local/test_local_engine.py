"""The local engine on real models: selection, sampling, and the models that it accepts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from engine_builders import (
    SMALL,
    K,
    make_engine,
    plain_stats,
    questions,
    saved_model,
    stored_responses,
)
from run_builders import ends_by_its_template
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    GenerationConfig,
    MiniMaxConfig,
)

from exgrpo_orlhf.engines.rows import ForwardRow, micro_batches
from exgrpo_orlhf.questions.prompts import Prompts
from exgrpo_orlhf.replay import Plan, TrajectorySelector
from exgrpo_orlhf.settings import LocalEngine, Sampling
from exgrpo_orlhf.testbed.tiny_models import END, PAD

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler")  # some tests take another optimiser or skip updates


# -- entropy selection ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by", "prefer", "temperature"),
    [("entropy", "lowest", 1.0), ("perplexity", "highest", 1.0), ("perplexity", "lowest", 0.7)],
)
def test_selection_takes_the_extreme_of_the_score_over_exactly_the_response(warm_model, by, prefer, temperature):
    """T1. Mixed lengths in one padded batch; the reference is computed row by row, unpadded, from the whole logits:
    the entropy at temperature 1, the perplexity at the sampling temperature."""
    engine = make_engine(warm_model, sampling=Sampling(temperature=temperature, max_response_tokens=24))
    rng = np.random.default_rng(1)
    chains = questions(12)
    candidates = stored_responses(chains, rng, 5)
    selector = TrajectorySelector(by, prefer)
    scores = engine.score(selector.to_score(candidates))
    chosen = selector.choose(candidates, scores, rng)
    for question in chains:
        stored, prompt = candidates[question], engine.prompts.encode(question)
        plain = [plain_stats(engine.model, prompt, t.token_ids, temperature) for t in stored]
        entropies = [float(entropy.mean()) for _, entropy in plain]
        perplexities = [float(torch.exp(-logprobs.mean())) for logprobs, _ in plain]
        assert [one.entropy for one in scores[question]] == pytest.approx(entropies, abs=1e-5)
        assert [np.exp(-one.logprobs.mean()) for one in scores[question]] == pytest.approx(perplexities, rel=1e-5)
        extreme = np.argmin if prefer == "lowest" else np.argmax
        assert chosen[question.id].trajectory is stored[int(extreme(entropies if by == "entropy" else perplexities))]
    shortest = sum(len(chosen[q.id].trajectory) == min(map(len, candidates[q])) for q in chains)
    assert shortest < len(chains), "a length bias would take the shortest every time"


@pytest.mark.parametrize("budget", [1, 500, 4000])
def test_little_of_a_micro_batch_is_padding(budget):
    """T20. Every row once, within the budget, at most 5 % padding in any batch."""
    rng = np.random.default_rng(budget)
    rows = [ForwardRow([1] * int(rng.integers(1, 20)), np.ones(int(n), np.int32)) for n in rng.geometric(0.02, 300)]
    batches = list(micro_batches(rows, budget))
    assert sorted(i for batch in batches for i in batch) == list(range(300))
    for batch in batches:
        lengths = [len(rows[i]) for i in batch]
        padded = len(batch) * max(lengths)
        assert padded <= budget or len(batch) == 1
        assert sum(lengths) >= 0.95 * padded
    assert len(batches) < 300 or budget == 1


def test_without_a_limit_on_padding_a_micro_batch_is_as_full_as_the_budget_allows():
    rng = np.random.default_rng(0)
    rows = [ForwardRow([1], np.ones(int(n), np.int32)) for n in rng.geometric(0.02, 300)]
    batches = list(micro_batches(rows, 4000, padding=1.0))
    assert sorted(i for batch in batches for i in batch) == list(range(300))
    sizes = [(len(batch), len(rows[batch[0]])) for batch in batches]
    assert all(count * longest <= 4000 < (count + 1) * longest for count, longest in sizes[:-1])
    assert len(batches) < len(list(micro_batches(rows, 4000))) / 2


# -- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "beside"), [(None, K - 1), (2, 2), (1, 1)])
def test_replayed_questions_get_one_rollout_fewer_and_groups_keep_plan_order(warm_model, setting, beside):
    """T9: nothing is generated for the stored row. Or as many as Plan.rollouts_per_replayed asks for."""
    chains = questions(5)
    plan = Plan(1, chains[:3], chains[3:], {}, rollouts_per_replayed=setting)
    groups = plan.in_order(make_engine(warm_model).rollout(plan, K))
    assert [group.question for group in groups] == chains
    assert [len(group.rollouts) for group in groups] == [K, K, K, beside, beside]
    assert [group.planned_replay for group in groups] == [False] * 3 + [True] * 2


def test_sampling_depends_on_seed_step_and_round_alone_and_leaves_the_global_generator_alone(warm_model):
    engine, chains = make_engine(warm_model), questions(4)

    def sample(used, step, round=0):
        return [r.token_ids.tolist() for g in used.rollout(Plan(step, chains, [], {}, round), K) for r in g.rollouts]

    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first = sample(engine, 1)
    assert torch.equal(torch.random.get_rng_state(), before)
    sample(engine, 2)
    torch.manual_seed(123)
    assert sample(engine, 1) == first
    assert sample(engine, 2) != first
    second = sample(engine, 1, round=1)
    assert second != first, "questions that replace others get other random numbers"
    assert sample(engine, 1, round=1) == second
    assert sample(make_engine(warm_model, seed=1), 1) != first


def test_a_models_own_sampling_filters_are_off_in_training_and_kept_in_its_checkpoint(warm_model, tmp_path):
    """With filters the samples would have another distribution than the one the importance weights divide by."""
    model = AutoModelForCausalLM.from_pretrained(warm_model)
    model.generation_config = GenerationConfig(
        do_sample=True, top_k=1, top_p=0.1, repetition_penalty=5.0, eos_token_id=1, pad_token_id=0, min_new_tokens=20
    )
    model.save_pretrained(tmp_path / "filtered")
    AutoTokenizer.from_pretrained(warm_model).save_pretrained(tmp_path / "filtered")
    engine, plain = make_engine(tmp_path / "filtered"), make_engine(warm_model)
    plan = Plan(1, questions(6), [], {})
    sampled, expected = engine.rollout(plan, K), plain.rollout(plan, K)
    for group, other in zip(sampled, expected, strict=True):
        for ours, theirs in zip(group.rollouts, other.rollouts, strict=True):
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    engine.save(tmp_path / "saved")
    kept = GenerationConfig.from_pretrained(tmp_path / "saved")
    assert (kept.top_k, kept.top_p, kept.repetition_penalty) == (1, 0.1, 5.0)


def test_every_end_token_of_the_generation_config_ends_a_response(warm_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(warm_model)
    semicolon = AutoTokenizer.from_pretrained(warm_model).convert_tokens_to_ids(";")
    model.generation_config.eos_token_id = [semicolon]
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(warm_model).save_pretrained(tmp_path)
    engine = make_engine(tmp_path)
    assert engine.end == sorted([semicolon, engine.tokenizer.eos_token_id])
    rollouts = [r for g in engine.rollout(Plan(1, questions(8), [], {}), K) for r in g.rollouts]
    assert any(rollout.token_ids[-1] == semicolon for rollout in rollouts)
    assert not any((rollout.token_ids[:-1] == semicolon).any() for rollout in rollouts)


def test_the_token_that_closes_the_templates_turn_ends_a_response_and_the_checkpoint_names_it(warm_model, tmp_path):
    """A base model's configuration does not name it: its response would go on with a turn of the user's."""
    engine = make_engine(ends_by_its_template(warm_model, tmp_path / "model"), prompts=Prompts("chat", max_tokens=32))
    pad, end = (engine.tokenizer.convert_tokens_to_ids(token) for token in (PAD, END))
    assert engine.tokenizer.eos_token_id == engine.model.generation_config.eos_token_id == pad
    rollouts = [r for g in engine.rollout(Plan(1, questions(8), [], {}), K) for r in g.rollouts]
    assert any(r.token_ids[-1] == end and r.finish == "stop" for r in rollouts)
    assert not any((r.token_ids[:-1] == end).any() for r in rollouts)
    engine.save(tmp_path / "saved")
    assert GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id == sorted([pad, end])
    other = make_engine(tmp_path / "saved", prompts=Prompts("plain", max_tokens=32))
    assert other.end == sorted([pad, end]), "also with another template"


def test_sampled_tokens_have_the_frequencies_of_the_measured_log_probs(warm_model):
    """The first token of 4,000 responses at temperature 1.3 against the policy's distribution."""
    engine = make_engine(
        warm_model,
        sampling=Sampling(temperature=1.3, max_response_tokens=1),
        settings=LocalEngine(generation_rows=1000),
    )
    question = questions(1)[0]
    [group] = engine.rollout(Plan(1, [question], [], {}), 4000)
    counts = np.bincount([rollout.token_ids[0] for rollout in group.rollouts], minlength=18)
    with torch.no_grad():
        logits = engine.model(input_ids=torch.tensor([engine.prompts.encode(question)])).logits[0, -1]
    p = (logits.double() / 1.3).softmax(0).numpy()
    likely = p > 1e-3
    chi_square = ((counts[likely] - 4000 * p[likely]) ** 2 / (4000 * p[likely])).sum()
    assert chi_square < 45, "the 99.9 % point of chi-square for 17 degrees of freedom is 40.8"


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [0.5, 30.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_caps_its_logits_is_refused(cap, dtype, warm_model, tmp_path):
    """Also if the cap is far above the logits that are compared, and if rounding would hide it."""
    config = Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=cap, query_pre_attn_scalar=16)
    ours, transformers_own = (
        "does more to its logits.*scaling or capping",
        "does not support an attention implementation",
    )
    with pytest.raises(ValueError, match=f"Gemma2ForCausalLM ({ours}|{transformers_own})"):
        make_engine(saved_model(config, warm_model, tmp_path), settings=LocalEngine(device="cpu", dtype=dtype))


def test_a_model_whose_cache_cannot_lose_rows_is_refused_before_it_generates(warm_model, tmp_path):
    config = MiniMaxConfig(
        **SMALL, head_dim=16, block_size=4, num_local_experts=2, layer_types=["linear_attention", "full_attention"]
    )
    model = saved_model(config, warm_model, tmp_path)
    with pytest.raises(ValueError, match="cannot generate with MiniMaxForCausalLM: rows of a batch"):
        make_engine(model)
    make_engine(model, generates=False)


def test_prompts_and_responses_longer_than_the_models_positions_are_refused(warm_model):
    with pytest.raises(ValueError, match=r"= 257 exceeds the 256 positions"):
        make_engine(warm_model, sampling=Sampling(max_response_tokens=225))
    make_engine(warm_model, sampling=Sampling(max_response_tokens=224))


def test_a_generation_config_that_could_not_be_saved_is_refused_before_training(warm_model, tmp_path):
    for file in warm_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
    with pytest.raises(ValueError, match="its generation config could not be saved with a checkpoint"):
        make_engine(tmp_path)


@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_a_device_that_this_engine_has_not_is_named(warm_model, device):
    with pytest.raises(ValueError, match=rf"LocalEngine\.device = '{device}' is neither a CPU nor a GPU of CUDA"):
        make_engine(warm_model, settings=LocalEngine(device=device))


def test_a_gpu_that_is_not_there_is_named(warm_model):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=r"LocalEngine\.device = 'cuda', but torch sees no GPU"):
        make_engine(warm_model, settings=LocalEngine(device="cuda"))
