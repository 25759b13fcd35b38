"""OpenRLHF's real actor trainer: its loss, gradient and metrics of a batch are those of the local engine."""

from __future__ import annotations

import itertools
from dataclasses import replace

import engine_builders
import numpy as np
import openrlhf_on_cpu  # noqa: F401  (first: without CUDA OpenRLHF cannot be imported before it)
import pytest
import torch
from openrlhf.models import PolicyLoss
from openrlhf.trainer.ppo_utils import NaiveReplayBuffer
from openrlhf_actor import make_actor, update
from openrlhf_ranks import Case, K, arguments, entropy_of, experiences_of

from exgrpo_orlhf.engines.openrlhf.experience_maker import as_experience
from exgrpo_orlhf.engines.openrlhf.policy_loss import MixedLoss
from exgrpo_orlhf.objective import MixedPolicyLoss

pytestmark = pytest.mark.openrlhf

NORMALIZERS = ("constant", "tokens", "sequences")
BOUNDS = {"ratio": (0.7, 1.4), "binary_kl": (0.0, 0.1), "tv": (0.0, 0.11)}  # so that some is filtered, and some not
OFF = PolicyLoss()
CORRECTIONS = [
    PolicyLoss(
        is_correction_level=level,
        is_correction_mode=mode,
        is_correction_gating=gating,
        is_correction_threshold=BOUNDS[gating],
    )
    for level, mode, gating in itertools.product(("token", "seq"), ("mask", "clip"), BOUNDS)
    if mode == "mask" or (level, gating) == ("token", "ratio")
]
TWO_PASSES = "Optimizer.passes_per_batch = 2"  # then π_old is not by definition the policy as it is
BY_TOKENS = MixedPolicyLoss(normalizer="tokens")
CONSTANT = MixedPolicyLoss(response_length=12)
of_correction = pytest.mark.parametrize("correction", CORRECTIONS)


def micro_batch(experiences):
    """All rows in one micro-batch, as the actor trainer gets them from OpenRLHF's replay buffer."""
    buffer = NaiveReplayBuffer(1)
    for experience in experiences:
        buffer.append(experience)
    return buffer.collate_fn(buffer.items)


def one_micro_batch(case):
    """A case in one micro-batch, with its response mask and which rows are replayed."""
    e = micro_batch(as_experience(case.batch, case.forward, case.behaviour))
    return e, e.action_mask.bool(), torch.stack(e.info["replayed"]).bool()


def tensors(case):
    """log_probs (float32, with gradient), old, rollout, advantages, mask, replayed of a case in one micro-batch. They
    are NaN where there is no response token in the loss."""
    e, mask, replayed = one_micro_batch(case)
    mask = mask & torch.stack(e.info["in_loss"]).bool()[:, None]
    now = torch.from_numpy(case.now.astype(np.float32))[:, : mask.shape[1]]
    log_probs, old, rollout, advantages = (
        torch.where(mask, x, torch.nan) for x in (now, e.action_log_probs, e.rollout_log_probs, e.advantages)
    )
    return log_probs.requires_grad_(), old, rollout, advantages, mask, replayed


# -- the loss alone ---------------------------------------------------------------------------------------------------


@of_correction
def test_the_rollout_correction_is_openrlhfs_on_fresh_rows_and_none_on_replayed_ones(correction):
    case = Case(ungraded=False)
    e, mask, replayed = one_micro_batch(case)
    fresh, tokens = ~replayed, int(mask.sum())

    # With π_θ = π_old nothing is clipped, and PolicyLoss's term of a token is −coefficient · A / tokens.
    mine = e.action_log_probs.double().requires_grad_()
    old, rollout = e.action_log_probs.double(), e.rollout_log_probs.double()
    # Replayed rows have no gap of their own: with one, a correction of them would show.
    gap = torch.tensor([0.5, -0.5] * mask.shape[1])[: mask.shape[1]]
    rollout = torch.where(mask & replayed[:, None], old + gap, rollout)
    value, *_ = correction(mine, old, e.advantages, e.action_mask, rollout, 1, float(tokens), 1.0)
    value.backward()
    coefficient = torch.where(mask, -mine.grad * tokens / torch.where(mask, e.advantages, 1), 0)
    ours = MixedLoss(BY_TOKENS, len(case.rows), 1, False, correction)._correction(old, rollout, mask)
    torch.testing.assert_close(ours, coefficient, atol=1e-12, rtol=1e-6)
    as_it_is = torch.isclose(ours, (old - rollout).exp())[mask & fresh[:, None]]
    assert as_it_is.any()
    assert not as_it_is.all()

    gradients = []
    for used in (correction, OFF):
        mixed = MixedLoss(BY_TOKENS, len(case.rows), 1, False, used)
        mixed.replayed = replayed
        mine = torch.from_numpy(case.now[:, : mask.shape[1]].copy()).requires_grad_()
        mixed(mine, old, e.advantages, mask, rollout, 1, tokens, 1)[0].backward()
        gradients.append(mine.grad)
    torch.testing.assert_close(gradients[0][fresh], gradients[1][fresh] * coefficient[fresh])
    assert torch.equal(gradients[0][~fresh], gradients[1][~fresh])


