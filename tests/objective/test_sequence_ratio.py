"""The sequence-level ratio (GSPO, arXiv 2507.18071) against its equations, by autograd in float64, row by row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from plain_loss import NORMALIZERS, PlainRow, evaluated, plain_loss, random_rows

from exgrpo_orlhf.objective import MixedPolicyLoss

CLIPS = [(None, None), (0.2, 0.2), (0.05, 0.1)]


def gspo(loss: MixedPolicyLoss, rows: list[PlainRow]) -> tuple[float, list[float]]:
    """−Σ over fresh rows of weight · min(s·A, clip(s)·A), s = (π_θ(y)/π_old(y))^(1/|y|), and its gradient in all
    log-probs; weight: of each row's tokens together."""
    tokens, value, leaves = sum(len(row.logprobs) for row in rows), torch.zeros((), dtype=torch.float64), []
    for row in rows:
        logprobs = torch.tensor(row.logprobs, dtype=torch.float64, requires_grad=True)
        leaves.append(logprobs)
        if row.replayed or not row.in_loss:
            continue
        length = len(row.logprobs)
        probability = torch.exp(logprobs).prod() / torch.exp(torch.tensor(row.behaviour, dtype=torch.float64)).prod()
        s = probability ** (1 / length)
        objective = s * row.advantage
        if loss.clip_low is not None:
            objective = torch.minimum(objective, s.clamp(1 - loss.clip_low, 1 + loss.clip_high) * row.advantage)
        weight = {
            "constant": length / (len(rows) * loss.response_length),
            "tokens": length / tokens,
            "sequences": 1 / len(rows),
        }[loss.normalizer]
        value = value - weight * objective
    value.backward()
    gradient = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]
    return float(value.detach()), torch.cat(gradient).tolist()


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("clip", CLIPS)
def test_fresh_rows_have_the_ratio_of_the_sequence_and_replayed_ones_their_tokens(clip, normalizer):
    for seed in range(4):
        rows = random_rows(seed)
        common = {"clip_low": clip[0], "clip_high": clip[1], "normalizer": normalizer, "response_length": 20}
        loss = MixedPolicyLoss(ratio="sequence", **common)
        value, gradient, _ = evaluated(loss, rows)
        fresh_value, fresh_gradient = gspo(loss, rows)
        # Replayed rows alone, by the equations of the token-level loss: fresh ones have no term at an advantage of 0.
        silenced = [row if row.replayed else replace(row, advantage=0.0) for row in rows]
        replayed_value, replayed_gradient, _ = plain_loss(MixedPolicyLoss(**common), silenced)
        assert value == pytest.approx(fresh_value + replayed_value, rel=1e-11, abs=1e-14)
        np.testing.assert_allclose(gradient, np.add(fresh_gradient, replayed_gradient), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(("extreme", "advantage"), [(200.0, 0.5), (-200.0, 0.5), (-200.0, -0.5)])
def test_extreme_ratios_are_finite_where_the_clip_bounds_them(extreme, advantage):
    """e^200 is infinite in float32."""
    row = PlainRow([-1.0, -1.0], [-1.0 - extreme] * 2, [-1.0] * 2, [0.0] * 2, advantage, False)
    value, gradient, _ = evaluated(MixedPolicyLoss(ratio="sequence"), [row], dtype=torch.float32)
    assert np.isfinite(value)
    assert torch.isfinite(gradient).all()


def test_the_share_of_clipped_tokens_is_that_of_whole_responses():
    loss = MixedPolicyLoss(ratio="sequence", clip_low=0.2, clip_high=0.2)
    above = (0.5, np.full(3, -1.0, np.float32), np.array([-2.0, -1.0, -1.0], np.float32))  # s = e^(1/3), one token of 3
    inside = (0.5, np.full(2, -1.0, np.float32), np.array([-2.0, 0.0], np.float32))  # s = 1
    sequences, tokens = (one.fresh_metrics(one.fresh_sums([above, inside], False)) for one in (loss, MixedPolicyLoss()))
    assert (sequences["policy/clip_share"], tokens["policy/clip_share"]) == (3 / 5, 2 / 5)
    assert sequences["policy/approx_kl"] == tokens["policy/approx_kl"]
