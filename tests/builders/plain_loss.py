"""The mixed-policy loss of the paper, written out token by token in plain Python, and rows to compare it on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from exgrpo_orlhf.objective import MixedPolicyLoss, TokenBatch

NORMALIZERS = ("constant", "tokens", "sequences")


@dataclass
class PlainRow:
    """One row: per token its log-probs and entropy as Python floats."""

    logprobs: list[float]
    behaviour: list[float]
    reference: list[float]
    entropies: list[float]
    advantage: float
    replayed: bool
    in_loss: bool = True


def token_term(loss: MixedPolicyLoss, row: PlainRow, t: int, mixed: bool = False) -> tuple[float, float]:
    """−(objective of one token), and its derivative in log π_θ.

    With the ratio of the sequence s (GSPO, arXiv 2507.18071) all |y| tokens of a fresh row have the same term, and
    ∂s/∂log π of each is s/|y|: the derivative of their sum in log π of one token is that of one term in log s.
    """
    log_ratios, advantage = [a - b for a, b in zip(row.logprobs, row.behaviour, strict=True)], row.advantage
    by_sequence = loss.ratio == "sequence" and not row.replayed
    log_w = sum(log_ratios) / len(log_ratios) if by_sequence else log_ratios[t]
    w = math.exp(log_w) if log_w < 700 else math.inf
    if not advantage:
        return 0.0, 0.0
    if not row.replayed or loss.clips_replayed:
        largest = loss.max_weight if row.replayed else loss.max_fresh_weight
        if largest is not None:  # a truncated weight keeps its gradient
            w = min(w, largest)
        if loss.clip_low is None or (mixed and not loss.clips_mixed):
            return -w * advantage, -w * advantage
        if loss.dual_clip is not None and advantage < 0 and w > loss.dual_clip:
            return -loss.dual_clip * advantage, 0.0
        clipped = min(max(w, 1 - loss.clip_low), 1 + loss.clip_high)
        if clipped * advantage < w * advantage:
            return -clipped * advantage, 0.0
        return -w * advantage, -w * advantage
    if not loss.importance_weights:
        w = 1.0
    if loss.max_weight is not None:  # a truncated weight keeps its gradient: dw̄/d log π = w̄
        w = min(w, loss.max_weight)
    if loss.shaping:
        f = 1 / (1 + loss.beta / w) if w else 0.0
        slope = f * loss.beta / (w + loss.beta)  # dw/d log π = w
        return -f * advantage, -slope * advantage
    return -w * advantage, -w * advantage


def plain_loss(loss: MixedPolicyLoss, rows: list[PlainRow]) -> tuple[float, list[float], list[float]]:
    """The loss of one optimiser step, and its gradients in all log-probs and in all entropies."""
    n_tokens = sum(len(row.logprobs) for row in rows)
    value, grad_logprobs, grad_entropies = 0.0, [], []
    for row in rows:
        for t in range(len(row.logprobs)):
            divisor = {
                "constant": len(rows) * loss.response_length,
                "tokens": n_tokens,
                "sequences": len(rows) * len(row.logprobs),
            }[loss.normalizer]
            if not row.in_loss:
                grad_logprobs.append(0.0)
                grad_entropies.append(0.0)
                continue
            term, slope = token_term(loss, row, t, any(one.replayed for one in rows))
            x = row.reference[t] - row.logprobs[t]
            value += term / divisor
            value -= loss.entropy_coef * row.entropies[t] / n_tokens
            kl_divisor = divisor if loss.normalizer == "sequences" else n_tokens
            value += loss.kl_coef * (math.exp(x) - x - 1) / kl_divisor
            grad_logprobs.append(slope / divisor + loss.kl_coef * (1 - math.exp(x)) / kl_divisor)
            grad_entropies.append(-loss.entropy_coef / n_tokens)
    return value, grad_logprobs, grad_entropies


def random_rows(seed=0, n=12, spread=0.6) -> list[PlainRow]:
    """Lengths, signs and ratios of all kinds; every third row is replayed, one could not be graded."""
    draw = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        length = int(draw.integers(1, 9))
        behaviour = -draw.exponential(size=length) - 0.1
        rows.append(
            PlainRow(
                logprobs=(behaviour + spread * draw.normal(size=length)).tolist(),
                behaviour=behaviour.tolist(),
                reference=(behaviour + 0.3 * draw.normal(size=length)).tolist(),
                entropies=draw.uniform(0, 2, length).tolist(),
                advantage=float(draw.choice([0.75, -0.25, 0.5, 0.0])),
                replayed=i % 3 == 0,
            )
        )
    rows[5] = replace(rows[5], advantage=0.0, in_loss=False)
    return rows


def tensors(loss, rows, members=None, dtype=torch.float64):
    """The tokens of `members` (all rows by default) of an optimiser step that consists of `rows`."""
    members = range(len(rows)) if members is None else members
    weights = loss.row_weights(torch.tensor([len(row.logprobs) for row in rows]))
    chosen = [rows[i] for i in members]

    def flat(values, dtype=dtype):
        return torch.tensor([value for part in values for value in part], dtype=dtype)

    def spread(values, dtype=dtype):
        pairs = zip(values, chosen, strict=True)
        return torch.tensor([value for value, row in pairs for _ in row.logprobs], dtype=dtype)

    return TokenBatch(
        logprobs=flat([row.logprobs for row in chosen]).requires_grad_(),
        entropies=flat([row.entropies for row in chosen]).requires_grad_(),
        behaviour_logprobs=flat([row.behaviour for row in chosen]),
        advantages=spread([row.advantage for row in chosen]),
        replayed=spread([row.replayed for row in chosen], torch.bool),
        in_loss=spread([row.in_loss for row in chosen], torch.bool),
        row_weights=spread([float(weights[i]) for i in members]),
        token_weight=1 / sum(len(row.logprobs) for row in rows),
        row_of=spread(range(len(chosen)), torch.int64),
        mixed=any(row.replayed for row in rows),
        reference_logprobs=flat([row.reference for row in chosen]),
    )


def evaluated(loss, rows, members=None, dtype=torch.float64):
    batch = tensors(loss, rows, members, dtype)
    value = loss(batch)
    value.backward()
    entropies = batch.entropies.grad
    return value.item(), batch.logprobs.grad, torch.zeros_like(batch.entropies) if entropies is None else entropies
