"""Packed rows without flash-attn, for OpenRLHF 0.11.2 and transformers 5.15.0.

This module takes the place of `openrlhf.models.ring_attn_utils`, which imports flash_attn, and packs with torch. For
attention there is torch 2.13's varlen_attn, which calls the same kernels.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch

from . import patches

ATTENTION = "torch_varlen"  # the name by which transformers knows it: --ds.attn_implementation


def is_needed() -> bool:
    return importlib.util.find_spec("flash_attn") is None


def install() -> None:
    """Makes this process able to run OpenRLHF without flash_attn, as cpu.install does without CUDA."""
    patches.ring_attention(sys.modules[__name__], _register)


def _register(_: Any) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, flash_attention_mask)


def lengths_of(attention_mask: torch.Tensor) -> dict[str, Any]:
    """Where the rows of a packed pass begin, by their mask (B, S). Without it transformers finds that out in each layer
    anew, and the host waits for the GPU four times there."""
    lengths = attention_mask.sum(1)
    longest, ends = int(lengths.max()), torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **more: Any
) -> tuple[torch.Tensor, None]:
    """query (1, H, T, D), key and value (1, H', T, D) → (1, T, H, D). A token sees those before it in its own row.

    Raises ValueError for padded rows, and for attention with a cap, sinks or dropout, which the kernel does not have.
    """
    from torch.nn.attention.varlen import varlen_attn
    from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

    refused = [name for name in ("softcap", "s_aux", "dropout") if more.get(name) not in (None, 0.0)]
    if refused or attention_mask is not None or len(query) > 1:
        raise ValueError(
            f"{type(module).__name__}: torch's varlen_attn cannot compute {', '.join(refused) or 'padded rows'}; "
            "install flash-attn, or set 'ds.packing_samples': False and 'train.dynamic_batch_enable': False"
        )
    ends: Any = more.get("cu_seq_lens_q")
    longest: Any = more.get("max_length_q")
    if ends is None:  # OpenRLHF's own forward pass, of a reference model
        (ends, _), (longest, _) = prepare_fa_kwargs_from_position_ids(more["position_ids"])
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, D)
    options: dict[str, Any] = {"scale": more.get("scaling"), "enable_gqa": q.shape[1] != k.shape[1]}
    window = more.get("sliding_window")  # tokens that a token sees, itself included
    options["window_size"] = (-1 if window is None else window - 1, 0)
    attended: Any = varlen_attn(q, k, v, ends, ends, int(longest), int(longest), **options)
    return attended[None], None


def unpad_and_slice_tensor(
    sequences: torch.Tensor, attention_mask: torch.Tensor, ring_attn_group: None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Packs padded rows (B, S) into one row of their T real tokens, as OpenRLHF's function of this name does.

    Returns tokens, position ids and labels (each (1, T)), 0 as the number of tokens of ring padding, and the positions
    (T,) of the tokens among the B·S. Position ids restart at 0 with each sequence: by this transformers, called without
    an attention mask, keeps the sequences apart. The label of a token is the next one in its padded row.
    """
    places = attention_mask.flatten().nonzero().flatten()  # (T,)
    positions = attention_mask.long().cumsum(dim=-1) - 1  # (B, S)
    labels = sequences.roll(-1, dims=1)  # (B, S)
    tokens, positions, labels = (x.flatten()[places].unsqueeze(0) for x in (sequences, positions, labels))
    return tokens, positions, labels, 0, places


def gather_and_pad_tensor(
    tensor: torch.Tensor, ring_attn_group: None, ring_attn_pad_len: int, indices: torch.Tensor, batch: int, seqlen: int
) -> torch.Tensor:
    """The inverse: values (1, T, …) of packed tokens as (batch, seqlen, …), zero at padding."""
    rest = tensor.shape[2:]
    return tensor.new_zeros(batch * seqlen, *rest).index_copy(0, indices, tensor[0]).view(batch, seqlen, *rest)


def get_ring_attn_group() -> None:
    """There is none."""


def set_ring_attn_group(group: object) -> None:
    raise ValueError("--ds.ring_attn_size above 1 needs flash_attn")
