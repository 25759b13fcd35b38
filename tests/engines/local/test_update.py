"""The update of the local engine: its measurements, its gradient, and its errors."""

from __future__ import annotations

import copy
import json
import pickle
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_builders import (
    LOGPROB_ERROR,
    K,
    as_episodes,
    behaviour_of,
    float32_error,
    gradient,
    make_engine,
    mixed_batch,
    plain_stats,
    plain_update,
    use_sgd,
    weights,
    with_added,
)
from transformers import AutoModelForCausalLM, OPTConfig

from exgrpo_orlhf.engines.engine import NonFiniteUpdate
from exgrpo_orlhf.engines.local import TorchEngine
from exgrpo_orlhf.engines.local.forward import Recomputing
from exgrpo_orlhf.objective import ConvexKL, MixedPolicyLoss, TokenBatch
from exgrpo_orlhf.records import MixedBatch
from exgrpo_orlhf.sampling import EngineLost
from exgrpo_orlhf.settings import LocalEngine, LoRA, Optimizer, Sampling

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler")  # some tests take another optimiser or skip updates
LOSS = MixedPolicyLoss(response_length=24)


def test_behaviour_log_probs_of_fresh_rows_are_the_policys_at_the_sampling_temperature(warm_model):
    temperature = 0.7
    engine = make_engine(warm_model, sampling=Sampling(temperature=temperature, max_response_tokens=24))
    batch = mixed_batch(engine)
    rows = batch.flat_rows()
    expected = [
        plain_stats(engine.model, engine.prompts.encode(row.question), row.token_ids, temperature) for row in rows
    ]
    stats = engine.update(batch, LOSS)
    for i, row in enumerate(rows):
        assert stats.policy_logprobs[i] == pytest.approx(expected[i][0].numpy(), abs=1e-5)
        assert stats.entropies[i] == pytest.approx(float(expected[i][1].mean()), abs=1e-5)
        if row.trajectory is None:
            assert stats.behaviour_logprobs[i] == pytest.approx(expected[i][0].numpy(), abs=1e-5)
        else:
            assert stats.behaviour_logprobs[i].tobytes() == row.trajectory.behaviour_logprobs.tobytes()


