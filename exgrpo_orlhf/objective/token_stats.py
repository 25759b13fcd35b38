"""Log-probs and entropies of given tokens from hidden states, in chunks: the whole logits never exist.

For N tokens and a vocabulary of V the logits are N × V: 5 GB in float32 for 8,192 tokens of a Qwen model, several
times over once softmax and autograd have kept their copies. Here a chunk of tokens at a time goes through the output
layer, and the backward pass computes the chunk's logits again instead of keeping them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**24  # logits held at a time: 64 MiB in float32


def token_stats(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution.

    hidden (N, H) and weight (V, H), bias (V,): of one dtype, the output layer's; targets (N,) int64
    Returns float32 (float64 for float64 input): log-probs (N,) at `temperature`, entropies (N,) in nats at
    temperature 1, both differentiable in hidden, weight and bias. Raises ValueError on shapes that do not fit.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden (N, H), weight (V, H) and targets (N,) do not fit: {tuple(hidden.shape)}, {tuple(weight.shape)}, "
            f"{tuple(targets.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"the temperature must be positive, got {temperature!r}")
    chunk = max(1, chunk_elements // weight.shape[0])
    logprobs, entropies = _TokenStats.apply(hidden, weight, bias, targets, temperature, chunk)  # type: ignore[no-untyped-call]
    return logprobs, entropies


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return logits if logits.dtype == torch.float64 else logits.float()


class _TokenStats(torch.autograd.Function):
    """z = hidden·Wᵀ + b,  p = softmax(z),  log π = log_softmax(z/T)[target],  H = −Σ p log p."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(len(targets), dtype=dtype, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        for i in range(0, len(targets), chunk):
            part = slice(i, i + chunk)
            z = _logits(hidden[part], weight, bias)  # (C, V)
            target = z.gather(1, targets[part, None]).squeeze(1)
            peak = z.amax(1)
            p = (z - peak[:, None]).exp_()
            total = p.sum(1)
            log_total = total.log() + peak
            entropies[part] = log_total - torch.linalg.vecdot(p, z) / total
            if temperature == 1:
                logprobs[part] = target - log_total
            else:
                logprobs[part] = target / temperature - z.div_(temperature).logsumexp(1)
        ctx.save_for_backward(hidden, weight, bias, targets, entropies)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropies = ctx.saved_tensors
        grad_logprobs, grad_entropies = grads
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # Chunks are summed into one gradient: in float32, or bfloat16 would lose the later chunks.
        grad_weight = torch.zeros_like(weight, dtype=entropies.dtype) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=entropies.dtype) if need_bias else None
        for i in range(0, len(targets), ctx.chunk):
            part = slice(i, i + ctx.chunk)
            z = _logits(hidden[part], weight, bias)
            grad_z = None
            if grad_entropies is not None:
                # ∂H/∂z_j = −p_j (log p_j + H)
                log_p = z.log_softmax(1)
                grad_z = log_p.exp().mul_(log_p.add_(entropies[part, None])).mul_(-grad_entropies[part, None])
            if grad_logprobs is not None:
                # ∂ log π/∂z_j = (1[j = target] − softmax(z/T)_j) / T
                scale = grad_logprobs[part, None] / ctx.temperature
                share = (z if ctx.temperature == 1 else z.div_(ctx.temperature)).softmax(1).mul_(-scale)
                share.scatter_add_(1, targets[part, None], scale)
                grad_z = share if grad_z is None else grad_z.add_(share)
            if grad_z is None:
                return None, None, None, None, None, None
            if grad_bias is not None:
                grad_bias += grad_z.sum(0)
            grad_z = grad_z.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad_z, weight, out=grad_hidden[part])
            if grad_weight is not None:
                if weight.dtype == grad_weight.dtype:
                    grad_weight.addmm_(grad_z.t(), hidden[part])
                else:
                    grad_weight += grad_z.t() @ hidden[part]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )
