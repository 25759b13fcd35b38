"""How rows enter the loss: sharding changes nothing, ungradable rows count and do no harm."""

import math
from dataclasses import replace

import pytest
import torch
from plain_loss import NORMALIZERS, evaluated, plain_loss, random_rows, tensors

from exgrpo_orlhf.objective import MixedPolicyLoss

# -- invariance -------------------------------------------------------------------------------------------------------

FULL = {"response_length": 20, "entropy_coef": 0.01, "kl_coef": 0.05}


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_micro_batching_does_not_change_loss_or_gradient(normalizer, ratio):
    """T11: nothing grows with the number of micro-batches, the entropy bonus included."""
    loss, rows = MixedPolicyLoss(normalizer=normalizer, ratio=ratio, **FULL), random_rows()
    value, grad, grad_entropies = evaluated(loss, rows)
    for size in (1, 2, 5, 7, 11):
        parts = [evaluated(loss, rows, range(i, min(i + size, 12))) for i in range(0, 12, size)]
        assert sum(part[0] for part in parts) == pytest.approx(value, rel=1e-12)
        assert torch.allclose(torch.cat([part[1] for part in parts]), grad, rtol=1e-12, atol=0)
        assert torch.allclose(torch.cat([part[2] for part in parts]), grad_entropies, rtol=1e-12, atol=0)


# -- rows that do not count -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["logprobs", "behaviour", "entropies", "reference"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e4])
@pytest.mark.parametrize("coefs", [(0.0, 0.0), (0.01, 0.05)])
def test_an_ungradable_row_cannot_poison_loss_or_gradient(field, bad, coefs):
    """Its own tokens get a gradient of exactly 0: a NaN there would reach every weight of the model."""
    loss, rows = MixedPolicyLoss(entropy_coef=coefs[0], kl_coef=coefs[1]), random_rows()
    poisoned = [*rows[:5], replace(rows[5], **{field: [bad] * len(rows[5].logprobs)}), *rows[6:]]
    for dtype in (torch.float64, torch.float32):
        expected, result = (evaluated(loss, part, dtype=dtype) for part in (rows, poisoned))
        assert result[0] == expected[0]
        assert torch.equal(result[1], expected[1])
        assert torch.equal(result[2], expected[2])


@pytest.mark.parametrize("coefs", [(0.0, 0.0), (0.01, 0.05)])
def test_no_replayed_rows_no_fresh_rows_and_no_rows_at_all_give_no_nan(coefs):
    """T10."""
    loss = MixedPolicyLoss(entropy_coef=coefs[0], kl_coef=coefs[1])
    rows = random_rows()
    for part in ([r for r in rows if not r.replayed], [r for r in rows if r.replayed]):
        value, grad, _ = evaluated(loss, part)
        assert value == pytest.approx(plain_loss(loss, part)[0], rel=1e-12)
        assert torch.isfinite(grad).all()
    value, grad, _ = evaluated(loss, rows, members=[])
    assert value == 0
    assert grad.shape == (0,)


@pytest.mark.parametrize(
    "settings",
    [{}, {"shaping": False}, {"importance_weights": False}, {"clip_low": None, "clip_high": None}],
    ids=str,
)
def test_rows_without_an_advantage_have_no_gradient_and_need_one_only_with_entropy_or_kl(settings):
    loss, rows = MixedPolicyLoss(**settings), random_rows()
    _, grad, _ = evaluated(loss, rows)
    advantages = tensors(loss, rows).advantages
    needed = loss.needs_gradient(advantages)
    assert needed.equal(advantages != 0)
    assert 0 < needed.sum() < len(needed)
    assert not grad[~needed].any()
    for coefficient in ("entropy_coef", "kl_coef"):
        assert replace(loss, **{coefficient: 0.01}).needs_gradient(advantages).all()


def test_the_kl_term_of_a_token_that_the_policy_all_but_rules_out_is_bounded_and_has_no_gradient():
    """exp(x) of 12 nats would outweigh every other token of the step, of 1,000 it would be infinite."""
    loss, rows = MixedPolicyLoss(kl_coef=0.5, entropy_coef=0.0), random_rows()
    batch = tensors(loss, rows)
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages), in_loss=torch.ones_like(batch.in_loss))
    logprobs = batch.logprobs.detach().clone().requires_grad_()
    for x in (12.0, 1000.0):
        value = loss(replace(batch, logprobs=logprobs, reference_logprobs=logprobs.detach() + x))
        [grad] = torch.autograd.grad(value, logprobs)
        assert float(value) == pytest.approx(0.5 * 10.0 * batch.token_weight * len(logprobs))
        assert not grad.any()


def test_kl_without_a_reference_is_refused():
    loss = MixedPolicyLoss(kl_coef=0.1)
    with pytest.raises(ValueError, match=r"MixedPolicyLoss\.kl_coef > 0 needs the reference's log-probs"):
        loss(replace(tensors(loss, random_rows()), reference_logprobs=None))
    with pytest.raises(ValueError, match=r"kl_convex those of π_\{k−1\} too"):
        loss(replace(tensors(loss, random_rows()), base_share=0.9))