def descend(model, rate: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= rate * parameter.grad


def assert_moved(engine: TorchEngine, start: torch.Tensor, batch: MixedBatch, like, *, steps: int) -> None:
    """The engine's weights are where those of another model are, as far as float32 can tell."""
    moved = torch.cat([parameter.detach().flatten() for parameter in like.parameters()]).float() - start
    assert moved.abs().max() > 1e-3
    bound = float32_error(start, batch, moved, steps=steps)
    torch.testing.assert_close(weights(engine) - start, moved, atol=bound, rtol=0)


def test_two_passes_equal_a_plain_loop_that_measures_the_sampling_policy_once(warm_model):
    rate = 1.0
    engine = make_engine(warm_model, optimizer=Optimizer(learning_rate=rate, max_grad_norm=1e9, passes_per_batch=2))
    batch = mixed_batch(engine)
    rows = batch.flat_rows()
    rows[0] = replace(rows[0], advantage=0.0)  # a row without a gradient
    batch = MixedBatch(batch.groups, [rows[i : i + K] for i in range(0, len(rows), K)], K)
    model = AutoModelForCausalLM.from_pretrained(warm_model, dtype=torch.float64)
    entropies = [plain_stats(model, engine.prompts.encode(r.question), r.token_ids)[1] for r in rows]
    behaviour = behaviour_of(model, engine, batch)
    start, passes = weights(engine), []
    for _ in range(2):
        model.zero_grad()
        passes.append(plain_update(model, engine, batch, behaviour))
        descend(model, rate)
    use_sgd(engine, rate)
    stats = engine.update(batch, LOSS)
    assert_moved(engine, start, batch, model, steps=2)
    # What is stored is of the first pass, in which w = 1. In the second one the row without a gradient is not measured.
    log_w = {i: (passes[1][i] - passes[0][i]).numpy() for i, r in enumerate(rows) if i and r.trajectory is None}
    tokens = sum(len(r.token_ids) for r in rows if r.trajectory is None) + sum(map(len, log_w.values()))
    kl = sum((np.exp(x) - 1 - x).sum() for x in log_w.values())
    clipped = sum((np.exp(x) > 1.2 if rows[i].advantage > 0 else np.exp(x) < 0.8).sum() for i, x in log_w.items())
    assert stats.metrics["policy/approx_kl"] == pytest.approx(kl / tokens, abs=1e-4) != 0
    assert stats.metrics["policy/clip_share"] == pytest.approx(clipped / tokens, abs=1.5 / tokens) != 0
    for i, row in enumerate(rows):
        assert stats.policy_logprobs[i] == pytest.approx(passes[0][i].numpy(), abs=LOGPROB_ERROR)
        assert stats.entropies[i] == pytest.approx(float(entropies[i].mean()), abs=LOGPROB_ERROR)
        if row.trajectory is None:
            assert stats.behaviour_logprobs[i] == pytest.approx(passes[0][i].numpy(), abs=LOGPROB_ERROR)
        else:
            assert stats.behaviour_logprobs[i].tobytes() == row.trajectory.behaviour_logprobs.tobytes()


@pytest.mark.parametrize(
    ("beside", "normalizer", "ratio", "episodes"),
    [
        (1, "constant", "token", False),
        (2, "constant", "token", False),
        (1, "sequences", "token", False),
        (1, "tokens", "token", False),
        (1, "sequences", "sequence", False),
        (2, "constant", "sequence", False),
        (1, "constant", "token", True),
        (2, "sequences", "sequence", True),
        (1, "tokens", "token", True),
    ],
)
def test_short_groups_in_two_steps_and_two_passes_equal_a_plain_loop(warm_model, beside, normalizer, ratio, episodes):
    """A group around a stored trajectory counts K rows in the normaliser, however few it holds."""
    rate, steps = 0.3, 2  # with a rate of 1 a step would multiply the error of the one before it
    optimizer = Optimizer(learning_rate=rate, max_grad_norm=1e9, steps_per_batch=steps, passes_per_batch=2)
    engine = make_engine(warm_model, optimizer=optimizer)
    batch = mixed_batch(engine, beside=beside)
    batch = as_episodes(batch) if episodes else batch
    assert [len(rows) for rows in batch.rows] == [K] * 3 + [beside + 1] * 3
    model = AutoModelForCausalLM.from_pretrained(warm_model, dtype=torch.float64)
    of_rows = behaviour_of(model, engine, batch)
    of_row = iter(of_rows)
    behaviour = [[next(of_row) for _ in rows] for rows in batch.rows]
    start = weights(engine)
    for step in range(2 * steps):
        part = slice(step % steps, None, steps)
        model.zero_grad()
        share = MixedBatch(batch.groups[part], batch.rows[part], K)
        old = [old for group in behaviour[part] for old in group]
        plain_update(model, engine, share, old, normalizer, ratio=ratio)
        descend(model, rate)
    use_sgd(engine, rate)
    stats = engine.update(batch, MixedPolicyLoss(normalizer=normalizer, ratio=ratio, response_length=24))
    assert_moved(engine, start, batch, model, steps=2 * steps)
    for logprobs, old in zip(stats.behaviour_logprobs, of_rows, strict=True):
        assert logprobs == pytest.approx(old.numpy(), abs=LOGPROB_ERROR)


@pytest.mark.parametrize(("groups", "steps", "passes", "last"), [(6, 2, 3, 6), (1, 4, 2, 2)])
def test_passes_and_steps_per_batch_multiply_and_every_pass_covers_the_batch(
    monkeypatch, warm_model, groups, steps, passes, last
):
    """A single group takes one step a pass, however many are asked for. last: the number of the last optimiser step"""
    optimizer = Optimizer(learning_rate=1e-3, warmup_steps=100, steps_per_batch=steps, passes_per_batch=passes)
    engine = make_engine(warm_model, optimizer=optimizer)
    full_batch = mixed_batch(engine)
    batch = MixedBatch(full_batch.groups[:groups], full_batch.rows[:groups], K)
    measured, make = [], TokenBatch.__init__

    def counted(self, **values):
        make(self, **values)
        if values["logprobs"].requires_grad:  # those of the metrics have no gradient
            measured.extend(values["row_of"].unique())

    monkeypatch.setattr(TokenBatch, "__init__", counted)
    stats = engine.update(batch, LOSS)
    assert stats.metrics["policy/learning_rate"] == pytest.approx(last / 100 * 1e-3)
    assert len(measured) == passes * len(batch.flat_rows()), "by the updates; the rows before them are not counted"


@pytest.mark.parametrize("replay", [True, False])
def test_a_mixed_batch_is_unclipped_in_each_of_its_steps_and_another_is_clipped(warm_model, replay):
    """The first of two steps has no replayed row, whatever the batch has. A micro-batch is one row."""
    unclipped = replace(LOSS, clip_low=None, clip_high=None)
    weights_after, shares = [], []
    for loss in (replace(LOSS, clips_mixed=False), unclipped, LOSS):
        optimizer = Optimizer(learning_rate=0.1, max_grad_norm=1e9, steps_per_batch=2, passes_per_batch=2)
        engine = make_engine(warm_model, optimizer=optimizer, settings=LocalEngine(micro_batch_tokens=1))
        batch = mixed_batch(engine, n=2) if replay else mixed_batch(engine, n=4)
        if not replay:
            batch = MixedBatch(batch.groups[:2], batch.rows[:2], K)
        assert any(row.trajectory is not None for row in batch.flat_rows()) == replay
        use_sgd(engine, 0.1)
        shares.append(engine.update(batch, loss).metrics["policy/clip_share"])
        weights_after.append(weights(engine))
    same, other = (1, 2) if replay else (2, 1)
    assert torch.equal(weights_after[0], weights_after[same])
    assert not torch.equal(weights_after[0], weights_after[other])
    assert shares[0] == shares[same]
    assert shares[1] == 0 < shares[2]


LOSSES = [
    LOSS,
    MixedPolicyLoss(normalizer="tokens", entropy_coef=0.01, shaping=False),
    MixedPolicyLoss(normalizer="sequences", clip_low=None, clip_high=None, importance_weights=False),
]


@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_does_not_depend_on_micro_batching_and_padding(warm_model, loss):
    """T11. One row at a time (no padding at all) against everything in one padded batch."""
    optimizer = Optimizer(max_grad_norm=1e9)
    wide = make_engine(warm_model, optimizer=optimizer)
    narrow = make_engine(warm_model, optimizer=optimizer, settings=LocalEngine(micro_batch_tokens=1))
    batch = mixed_batch(wide)
    expected = gradient(wide, batch, loss)
    assert expected.abs().max() > 1e-5
    bound = float32_error(weights(wide), batch, expected, steps=1)
    torch.testing.assert_close(gradient(narrow, batch, loss), expected, atol=bound, rtol=0)


@pytest.mark.parametrize("episodes", [False, True])
@pytest.mark.parametrize("normalizer", ["constant", "tokens", "sequences"])
def test_an_ungradable_row_counts_in_the_normalisers_of_entropy_and_kl_and_has_neither(
    warm_model, normalizer, episodes
):
    """Against the whole logits in float64. The KL term is a mean by sequence where the policy term is one."""
    engine = make_engine(warm_model, optimizer=Optimizer(max_grad_norm=1e9), reference=True)
    batch = mixed_batch(engine)
    batch = as_episodes(batch) if episodes else batch
    batch.rows[0][1] = replace(batch.rows[0][1], advantage=0.0, in_loss=False)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter *= 1.05  # or the policy would be the reference, where the KL term has no gradient
    reference = AutoModelForCausalLM.from_pretrained(warm_model, dtype=torch.float64)
    policy = copy.deepcopy(reference)
    policy.load_state_dict(engine.model.state_dict())
    behaviour = behaviour_of(policy, engine, batch)
    terms = {"normalizer": normalizer, "entropy_coef": 0.2, "kl_coef": 2.0}
    plain_update(policy, engine, batch, behaviour, reference=reference, **terms)
    expected = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]).float()
    bound = float32_error(weights(engine), batch, expected, steps=1)
    slope = gradient(engine, batch, MixedPolicyLoss(response_length=24, **terms))
    torch.testing.assert_close(slope, expected, atol=bound, rtol=0)


REMIX = MixedPolicyLoss(
    **dict(normalizer="sequences", divisors="together", shaping=False, clips_replayed=True, clip_around="policy"),
    **dict(kl_coef=0.5, kl_convex=ConvexKL(), entropy_coef=0.01),
)


def remix_loss(model, rows, past, old, base, preceding, base_share: float) -> torch.Tensor:
    """Of ReMix's formulas, in float64; a fresh group counts K rows. rows: prompt and row; the rest: log-probs of each
    row, float64 (T,), under the policies that sampled it, π_k, π_base and π_{k−1}"""
    tokens, fresh = sum(row.length for _, row in rows), {row.question.id for _, row in rows if row.trajectory is None}
    places, loss = K * len(fresh) + sum(row.trajectory is not None for _, row in rows), 0.0
    for (prompt, row), *others in zip(rows, past, old, base, preceding, strict=True):
        ids = torch.tensor([*prompt, *row.token_ids.tolist()])
        logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(1)
        now, entropies = logits.gather(1, ids[len(prompt) :, None]).squeeze(1), -(logits.exp() * logits).sum(1)
        sampled, k, of_base, of_preceding = others
        ratio, centre = torch.exp(now - sampled), torch.exp(k - sampled)
        clipped = torch.minimum(torch.maximum(ratio, centre - 0.2), centre + 0.2)
        terms = -torch.minimum(ratio * row.advantage, clipped * row.advantage)
        for share, reference in ((base_share, of_base), (1 - base_share, of_preceding)):
            x = reference - now
            terms = terms + 0.5 * share * (torch.exp(x) - x - 1)
        loss = loss + terms.mean() / places - 0.01 * entropies.sum() / tokens
    return loss


