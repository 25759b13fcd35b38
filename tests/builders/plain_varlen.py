"""Attention of several spans as torch.nn.attention.varlen.varlen_attn defines it, without its kernel, in float32."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    most_queries: int,
    most_keys: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """query: (N, H·G, D); key, value: (M, H, D). The last query of a span sees its last key."""
    left, right = window_size  # keys before the one at a query's own place; -1: all of them
    assert right == 0, "causal"
    assert query.dtype == key.dtype == value.dtype
    assert query_ends.dtype == key_ends.dtype == torch.int32
    spans = [list(pairwise(ends.cpu().tolist())) for ends in (query_ends, key_ends)]
    assert [spans[0][-1][1], spans[1][-1][1]] == [len(query), len(key)]
    assert [max(end - begin for begin, end in each) for each in spans] == [most_queries, most_keys]
    assert enable_gqa or query.shape[1] == key.shape[1]
    grouped, results = query.shape[1] // key.shape[1], []
    for (begin, end), (first, last) in zip(*spans, strict=True):
        q = query[begin:end].float().transpose(0, 1)  # (H·G, T, D)
        k, v = (x[first:last].float().repeat_interleave(grouped, 1).transpose(0, 1) for x in (key, value))
        scores = q @ k.transpose(1, 2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        places = torch.arange(last - first, device=query.device)
        ahead = places - (places[:, None] + (last - first) - (end - begin))[: end - begin]
        hidden = (ahead > 0) | ((ahead < -left) & (left >= 0))
        results.append((scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(results).to(query.dtype)


def flash_alone(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """For the dtypes that the kernel takes."""
    if query.dtype == torch.float32:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    return varlen_attn(query, *args, **kwargs)