def test_the_rollout_correction_does_not_weigh_the_kl_term():
    case = Case(ungraded=False)
    e, mask, replayed = one_micro_batch(case)
    width = mask.shape[1]
    gradients = {}
    for kl_coef, correction in itertools.product((0.0, 0.3), (OFF, CORRECTIONS[0])):
        loss = MixedPolicyLoss(normalizer="sequences", kl_coef=kl_coef)
        mixed = MixedLoss(loss, len(case.rows), 1, False, correction)
        mixed.replayed, mixed.reference = replayed, torch.from_numpy(case.reference[:, :width])
        mine = torch.from_numpy(case.now[:, :width].copy()).requires_grad_()
        old, rollout = e.action_log_probs, e.rollout_log_probs
        mixed(mine, old, e.advantages, mask, rollout, 1, int(mask.sum()), 1)[0].backward()
        gradients[kl_coef, correction] = mine.grad
    plain, corrected = (gradients[0.3, c] - gradients[0.0, c] for c in (OFF, CORRECTIONS[0]))
    assert plain.abs().max() > 1e-4
    torch.testing.assert_close(plain, corrected, atol=1e-9, rtol=0)
    assert not torch.allclose(gradients[0.0, OFF], gradients[0.0, CORRECTIONS[0]])


@of_correction
def test_in_the_only_step_of_a_batch_the_correction_takes_the_training_pass_for_pi_old(correction):
    """Whatever is passed as the fresh rows' log-probs, which have not been measured."""
    case = Case()
    mine, old, rollout, advantages, mask, replayed = tensors(case)
    fresh = mask & ~replayed[:, None]
    outcomes = []
    for single_step, pi_old in ((True, torch.zeros_like(old)), (False, mine.detach())):
        loss = MixedLoss(BY_TOKENS, len(case.rows), 1, single_step, correction)
        loss.replayed = replayed
        value, *metrics = loss(mine, torch.where(fresh, pi_old, old), advantages, mask, rollout, 1, int(mask.sum()), 1)
        mine.grad = None
        value.backward()
        outcomes.append((mine.grad, torch.stack([value.detach(), *metrics]), torch.tensor(list(loss.totals.values()))))
    for one, other in zip(*outcomes, strict=True):
        assert torch.equal(one, other)
    assert outcomes[0][2][-1] > 0, "the gap between the engines' log-probs and the trainer's"


# -- optimiser steps on ranks and micro-batches -----------------------------------------------------------------------

LAYOUTS = [
    {"actor.num_gpus_per_node": ranks, "train.micro_batch_size": micro, "rollout.micro_batch_size": 2}
    for ranks, micro in ((1, 32), (1, 4), (2, 2), (4, 1), (4, 4))
] + [
    {
        "actor.num_gpus_per_node": ranks,
        "train.dynamic_batch_enable": True,
        "train.max_tokens_per_gpu": tokens,
        "rollout.max_tokens_per_gpu": tokens,
    }
    for ranks, tokens in ((1, 40), (2, 30), (4, 24))
]
named = lambda layout: "-".join(map(str, layout.values()))
on_layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=named)


@pytest.mark.parametrize("extra", ["", "empty", "sequence ratio, entropy and KL", "short groups, entropy and KL"])
@on_layouts
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_ranks_and_micro_batches_do_not_change_the_gradient(normalizer, layout, extra):
    """Two passes of one optimiser step each, every one of which is the local engine's step. Where a micro-batch is a
    single row that could not be graded, OpenRLHF divides its metrics by no response token."""
    terms = {"entropy_coef": 0.02, "kl_coef": 0.3} if extra.endswith("entropy and KL") else {}
    ratio = "sequence" if extra.startswith("sequence") else "token"
    loss = MixedPolicyLoss(normalizer=normalizer, ratio=ratio, response_length=12, **terms)
    case = Case(empty=extra == "empty", beside=1 if extra.startswith("short") else K - 1)
    _, gradient = case.plain(loss)
    status, gradients = case.fit(loss, TWO_PASSES, **layout)
    assert all(np.isfinite(value) for value in status.values())
    assert len(gradients) == 2
    for step in gradients:
        torch.testing.assert_close(step, gradient, atol=2e-7, rtol=1e-5)