def test_batches_of_remix_equal_a_plain_loop_with_whole_models_for_the_frozen_copies(warm_model):
    """Two batches of two passes: in the second one π_{k−1} is the policy before the first."""
    rate, optimizer = 0.02, Optimizer(learning_rate=0.02, max_grad_norm=1e9, passes_per_batch=2)
    engine = make_engine(warm_model, optimizer=optimizer, reference=True, copies=("base", "preceding"))
    batch = with_added(mixed_batch(engine), REMIX)
    rows = [(engine.prompts.encode(row.question), row) for row in batch.flat_rows()]
    model = AutoModelForCausalLM.from_pretrained(warm_model, dtype=torch.float64)
    base, start = copy.deepcopy(model), weights(engine)
    for kept, parameter in zip(engine._update.copies["base"]._kept, base.parameters(), strict=True):
        kept.mul_(1.05)
        parameter.data.mul_(1.05)
    use_sgd(engine, rate)
    preceding = copy.deepcopy(model)
    for base_share in (1.0, 0.6):
        before = copy.deepcopy(model)
        of = lambda policy: [plain_stats(policy, prompt, row.response)[0].detach() for prompt, row in rows]
        of_old = of(before)
        past = [
            k if row.trajectory is None else torch.from_numpy(row.trajectory.behaviour_logprobs).double()
            for (_, row), k in zip(rows, of_old, strict=True)
        ]
        references = of(base), of(preceding)
        for _ in range(2):
            model.zero_grad()
            remix_loss(model, rows, past, of_old, *references, base_share).backward()
            descend(model, rate)
        preceding = before
        engine.update(replace(batch, base_share=base_share), REMIX)
    assert_moved(engine, start, batch, model, steps=4)


