"""The local engine on real models: what is measured, selected, sampled and updated."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    Qwen3Config,
)

from exgrpo_orlhf.engines.local import LocalEngine, LocalSettings
from exgrpo_orlhf.engines.local.forward import ForwardRow, micro_batches
from exgrpo_orlhf.engines.local.update import NonFiniteUpdate
from exgrpo_orlhf.objective import GroupAdvantages, MixedPolicyLoss
from exgrpo_orlhf.prompts import Prompts
from exgrpo_orlhf.replay import (
    DifficultyBuckets,
    Grade,
    MixedBatch,
    Plan,
    Question,
    QuestionSampler,
    ReplayMixer,
    Rollout,
    RolloutGroup,
    Row,
    Trajectory,
    TrajectorySelector,
)
from exgrpo_orlhf.rewards import Verifier
from exgrpo_orlhf.settings import Optimizer, Sampling
from exgrpo_orlhf.tasks.modular_chains import ModularChains

K = 4
ENTROPY = TrajectorySelector().score
pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler")  # some tests take another optimiser or skip updates


def make_engine(model: Path, *, settings=None, optimizer=None, sampling=None, **more) -> LocalEngine:
    return LocalEngine(
        settings or LocalSettings(device="cpu"),
        optimizer or Optimizer(learning_rate=1e-3),
        sampling or Sampling(max_response_tokens=24),
        Prompts(max_tokens=32),
        model_path=model,
        **more,
    )


def questions(n: int) -> list[Question]:
    return ModularChains(count=n, operands=(2, 3, 4)).load()


def trajectory(rng: np.random.Generator, length: int, step: int = 0) -> Trajectory:
    ids = rng.integers(2, 18, length).astype(np.int32)
    return Trajectory(ids, rng.normal(-1.5, 0.5, length).astype(np.float32), 1.0, step)


def mixed_batch(engine: LocalEngine, n: int = 6) -> MixedBatch:
    """Real rollouts with made-up rewards, so that every group has a signal; the last half replays a trajectory."""
    rng = np.random.default_rng(0)
    asked = questions(n)
    plan = Plan(1, asked[: n // 2], asked[n // 2 :], {})
    groups = engine.rollout(plan, K)
    rows = []
    for group in groups:
        members = [(rollout.token_ids, None) for rollout in group.rollouts]
        if group.replayed:
            stored = trajectory(rng, 9)
            members.append((stored.token_ids, stored))
        advantages = rng.permutation([0.75, -0.25, -0.25, -0.25])
        rows.append(
            [Row(group.question, ids, float(a), True, old) for (ids, old), a in zip(members, advantages, strict=True)]
        )
    return MixedBatch(groups, rows)


def weights(engine: LocalEngine) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in engine.model.parameters()])


def plain_stats(model, prompt: list[int], response: np.ndarray, temperature: float = 1.0):
    """Log-probs and entropies of the response's tokens from the whole logits of one unpadded row."""
    ids = torch.tensor([*prompt, *response.tolist()])
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].double()
    logprobs = (logits / temperature).log_softmax(1).gather(1, ids[len(prompt) :, None]).squeeze(1)
    p = logits.softmax(1)
    return logprobs, -(p * p.log()).sum(1)


# -- entropy selection ------------------------------------------------------------------------------------------------


def test_selection_takes_the_argmin_of_the_mean_entropy_over_exactly_the_response(warm_model):
    """T1. Mixed lengths in one padded batch; the reference is computed row by row, unpadded, from the whole logits."""
    engine = make_engine(warm_model)
    rng = np.random.default_rng(1)
    asked = questions(12)
    candidates = {q.id: [trajectory(rng, int(n)) for n in rng.integers(2, 24, size=5)] for q in asked}
    selector = TrajectorySelector()
    scores = engine.score(Plan(1, [], asked, candidates), selector.to_score(candidates), selector.score)
    chosen = selector.choose(candidates, scores, rng)
    for question in asked:
        prompt = engine.prompts.encode(question)
        stored = candidates[question.id]
        expected = [float(plain_stats(engine.model, prompt, t.token_ids)[1].mean()) for t in stored]
        assert scores[question.id] == pytest.approx(expected, abs=1e-5)
        assert chosen[question.id] is stored[int(np.argmin(expected))]
    shortest = sum(len(chosen[q.id]) == min(map(len, candidates[q.id])) for q in asked)
    assert shortest < len(asked), "a length bias would take the shortest every time"


