"""Log-probs and entropies of given tokens from hidden states, in chunks: the whole logits never exist.

For N tokens and a vocabulary of V the logits are N × V: 5 GB in float32 for 8,192 tokens of a Qwen model, several
times over once softmax and autograd have kept their copies. Here a block of the vocabulary at a time goes through the
output layer, for all tokens, and the backward pass computes the block's logits again instead of keeping them.

Blocks of the vocabulary, not of the tokens: the weight and its gradient, by far the largest tensors, are then read
and written once, and the gradient is never a sum over chunks, which bfloat16 would need float32 for. What the backward
pass needs of the other blocks is a number per token, so the forward pass keeps it. On a GPU each operation alone would
read and write the whole block: there torch.compile makes one or two passes of them, and blocks are wider.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..attention.products import is_large, product

log = logging.getLogger(__name__)

CHUNK_ELEMENTS = 2**22  # logits held at a time: 16 MiB in float32, in the cache of two virtual cores between two passes
COLUMNS = 16_384  # of a block whose arithmetic is fused: on an H200 1.5 to 5 times as fast as CHUNK_ELEMENTS in place


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
    chunk_elements: logits held at a time, or N × H where that is more; if not all fit, on a GPU N × `COLUMNS`
    Returns float32 (float64 for float64 input): log-probs (N,) at `temperature`, entropies (N,) in nats at
    temperature 1, both differentiable in hidden, weight and bias. Raises ValueError on shapes that do not fit.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden (N, H), weight (V, H) and targets (N,) do not fit: {tuple(hidden.shape)}, {tuple(weight.shape)}, "
            f"{tuple(targets.shape)}"
        )
    fused = compiled(hidden.device.type) if len(targets) * len(weight) > chunk_elements else None
    # Narrower blocks than H would spend their time reading and writing the hidden states' gradient.
    width = COLUMNS if fused else max(hidden.shape[1], chunk_elements // max(1, len(targets)))
    options = temperature, min(len(weight), width), fused
    logprobs, entropies = _TokenStats.apply(hidden, weight, bias, targets, *options)  # type: ignore[no-untyped-call]
    return logprobs, entropies


def response_stats(head: Any, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs at `temperature` and entropies at 1 of response tokens, `targets`, (N,) each, in the dtype of `hidden`,
    (N, D): the hidden states that predict them. head: the model's output layer"""
    bias = getattr(head, "bias", None)
    return token_stats(
        hidden,
        head.weight.to(hidden.dtype),
        targets,
        bias=None if bias is None else bias.to(hidden.dtype),
        temperature=temperature,
    )


def block_sums(z: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of logits (N, W) the largest one m of each token, Σ e^(z−m), Σ e^(z−m)·(z−m) and Σ e^((z−m)/T): (N,) each."""
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    peak = z.amax(1)
    below = z - peak[:, None]
    p = below.exp()
    return peak, p.sum(1), (p * below).sum(1), (below / temperature).exp().sum(1)


def block_gradient(z: Tensor, place: Tensor, scale: Tensor, tempered: Tensor, temperature: float, *more: Any) -> Tensor:
    """In logits (N, W), of their shape and dtype. All others are (N,), as in `_TokenStats.backward`.

    place: the target's column, which may be outside; more: through the entropies
    """
    dtype, z = z.dtype, z.to(tempered.dtype)
    chosen = torch.arange(z.shape[1], device=z.device) == place[:, None]
    slope = scale[:, None] * (chosen.to(z.dtype) - (z / temperature - tempered[:, None]).exp())
    if more:
        grad_entropies, total, entropies = (values[:, None] for values in more)
        slope = slope - grad_entropies * (z - total).exp() * (z - total + entropies)
    return slope.to(dtype)


@cache
def compiled(device: str) -> Any:
    """`block_sums` and `block_gradient`, fused; None for a CPU, and if torch.compile fails, which is said once."""
    if device == "cpu":
        return None
    options: Any = {"compile_threads": 1}  # in this process: two small kernels need no pool of processes
    try:
        if torch._dynamo.config.disable:
            raise RuntimeError("it is switched off")
        fused = [torch.compile(f, dynamic=True, options=options) for f in (block_sums, block_gradient)]
        with torch.no_grad():
            fused[0](torch.zeros(8, 64, dtype=torch.bfloat16, device=device), 0.9)
        return fused
    except Exception as error:  # of dynamo, inductor, Triton, the C compiler or the driver, of any kind
        reason = str(error).strip().partition("\n")[0]
        log.warning("log-probs and entropies take longer than they need: torch.compile failed (%s)", reason)
        return None


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, width: int, buffers: int
) -> Iterator[tuple[slice, Tensor, list[Tensor]]]:
    """Blocks of the vocabulary, their logits, and that many buffers (N, W); the first one may hold the logits, which
    without buffers are of the weight's dtype.

    Buffers are reused: memory fresh from the system costs more time than the arithmetic done in it.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    whole = [torch.empty(len(hidden), width, dtype=dtype, device=hidden.device) for _ in range(buffers)]
    for begin in range(0, len(weight), width):
        block = slice(begin, min(begin + width, len(weight)))
        rooms = [buffer[:, : block.stop - begin] for buffer in whole]
        columns, offsets = weight[block], None if bias is None else bias[block]
        if not rooms:
            z = torch.nn.functional.linear(hidden, columns, offsets)
        elif is_large(hidden, columns):
            z = product(hidden, columns, offsets)
        else:
            same = dtype == weight.dtype
            z = torch.mm(hidden, columns.t(), out=rooms[0]) if same else rooms[0].copy_(hidden @ columns.t())
            z = z if offsets is None else z.add_(offsets)
        yield block, z, rooms
        del z  # or the next block's would be made beside them


def _columns(targets: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Which targets lie in the block, and each one's column there; 0 for the others."""
    inside = (targets >= block.start) & (targets < block.stop)
    return inside, torch.where(inside, targets - block.start, 0)


class _TokenStats(torch.autograd.Function):
    """z = hidden·Wᵀ + b,  p = softmax(z),  log π = log_softmax(z/T)[target],  H = −Σ p log p."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature, ctx.width, ctx.fused = temperature, width, fused = options
        chosen = torch.zeros(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        parts = []  # of each block what `block_sums` returns
        for block, z, rooms in _logits(hidden, weight, bias, width, 0 if fused else 2):
            inside, column = _columns(targets, block)
            chosen += torch.where(inside, z.gather(1, column[:, None]).squeeze(1), 0)  # the target's logit
            if fused:
                parts.append(fused[0](z, temperature))
                continue
            peak = z.amax(1)
            z.sub_(peak[:, None])
            p = torch.exp(z, out=rooms[1])
            mass = p.sum(1)
            moment = p.mul_(z).sum(1)
            parts.append((peak, mass, moment, mass if temperature == 1 else z.div_(temperature).exp_().sum(1)))
        # The blocks together: the same sums around the largest logit of all.
        peaks, masses, moments, tempered = map(torch.stack, zip(*parts, strict=True))  # (blocks, N)
        peak = peaks.amax(0)
        below = peaks - peak
        mass = (below.exp() * masses).sum(0)
        moment = (below.exp() * (moments + below * masses)).sum(0)
        log_mass = mass.log()
        log_tempered = ((below / temperature).exp() * tempered).sum(0).log()
        entropies = log_mass - moment / mass
        ctx.save_for_backward(
            hidden, weight, bias, targets, entropies, log_mass + peak, log_tempered + peak / temperature
        )
        ctx.set_materialize_grads(False)
        return (chosen - peak) / temperature - log_tempered, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropies, total, tempered = ctx.saved_tensors
        grad_logprobs, grad_entropies = grads
        if grad_logprobs is None and grad_entropies is None:
            return (None,) * 7
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        # The hidden states' gradient is a sum over blocks: in float32, or bfloat16 would lose the later blocks.
        grad_hidden = torch.zeros_like(hidden, dtype=total.dtype) if need_hidden else None
        grad_weight = torch.empty_like(weight) if need_weight else None
        grad_bias = torch.empty_like(bias) if need_bias else None
        scale = torch.zeros_like(total) if grad_logprobs is None else grad_logprobs / ctx.temperature
        of_entropies = () if grad_entropies is None else (grad_entropies, total, entropies)
        buffers = 0 if ctx.fused else 1 + 2 * bool(of_entropies)
        for block, z, rooms in _logits(hidden, weight, bias, ctx.width, buffers):
            if ctx.fused:
                grad_z = ctx.fused[1](z, targets - block.start, scale, tempered, ctx.temperature, *of_entropies)
            else:
                if grad_entropies is not None:
                    # ∂H/∂z_j = −p_j (log p_j + H)
                    log_p = torch.sub(z, total[:, None], out=rooms[1])
                    p = torch.exp(log_p, out=rooms[2])
                    through_entropies = p.mul_(log_p.add_(entropies[:, None])).mul_(-grad_entropies[:, None])
                # ∂ log π/∂z_j = (1[j = target] − softmax(z/T)_j) / T
                inside, column = _columns(targets, block)
                grad_z = z.div_(ctx.temperature).sub_(tempered[:, None]).exp_().mul_(-scale[:, None])
                grad_z.scatter_add_(1, column[:, None], torch.where(inside, scale, 0)[:, None])
                if grad_entropies is not None:
                    grad_z.add_(through_entropies)
            if grad_bias is not None:
                grad_bias[block] = grad_z.sum(0, dtype=total.dtype)
            grad_z = grad_z.to(weight.dtype)
            large = is_large(hidden, weight[block])
            if grad_weight is not None and large:
                grad_weight[block] = product(grad_z.t(), hidden.t())
            elif grad_weight is not None:
                torch.mm(grad_z.t(), hidden, out=grad_weight[block])
            if grad_hidden is not None:
                if large:
                    grad_hidden += product(grad_z, weight[block].t())
                elif weight.dtype == grad_hidden.dtype:
                    grad_hidden.addmm_(grad_z, weight[block])
                else:
                    grad_hidden += grad_z @ weight[block]
            del z, grad_z  # or the next block's would be made beside them
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias, *(None,) * 4