@pytest.mark.parametrize("lora", [LoRA(), LoRA(rank=4)], ids=["weights", "adapter"])
def test_a_reincarnated_engine_goes_on_as_a_new_one_that_begins_with_its_policy(lora, warm_model, tmp_path):
    """Bit by bit: the reference is the policy, Adam is new, and the batch is gone through once. A saved one too."""
    passes = lambda n: dict(optimizer=Optimizer(learning_rate=1e-2, passes_per_batch=n), lora=lora)
    making = dict(reference=True, copies=("base", "preceding"))
    engine = make_engine(warm_model, **passes(2), **making)
    batch = with_added(mixed_batch(engine), REMIX)
    engine.update(batch, REMIX)
    (tmp_path / "checkpoint").mkdir()
    engine.save(tmp_path / "checkpoint")
    again = make_engine(warm_model, weights_path=tmp_path / "checkpoint", **passes(2), **making)
    again.load(tmp_path / "checkpoint")
    new = make_engine(warm_model, weights_path=tmp_path / "checkpoint", **passes(1), **making)
    new._update.copies["preceding"].load(tmp_path / "checkpoint" / "trainer" / "preceding.pt")
    later = replace(batch, base_share=0.6, reincarnated=True)
    for one in (engine, again):
        one.reincarnate()
        one.update(later, REMIX)
    unlike = make_engine(warm_model, weights_path=tmp_path / "checkpoint", **passes(2), **making)
    unlike.load(tmp_path / "checkpoint")
    for one in (new, unlike):
        one.update(later, REMIX)
    assert torch.equal(weights(engine), weights(new))
    assert torch.equal(weights(again), weights(new))
    assert not torch.equal(weights(unlike), weights(new))
    if lora.rank is not None:
        assert sum(kept.numel() for kept in engine._update.copies["base"]._kept) < len(weights(engine)) / 2