def test_scores_do_not_depend_on_the_token_budget(warm_model):
    rng = np.random.default_rng(2)
    asked = questions(6)
    candidates = {q.id: [trajectory(rng, int(n)) for n in rng.integers(2, 24, size=3)] for q in asked}
    plan = Plan(1, [], asked, candidates)
    wide = make_engine(warm_model).score(plan, candidates, ENTROPY)
    narrow = make_engine(warm_model, settings=LocalSettings(micro_batch_tokens=1)).score(plan, candidates, ENTROPY)
    for question_id, values in wide.items():
        assert values == pytest.approx(narrow[question_id], abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_perplexity_is_that_of_the_response_tokens_at_the_sampling_temperature(warm_model, temperature):
    engine = make_engine(warm_model, sampling=Sampling(temperature=temperature, max_response_tokens=24))
    rng = np.random.default_rng(3)
    asked = questions(6)
    candidates = {q.id: [trajectory(rng, int(n)) for n in rng.integers(2, 24, size=4)] for q in asked}
    selector = TrajectorySelector(by="perplexity", prefer="highest")
    scores = engine.score(Plan(1, [], asked, candidates), selector.to_score(candidates), selector.score)
    chosen = selector.choose(candidates, scores, rng)
    for question in asked:
        stored, prompt = candidates[question.id], engine.prompts.encode(question)
        logprobs = [plain_stats(engine.model, prompt, t.token_ids, temperature)[0] for t in stored]
        expected = [float(torch.exp(-lp.sum() / len(lp))) for lp in logprobs]
        assert scores[question.id] == pytest.approx(expected, rel=1e-5)
        assert chosen[question.id] is stored[int(np.argmax(expected))]


def test_length_and_recency_are_never_scored_by_the_policy(warm_model, monkeypatch):
    engine, asked = make_engine(warm_model), questions(1)
    candidates = {asked[0].id: [trajectory(np.random.default_rng(0), 4) for _ in range(2)]}
    plan = Plan(1, [], asked, candidates)
    monkeypatch.setattr(engine, "forward", None)
    for by in ("length", "recency", "random"):
        selector = TrajectorySelector(by)
        assert not selector.needs_policy
        assert engine.score(plan, selector.to_score(candidates), selector.score) == {}


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


# -- sampling ---------------------------------------------------------------------------------------------------------


def test_replayed_questions_get_one_rollout_fewer_and_groups_keep_plan_order(warm_model):
    """T9: nothing is generated for the stored row."""
    asked = questions(5)
    groups = make_engine(warm_model).rollout(Plan(1, asked[:3], asked[3:], {}), K)
    assert [group.question for group in groups] == asked
    assert [len(group.rollouts) for group in groups] == [K, K, K, K - 1, K - 1]
    assert [group.replayed for group in groups] == [False] * 3 + [True] * 2


def test_a_response_ends_with_its_end_token_or_is_truncated(warm_model):
    engine = make_engine(warm_model, sampling=Sampling(max_response_tokens=8))
    groups = engine.rollout(Plan(1, questions(12), [], {}), K)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert {rollout.finish for rollout in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        ends = np.isin(rollout.token_ids, engine.end)
        assert ends[-1] == (rollout.finish == "stop")
        assert not ends[:-1].any()
        assert rollout.finish == "stop" or len(rollout.token_ids) == 8


def test_sampling_depends_on_seed_and_step_alone_and_leaves_the_global_generator_alone(warm_model):
    engine, asked = make_engine(warm_model), questions(4)

    def sample(used, step):
        return [r.token_ids.tolist() for g in used.rollout(Plan(step, asked, [], {}), K) for r in g.rollouts]

    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first = sample(engine, 1)
    assert torch.equal(torch.random.get_rng_state(), before)
    sample(engine, 2)
    torch.manual_seed(123)
    assert sample(engine, 1) == first
    assert sample(engine, 2) != first
    assert sample(make_engine(warm_model, seed=1), 1) != first


def test_a_models_own_sampling_filters_are_off_in_training_and_kept_in_its_checkpoint(warm_model, tmp_path):
    """Filters would make the samples another distribution than the one the importance weights divide by."""
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


def test_sampled_tokens_have_the_frequencies_of_the_measured_log_probs(warm_model):
    """The first token of 4,000 responses at temperature 1.3 against the policy's distribution."""
    engine = make_engine(
        warm_model,
        sampling=Sampling(temperature=1.3, max_response_tokens=1),
        settings=LocalSettings(generation_rows=1000),
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


# -- update -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_behaviour_log_probs_of_fresh_rows_are_the_policys_before_its_update(warm_model, temperature):
    engine = make_engine(warm_model, sampling=Sampling(temperature=temperature, max_response_tokens=24))
    batch = mixed_batch(engine)
    rows = batch.flat_rows()
    expected = [
        plain_stats(engine.model, engine.prompts.encode(row.question), row.token_ids, temperature) for row in rows
    ]
    stats = engine.update(batch, MixedPolicyLoss(response_length=24))
    for i, row in enumerate(rows):
        assert stats.policy_logprobs[i] == pytest.approx(expected[i][0].numpy(), abs=1e-5)
        assert stats.entropies[i] == pytest.approx(float(expected[i][1].mean()), abs=1e-5)
        if row.replayed is None:
            assert stats.behaviour_logprobs[i] == pytest.approx(expected[i][0].numpy(), abs=1e-5)
        else:
            assert stats.behaviour_logprobs[i].tobytes() == row.replayed.behaviour_logprobs.tobytes()


def test_with_two_optimiser_steps_all_behaviour_log_probs_are_the_sampling_policys(warm_model):
    engine = make_engine(warm_model, optimizer=Optimizer(learning_rate=0.05, steps_per_batch=2))
    batch = mixed_batch(engine)
    rows = batch.flat_rows()
    before = [plain_stats(engine.model, engine.prompts.encode(r.question), r.token_ids)[0].numpy() for r in rows]
    stats = engine.update(batch, MixedPolicyLoss(response_length=24))
    moved = 0
    for i, row in enumerate(rows):
        if row.replayed is None:
            assert stats.behaviour_logprobs[i] == pytest.approx(before[i], abs=1e-5)
            moved += not np.allclose(stats.policy_logprobs[i], before[i], atol=1e-3)
    assert moved > 0, "the second half is measured again under the policy after the first step"


def use_sgd(engine: LocalEngine, rate: float) -> None:
    engine._update.optimizer = torch.optim.SGD(engine.model.parameters(), lr=rate)
    engine._update.scheduler.optimizer = engine._update.optimizer


def plain_update(model, engine: LocalEngine, batch: MixedBatch, behaviour: list[torch.Tensor]) -> list[torch.Tensor]:
    """Adds the gradient of the loss over the whole batch, from the whole logits row by row; returns the log-probs."""
    rows, measured = batch.flat_rows(), []
    total = torch.zeros((), dtype=torch.float64)
    for row, old in zip(rows, behaviour, strict=True):
        prompt = engine.prompts.encode(row.question)
        ids = torch.tensor([*prompt, *row.token_ids.tolist()])
        logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(1).gather(1, ids[len(prompt) :, None]).squeeze(1)
        measured.append(logprobs.detach())
        w = torch.exp(logprobs - old)
        if row.replayed is None:
            terms = torch.minimum(w * row.advantage, w.clamp(0.8, 1.2) * row.advantage)
        else:
            terms = w / (w + 0.1) * row.advantage
        total = total - terms.sum() / (len(rows) * 24)
    total.backward()
    return measured


def test_two_passes_equal_a_plain_loop_that_measures_the_sampling_policy_once(warm_model):
    rate = 1.0
    engine = make_engine(warm_model, optimizer=Optimizer(learning_rate=rate, max_grad_norm=1e9, passes_per_batch=2))
    batch = mixed_batch(engine)
    rows = batch.flat_rows()
    rows[0] = Row(rows[0].question, rows[0].token_ids, 0.0, True, None)  # a row without a gradient
    batch = MixedBatch(batch.groups, [rows[i : i + K] for i in range(0, len(rows), K)])
    model = AutoModelForCausalLM.from_pretrained(warm_model, dtype=torch.float64)
    sampled_by = [plain_stats(model, engine.prompts.encode(r.question), r.token_ids)[0] for r in rows]
    behaviour = [
        old if row.replayed is None else torch.from_numpy(row.replayed.behaviour_logprobs).double()
        for row, old in zip(rows, sampled_by, strict=True)
    ]
    start, passes = weights(engine), []
    for _ in range(2):
        model.zero_grad()
        passes.append(plain_update(model, engine, batch, behaviour))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
    use_sgd(engine, rate)
    stats = engine.update(batch, MixedPolicyLoss(response_length=24))
    moved = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).float() - start
    assert moved.abs().max() > 1e-3
    assert torch.allclose(weights(engine) - start, moved, atol=1e-6)
    w = np.concatenate([(b - a).exp().numpy() for a, b, r in zip(*passes, rows, strict=True) if r.replayed is None])
    assert ((w < 0.8) | (w > 1.2)).any(), "the second pass meets the clip"
    # What is stored and reported is of the first pass; the second is kept apart.
    [again] = stats.later_passes
    assert sorted(again) == list(range(1, len(rows))), "the row without a gradient is measured once"
    for i, row in enumerate(rows):
        assert stats.policy_logprobs[i] == pytest.approx(passes[0][i].numpy(), abs=1e-5)
        if row.replayed is None:
            assert stats.behaviour_logprobs[i] == pytest.approx(passes[0][i].numpy(), abs=1e-5)
        else:
            assert stats.behaviour_logprobs[i].tobytes() == row.replayed.behaviour_logprobs.tobytes()
        if i in again:
            assert again[i] == pytest.approx(passes[1][i].numpy(), abs=1e-5)


def test_passes_and_steps_per_batch_multiply_and_every_pass_covers_the_batch(warm_model):
    optimizer = Optimizer(learning_rate=1e-3, warmup_steps=100, steps_per_batch=2, passes_per_batch=3)
    engine = make_engine(warm_model, optimizer=optimizer)
    batch = mixed_batch(engine)
    before = [plain_stats(engine.model, engine.prompts.encode(r.question), r.token_ids)[0] for r in batch.flat_rows()]
    stats = engine.update(batch, MixedPolicyLoss(response_length=24))
    assert stats.metrics["policy/learning_rate"] == pytest.approx(5 / 100 * 1e-3), "the sixth optimiser step's"
    assert [sorted(part) for part in stats.later_passes] == [list(range(len(batch.flat_rows())))] * 2
    for row, old, behaviour in zip(batch.flat_rows(), before, stats.behaviour_logprobs, strict=True):
        if row.replayed is None:
            assert behaviour == pytest.approx(old.numpy(), abs=1e-5)


def test_one_group_takes_one_step_a_pass_however_many_are_asked_for(warm_model):
    engine = make_engine(warm_model, optimizer=Optimizer(steps_per_batch=4, passes_per_batch=2, warmup_steps=100))
    batch = mixed_batch(engine, n=2)
    one = MixedBatch(batch.groups[:1], batch.rows[:1])
    stats = engine.update(one, MixedPolicyLoss(response_length=24))
    assert stats.metrics["policy/learning_rate"] == pytest.approx(1 / 100 * 1e-6)


def gradient(engine: LocalEngine, batch: MixedBatch, loss: MixedPolicyLoss) -> torch.Tensor:
    """The gradient of one optimiser step: with SGD's rate of 1 it is what the weights lost."""
    before = weights(engine)
    use_sgd(engine, 1.0)
    engine.update(batch, loss)
    return before - weights(engine)


LOSSES = [
    MixedPolicyLoss(response_length=24),
    MixedPolicyLoss(normalizer="tokens", entropy_coef=0.01, shaping=False),
    MixedPolicyLoss(normalizer="sequences", clip_low=None, clip_high=None, importance_weights=False),
]


@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_does_not_depend_on_micro_batching_and_padding(warm_model, loss):
    """T11. One row at a time (no padding at all) against everything in one padded batch."""
    optimizer = Optimizer(max_grad_norm=1e9)
    wide = make_engine(warm_model, optimizer=optimizer)
    narrow = make_engine(warm_model, optimizer=optimizer, settings=LocalSettings(micro_batch_tokens=1))
    batch = mixed_batch(wide)
    expected = gradient(wide, batch, loss)
    assert expected.abs().max() > 1e-5
    assert torch.allclose(gradient(narrow, batch, loss), expected, atol=1e-7, rtol=1e-4)


def test_gradient_is_that_of_the_loss_computed_from_the_whole_logits(warm_model):
    engine = make_engine(warm_model, optimizer=Optimizer(max_grad_norm=1e9))
    batch = mixed_batch(engine)
    rows = batch.flat_rows()
    model = AutoModelForCausalLM.from_pretrained(warm_model, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        prompt = engine.prompts.encode(row.question)
        ids = torch.tensor([*prompt, *row.token_ids.tolist()])
        logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(1).gather(1, ids[len(prompt) :, None]).squeeze(1)
        if row.replayed is None:
            w = torch.exp(logprobs - logprobs.detach())
            terms = torch.minimum(w * row.advantage, w.clamp(0.8, 1.2) * row.advantage)
        else:
            w = torch.exp(logprobs - torch.from_numpy(row.replayed.behaviour_logprobs).double())
            terms = w / (w + 0.1) * row.advantage
        total = total - terms.sum() / (len(rows) * 24)
    total.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).float()
    assert torch.allclose(gradient(engine, batch, MixedPolicyLoss(response_length=24)), expected, atol=2e-7, rtol=1e-3)


def test_gradient_checkpointing_changes_nothing_but_memory(warm_model):
    optimizer = Optimizer(max_grad_norm=1e9)
    plain = make_engine(warm_model, optimizer=optimizer)
    frugal = make_engine(warm_model, optimizer=optimizer, settings=LocalSettings(gradient_checkpointing=True))
    batch, again = mixed_batch(plain), mixed_batch(frugal)
    for row, other in zip(batch.flat_rows(), again.flat_rows(), strict=True):
        assert row.token_ids.tolist() == other.token_ids.tolist()
    loss = MixedPolicyLoss(response_length=24)
    assert torch.allclose(gradient(frugal, batch, loss), gradient(plain, batch, loss), atol=1e-8)


def test_bfloat16_computes_over_float32_master_weights(warm_model):
    engine = make_engine(warm_model, settings=LocalSettings(device="cpu", dtype="bfloat16"))
    batch = mixed_batch(engine)
    before = weights(engine)
    expected = [plain_stats(engine.model, engine.prompts.encode(r.question), r.token_ids)[0] for r in batch.flat_rows()]
    stats = engine.update(batch, MixedPolicyLoss(response_length=24))
    assert all(parameter.dtype == torch.float32 for parameter in engine.model.parameters())
    assert stats.policy_logprobs[0].dtype == np.float32
    differences = np.concatenate([o - e.numpy() for o, e in zip(stats.policy_logprobs, expected, strict=True)])
    assert 0 < np.abs(differences).max() < 0.2, "rounded to bfloat16, and no more than rounded"
    assert not torch.equal(weights(engine), before)


def test_rows_without_advantage_are_measured_but_change_no_weight(warm_model):
    engine = make_engine(warm_model)
    batch = mixed_batch(engine)
    flat = MixedBatch(
        batch.groups, [[Row(r.question, r.token_ids, 0.0, True, r.replayed) for r in g] for g in batch.rows]
    )
    before = weights(engine)
    stats = engine.update(flat, MixedPolicyLoss(response_length=24))
    assert torch.equal(weights(engine), before)
    assert all(len(lp) == len(r.token_ids) for lp, r in zip(stats.policy_logprobs, flat.flat_rows(), strict=True))


def test_kl_to_the_initial_policy_holds_the_weights_back(warm_model):
    loss = MixedPolicyLoss(response_length=24, kl_coef=50.0)
    free, held = make_engine(warm_model), make_engine(warm_model, reference=True)
    batch = mixed_batch(free)
    start = weights(free)
    for _ in range(8):
        free.update(batch, MixedPolicyLoss(response_length=24))
        held.update(batch, loss)
    assert (weights(held) - start).norm() < 0.9 * (weights(free) - start).norm()
    with pytest.raises(ValueError, match="kl_coef"):
        make_engine(warm_model).update(batch, loss)


def test_an_update_above_the_norm_limit_is_skipped_and_counted(warm_model, caplog):
    engine = make_engine(warm_model, optimizer=Optimizer(learning_rate=1.0, skip_above_grad_norm=1e-9))
    before = weights(engine)
    stats = engine.update(mixed_batch(engine), MixedPolicyLoss(response_length=24))
    assert stats.metrics["policy/skipped_updates"] == 1
    assert torch.equal(weights(engine), before)
    assert "skip_above_grad_norm" in caplog.text


def test_a_gradient_above_the_limit_is_clipped(warm_model):
    engine = make_engine(warm_model, optimizer=Optimizer(max_grad_norm=1e-3))
    assert float(gradient(engine, mixed_batch(engine), MixedPolicyLoss(response_length=1)).norm()) == pytest.approx(
        1e-3, rel=1e-4
    )


def test_schedule_warms_up_and_falls_to_zero(warm_model):
    engine = make_engine(
        warm_model, optimizer=Optimizer(learning_rate=1.0, warmup_steps=2, schedule="linear", decay_steps=6)
    )
    batch = mixed_batch(engine, n=2)
    rates = [
        engine.update(batch, MixedPolicyLoss(response_length=24)).metrics["policy/learning_rate"] for _ in range(7)
    ]
    assert rates == pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25, 0])


def test_a_non_finite_update_raises_dumps_its_rows_and_changes_no_weight(warm_model):
    engine = make_engine(warm_model)
    batch = mixed_batch(engine)
    with torch.no_grad():
        engine.model.lm_head.weight[3, 0] = float("inf")
    before = weights(engine)
    with pytest.raises(NonFiniteUpdate, match="not finite") as caught:
        engine.update(batch, MixedPolicyLoss(response_length=24))
    assert torch.equal(weights(engine), before)
    assert len(caught.value.dump) == len(batch.flat_rows())
    assert {"question_id", "token_ids", "advantage", "policy_logprobs"} <= set(caught.value.dump[0])
    json.dumps(caught.value.dump)


# -- models -----------------------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 18,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
GPT2 = {
    "vocab_size": 18,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "eos_token_id": 1,
    "bos_token_id": 1,
}


def saved_model(config, warm_model: Path, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(warm_model).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SMALL), Qwen3Config(**SMALL, tie_word_embeddings=False), GPT2Config(**GPT2)],
    ids=["llama", "qwen3", "gpt2"],
)
def test_other_architectures_generate_score_and_learn(config, warm_model, tmp_path):
    """GPT-2 has dropout, which must be off, and absolute positions, which left padding must not shift."""
    engine = make_engine(saved_model(config, warm_model, tmp_path))
    batch = mixed_batch(engine)
    expected = [plain_stats(engine.model, engine.prompts.encode(r.question), r.token_ids)[0] for r in batch.flat_rows()]
    before = weights(engine)
    stats = engine.update(batch, MixedPolicyLoss(response_length=24))
    for ours, plain in zip(stats.policy_logprobs, expected, strict=True):
        assert ours == pytest.approx(plain.numpy(), abs=1e-5)
    assert not torch.equal(weights(engine), before)


@pytest.mark.parametrize("cap", [0.5, 30.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_caps_its_logits_is_refused(cap, dtype, warm_model, tmp_path):
    """Also where the cap is far above the logits that a first look would see, and where rounding would hide it."""
    config = Gemma2Config(**SMALL, final_logit_softcapping=cap, query_pre_attn_scalar=16)
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM does more to its logits.*final_logit_softcapping"):
        make_engine(saved_model(config, warm_model, tmp_path), settings=LocalSettings(device="cpu", dtype=dtype))


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


def test_a_gpu_that_is_not_there_is_named(warm_model):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=r"LocalEngine\.device = 'cuda', but torch sees no GPU"):
        make_engine(warm_model, settings=LocalSettings(device="cuda"))


# -- a whole step -----------------------------------------------------------------------------------------------------


def test_an_ungradable_rollout_is_a_row_without_loss(warm_model):
    """It stays in its group, out of the mean, and is still counted by the normaliser."""
    engine = make_engine(warm_model, optimizer=Optimizer(max_grad_norm=1e9))
    asked = questions(1)
    [group] = engine.rollout(Plan(1, asked, [], {}), K)
    grades = [Grade("correct", 1.0), Grade("wrong", 0.0), Grade("timeout", None), Grade("wrong", 0.0)]
    graded = RolloutGroup(
        group.question,
        tuple(Rollout(r.token_ids, r.finish, g) for r, g in zip(group.rollouts, grades, strict=True)),
        False,
    )
    rng = np.random.default_rng(0)
    mixer = ReplayMixer(QuestionSampler(), DifficultyBuckets(), group_size=K, questions_per_step=1, rng=rng)
    batch = mixer.assemble([graded], {}, GroupAdvantages())
    assert [row.advantage for row in batch.rows[0]] == pytest.approx([2 / 3, -1 / 3, 0, -1 / 3])
    three = MixedBatch(batch.groups, [[row for row in batch.rows[0] if row.in_loss]])
    with_it = gradient(engine, batch, MixedPolicyLoss(response_length=24))
    without = gradient(
        make_engine(warm_model, optimizer=Optimizer(max_grad_norm=1e9)), three, MixedPolicyLoss(response_length=24)
    )
    assert torch.allclose(with_it * 4, without * 3, atol=1e-6, rtol=1e-3)


def test_verifier_grades_what_the_engine_decodes(warm_model):
    engine = make_engine(warm_model)
    groups = Verifier("modular_chain").grade_groups(engine.rollout(Plan(1, questions(8), [], {}), K), engine.decode)
    for group in groups:
        for rollout in group.rollouts:
            text = engine.decode(rollout.token_ids)
            assert "<" not in text, "no special token reaches the verifier"
            assert rollout.grade.correct == (text.rpartition("#")[2] == group.question.answer and "#" in text)