@pytest.mark.parametrize("beside", [K - 1, 1])
@on_layouts
def test_the_only_step_of_a_batch_takes_the_policy_that_sampled_it_and_records_every_row_in_the_loss(layout, beside):
    """Then π_θ/π_old is 1 for fresh rows, which have not been measured before; stored rows keep their own log-probs.
    Over all ranks each is recorded under its position in the batch."""
    case = Case(beside=beside)
    stored = [row.trajectory and row.trajectory.behaviour_logprobs for row in case.rows]
    exact = [case.of_policy(i) if logprobs is None else logprobs for i, logprobs in enumerate(stored)]
    value, gradient = case.plain(CONSTANT, exact)
    status, (slope,) = case.fit(CONSTANT, behaviour=stored, recorded=(recorded := []), **layout)
    torch.testing.assert_close(slope, gradient, atol=2e-7, rtol=1e-5)
    assert status["policy/loss"] == pytest.approx(value, rel=1e-5)
    assert status["policy/clip_share"] == status["policy/approx_kl"] == 0
    assert sorted(i for i, _ in recorded) == [i for i, row in enumerate(case.rows) if row.in_loss]
    assert any(not row.in_loss for row in case.rows)
    for i, (logprobs, entropy) in recorded:
        assert logprobs.dtype == np.float32
        assert logprobs.tobytes() == case.of_policy(i).astype(np.float32).tobytes()
        assert entropy == pytest.approx(float(entropy_of(torch.from_numpy(case.of_policy(i))).mean()), rel=1e-6)


@pytest.mark.parametrize("binding", [TWO_PASSES, "Optimizer.steps_per_batch = 2"])
def test_several_passes_or_steps_record_nothing(binding):
    """Their log-probs are those of another policy than the one that sampled."""
    Case(ungraded=False).fit(MixedPolicyLoss(), binding, recorded=(recorded := []))
    assert recorded == []


@on_layouts
def test_without_replay_and_by_tokens_the_gradient_is_that_of_openrlhfs_own_loss(layout):
    case = Case(replay=False, ungraded=False)
    theirs = PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.2).forward
    (ours, mine), (status, gradients) = (case.fit(BY_TOKENS, TWO_PASSES, forward=f, **layout) for f in (None, theirs))
    assert ours["ppo_clip_ratio"] == pytest.approx(status["ppo_clip_ratio"], rel=1e-6)
    assert 0.1 < ours["ppo_clip_ratio"] < 0.9
    for a, b in zip(mine, gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-6)


@on_layouts
@pytest.mark.parametrize("replay", [True, False])
def test_every_rank_and_micro_batch_of_a_mixed_batch_is_unclipped_and_of_another_clipped(replay, layout):
    """Also those that hold no replayed row."""
    case = Case(replay=replay)
    unclipped = replace(CONSTANT, clip_low=None, clip_high=None)
    _, gradient = case.plain(unclipped if replay else CONSTANT)
    status, gradients = case.fit(replace(CONSTANT, clips_mixed=False), TWO_PASSES, **layout)
    for step in gradients:
        torch.testing.assert_close(step, gradient, atol=2e-7, rtol=1e-5)
    assert (status["policy/clip_share"] == status["ppo_clip_ratio"] == 0) == replay