def test_gradient_checkpointing_leaves_the_dropout_of_layers_off():
    """OPT's layers call dropout themselves."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    config = OPTConfig(vocab_size=18, **size, num_attention_heads=2, max_position_embeddings=64, dropout=0.5)
    model, computed = AutoModelForCausalLM.from_config(config).eval(), []
    recomputing, ids = Recomputing(model, True), torch.arange(2, 18)[None]
    model.model.decoder.layers[0].fc1.register_forward_hook(lambda *_: computed.append(1))

    def slopes(context) -> torch.Tensor:
        model.zero_grad()
        with context:
            logits = model(input_ids=ids, use_cache=False).logits
        logits.log_softmax(2)[..., 3].sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    expected = slopes(nullcontext())
    torch.testing.assert_close(slopes(recomputing()), expected, atol=1e-6, rtol=1e-4)
    assert len(computed) == 1 + 2, "once more in the backward pass"
    assert not any(module.training for module in model.modules())


def test_bfloat16_computes_over_float32_master_weights(warm_model):
    engine = make_engine(warm_model, settings=LocalEngine(device="cpu", dtype="bfloat16"))
    batch = mixed_batch(engine)
    before = weights(engine)
    expected = [plain_stats(engine.model, engine.prompts.encode(r.question), r.token_ids)[0] for r in batch.flat_rows()]
    stats = engine.update(batch, LOSS)
    assert all(parameter.dtype == torch.float32 for parameter in engine.model.parameters())
    assert stats.policy_logprobs[0].dtype == np.float32
    differences = np.concatenate([o - e.numpy() for o, e in zip(stats.policy_logprobs, expected, strict=True)])
    assert 0 < np.abs(differences).max() < 0.2, "rounded to bfloat16, and no more than rounded"
    assert not torch.equal(weights(engine), before)


def test_rows_without_advantage_are_measured_but_change_no_weight(warm_model):
    engine = make_engine(warm_model)
    batch = mixed_batch(engine)
    flat = MixedBatch(batch.groups, [[replace(row, advantage=0.0) for row in rows] for rows in batch.rows], K)
    before = weights(engine)
    stats = engine.update(flat, LOSS)
    assert torch.equal(weights(engine), before)
    assert all(len(lp) == len(r.token_ids) for lp, r in zip(stats.policy_logprobs, flat.flat_rows(), strict=True))


def test_weight_decay_takes_matrices_and_leaves_biases_and_norms(warm_model, tmp_path):
    """In a step without a gradient nothing else moves a weight: w becomes (1 − rate · decay) w."""
    decay = Optimizer(learning_rate=0.1, weight_decay=0.5)
    engine = make_engine(warm_model, optimizer=decay)
    before = {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}
    batch = mixed_batch(engine)
    engine.update(
        MixedBatch(batch.groups, [[replace(row, advantage=0.0) for row in rows] for rows in batch.rows], K), LOSS
    )
    moved = {}
    for name, parameter in engine.model.named_parameters():
        moved.setdefault(parameter.dim() > 1, []).append(name)
        expected = before[name] * (0.95 if parameter.dim() > 1 else 1)
        torch.testing.assert_close(parameter.detach(), expected, msg=name)
    assert moved.keys() == {True, False}
    (tmp_path / "trainer").mkdir()
    engine._update.save(tmp_path / "trainer")
    engine.load(tmp_path)
    make_engine(warm_model)._update.save(tmp_path / "trainer")  # one group, as before that rule
    with pytest.raises(ValueError, match=r"optimizer\.pt .*Optimizer\.weight_decay took biases .*--from"):
        engine.load(tmp_path)


def test_too_little_memory_is_said_with_the_settings_that_need_less(warm_model, monkeypatch):
    def forward(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    engine = make_engine(warm_model)
    batch = mixed_batch(engine)
    monkeypatch.setattr(type(engine.forward), "__call__", forward)
    for compute in (lambda: engine.measure(engine.forward_rows(batch)), lambda: engine.update(batch, LOSS)):
        with pytest.raises(EngineLost, match=r"2\.00 GiB.*LocalEngine\.micro_batch_tokens.*\.gradient_checkpointing"):
            compute()


def test_the_gap_to_the_samplers_log_probs_is_of_rows_in_the_loss(warm_model):
    """An episode that never began has a token that nobody sampled."""
    engine = make_engine(warm_model)
    batch = mixed_batch(engine)
    row = batch.rows[0][0]
    never = replace(row.response, sampler_logprobs=np.zeros(row.length, np.float32))
    for in_loss in (False, True):
        batch.rows[0][0] = replace(row, response=never, in_loss=in_loss)
        assert ("rollout/logprob_gap" in engine.update(batch, LOSS).metrics) == in_loss


def test_a_gradient_above_the_limit_is_clipped_and_without_one_none_is(warm_model):
    norms = []
    for limit in (1e-3, 1e9, None):
        engine = make_engine(warm_model, optimizer=Optimizer(max_grad_norm=limit))
        norms.append(float(gradient(engine, mixed_batch(engine), MixedPolicyLoss(response_length=1)).norm()))
    assert norms[0] == pytest.approx(1e-3, rel=1e-4)
    assert norms[1] == norms[2] > 1e-3


def test_a_non_finite_update_raises_dumps_its_rows_and_changes_no_weight(warm_model):
    engine = make_engine(warm_model)
    batch = mixed_batch(engine)
    with torch.no_grad():
        engine.model.lm_head.weight[3, 0] = float("inf")
    before = weights(engine)
    with pytest.raises(NonFiniteUpdate, match="not finite") as caught:
        engine.update(batch, LOSS)
    assert torch.equal(weights(engine), before)
    assert len(caught.value.dump) == len(batch.flat_rows())
    assert {"question_id", "token_ids", "advantage", "policy_logprobs"} <= set(caught.value.dump[0])
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), json.dumps(again.dump)) == (str(caught.value), json.dumps(caught.value.dump))


@pytest.mark.parametrize("limit", [None, 1e-9])
def test_the_schedule_warms_up_and_falls_and_waits_where_an_update_is_skipped(warm_model, caplog, limit):
    schedule = {"warmup_steps": 2, "schedule": "linear", "decay_steps": 6}
    optimizer = Optimizer(learning_rate=1.0, skip_above_grad_norm=limit, **schedule)
    engine = make_engine(warm_model, optimizer=optimizer)
    batch, before = mixed_batch(engine, n=2), weights(engine)
    steps = [engine.update(batch, LOSS).metrics for _ in range(6)]
    rates = [0.5] * 6 if limit else [0.5, 1, 0.8, 0.6, 0.4, 0.2]
    assert [step["policy/learning_rate"] for step in steps] == pytest.approx(rates)
    assert all(step["policy/skipped_updates"] == (limit is not None) for step in steps)
    assert torch.equal(weights(engine), before) == (limit is not None)
    assert ("skip_above_grad_norm" in caplog.text) == (limit is not None)