@on_layouts
@pytest.mark.parametrize(("steps", "beside", "bound"), [(1, K - 1, None), (2, K - 1, 1.3), (2, 1, 1.1)])
def test_metrics_of_an_update_are_those_of_a_plain_computation(layout, steps, beside, bound):
    """Over all ranks, micro-batches, steps and passes. The loss is the mean over the steps, as on the local engine.
    With a constant length it does not depend on the distribution of rows over steps."""
    case = Case(beside=beside)
    loss = replace(CONSTANT, max_fresh_weight=bound)
    value, _ = case.plain(loss)
    clipped = tokens = kl = truncated = 0.0
    for i, row in enumerate(case.rows):
        if row.in_loss and row.trajectory is None:
            log_w = case.of_policy(i) - case.behaviour[i]
            w = np.exp(log_w)
            kl += (w - 1 - log_w).sum()
            if bound:
                truncated += (w > bound).sum()
                w = np.minimum(w, bound)
            clipped += ((w > 1.2) if row.advantage > 0 else (w < 0.8)).sum()
            tokens += len(w)
    if layout.get("train.micro_batch_size", 1) * layout["actor.num_gpus_per_node"] * steps > 8 * K:
        layout = {**layout, "train.micro_batch_size": layout["train.micro_batch_size"] // steps}
    status, gradients = case.fit(loss, TWO_PASSES, f"Optimizer.steps_per_batch = {steps}", **layout)
    assert len(gradients) == 2 * steps
    assert status["policy/clip_share"] == pytest.approx(clipped / tokens)
    assert status["policy/approx_kl"] == pytest.approx(kl / tokens)
    if bound:
        assert status["policy/truncated_share"] == pytest.approx(truncated / tokens) != 0
    assert status["policy/loss"] == pytest.approx(value, rel=1e-5)


def test_an_ungradable_row_that_is_a_micro_batch_of_its_own_reaches_the_end_of_the_real_actor(warm_model):
    """With a model: its forward pass has no response token then, and its backward pass a gradient of 0."""
    batch = engine_builders.sampled_batch(warm_model, n=2)
    batch.rows[0][1] = replace(batch.rows[0][1], in_loss=False, advantage=0.0)
    norms = []
    for rows in (1, 8):
        actor = make_actor(warm_model, questions_per_step=2, **{"train.micro_batch_size": rows})
        norms.append(update(actor, batch)["policy/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=0.05)  # bfloat16
    assert norms[0] > 0


# -- from a batch to experience ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[3], LAYOUTS[-2]], ids=named)
def test_a_row_reaches_the_actor_bit_identical(layout):
    """Through concatenation, splitting, removal of padding and batching, in whatever order."""
    case = Case()
    args = arguments(MixedPolicyLoss(), **layout)
    e = micro_batch(experiences_of(args, case.batch, case.forward, case.behaviour))
    seen = []
    for j, sequence in enumerate(e.sequences):
        i = int(sequence[0])
        seen.append(i)
        row, prompt, length = case.rows[i], case.forward[i].prompt, len(case.forward[i])
        mask = e.action_mask[j].bool()
        assert mask.nonzero().flatten().tolist() == list(range(len(prompt) - 1, length - 1))
        assert sequence[:length].tolist() == [*prompt, *row.token_ids.tolist()]
        assert e.attention_mask[j].tolist() == [1] * length + [0] * (len(sequence) - length)
        assert (sequence[1:][mask].numpy() == row.token_ids).all()
        wanted = case.behaviour[i] if row.trajectory is None else row.trajectory.behaviour_logprobs
        assert e.action_log_probs[j].dtype == torch.float32
        assert e.action_log_probs[j][mask].numpy().tobytes() == wanted.tobytes()
        sampler = wanted if row.trajectory is not None else row.response.sampler_logprobs
        assert e.rollout_log_probs[j][mask].numpy().tobytes() == sampler.tobytes()
        assert (e.advantages[j][mask].numpy() == np.float32(row.advantage)).all()
        assert bool(e.info["replayed"][j]) == (row.trajectory is not None)
        assert bool(e.info["in_loss"][j]) == row.in_loss
        assert e.info["reward"][j] == (1.0 if row.trajectory is not None else 0.0), "a stored success enters as one"
        assert e.response_length[j] == len(row.token_ids)
        assert e.total_length[j] == length
    assert sorted(seen) == list(range(len(case.rows)))
    assert not all(row.in_loss for row in case.rows)


def test_a_short_group_is_filled_up_with_rows_of_two_tokens_and_no_response():
    case = Case(beside=1)
    experiences = as_experience(case.batch, case.forward, case.behaviour)
    groups = [experiences[i : i + K] for i in range(0, len(experiences), K)]
    assert len(groups) == len(case.batch.rows)
    number = 0
    for group, rows in zip(groups, case.batch.rows, strict=True):
        for e, row in zip(group, rows, strict=False):
            assert e.sequences[0].tolist() == [*case.forward[number].prompt, *row.token_ids.tolist()]
            number += 1
        for e in group[len(rows) :]:
            assert e.total_length.item() == e.sequences.numel() == e.attention_mask.sum() == 2
            assert e.info.pop("mixed"), "a row says of its whole batch that it is mixed"
            assert e.info.pop("weight") == 1, "of no token"
            assert not any(x.any() for x in (e.action_mask, e.advantages, e.response_length, *e.info.values()))
    assert number == len(case.rows) == 8 * K - 4 * (K - 2)
