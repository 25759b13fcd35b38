"""Decoding with one copy of each prompt's keys and values, whatever the number of its responses.

At every token, transformers' caches copy all keys and values to append one position, and attention repeats grouped keys
and values for each query head. With short responses of a small model on a CPU, that copying takes three quarters of the
time. Here

- a prompt's keys and values are kept once, and the queries of all of its rows are one matrix product with them;
- a row's own keys and values are written in place into a buffer with room for its longest response;
- the query heads that share a key-value head are rows of one matrix product.

The model's own modules do the rest: this is an attention function (`AttentionInterface`) and its cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, DynamicCache

NAME = "shared_prompt"  # of the attention function


class SharedPromptCache(Cache):
    """Keys and values of P prompts of W columns, and of R rows of responses to them.

    prompts: (P, H, W, D) for each layer, keys and values; H key-value heads of D features
    outside: (P, W) bool, True where a column is padding
    """

    def __init__(self, filled: DynamicCache, outside: Tensor | None, owner: Tensor, tokens: int) -> None:
        """filled: after the prompts; owner: (R,) the prompt of each row, ascending; tokens: longest response"""
        self.prompts = [(layer.keys, layer.values) for layer in filled.layers]
        self.outside = outside
        keys = self.prompts[0][0]
        shape = (len(owner), keys.shape[1], tokens, keys.shape[3])
        self.responses = [(keys.new_empty(shape), keys.new_empty(shape)) for _ in self.prompts]
        self.length = 0  # tokens of each response so far
        self._own(owner)

    def _own(self, owner: Tensor) -> None:
        """Rows of a prompt are consecutive; `place` is where each stands in a table (P, most rows of a prompt)."""
        count = torch.bincount(owner, minlength=len(self.prompts[0][0]))
        first = count.cumsum(0) - count
        self.most = int(count.max())
        self.owner = owner
        self.place = owner * self.most + torch.arange(len(owner), device=owner.device) - first[owner]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.prompts[0][0].shape[2]) + self.length

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """key_states, value_states: (R, H, 1, D) of the newest token."""
        keys, values = self.responses[layer_idx]
        keys[:, :, self.length] = key_states[:, :, 0]
        values[:, :, self.length] = value_states[:, :, 0]
        self.layer = layer_idx
        return keys[:, :, : self.length + 1], values[:, :, : self.length + 1]

    def select(self, rows: Tensor) -> None:
        """Keeps these rows, in ascending order."""
        self.responses = [(keys[rows], values[rows]) for keys, values in self.responses]
        self._own(self.owner[rows])


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    shared: SharedPromptCache,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One new token per row. query: (R, H·G, 1, D); key, value: (R, H, T, D) of the responses → (R, 1, H·G, D)."""
    rows, _, _, width = query.shape
    heads = key.shape[1]
    grouped = query.view(rows, heads, -1, width) * scaling  # (R, H, G, D)
    group = grouped.shape[2]
    prompt_keys, prompt_values = shared.prompts[shared.layer]  # (P, H, W, D)
    prompts, columns = prompt_keys.shape[0], prompt_keys.shape[2]
    # The queries of a prompt's rows as one matrix: (P, H, most · G, D)
    table = grouped.new_zeros(prompts * shared.most, heads, group, width)
    table[shared.place] = grouped
    together = table.view(prompts, shared.most, heads, group, width).transpose(1, 2).flatten(2, 3)
    scores = together @ prompt_keys.transpose(2, 3)  # (P, H, most · G, W)
    if shared.outside is not None:
        scores = scores.masked_fill(shared.outside[:, None, None], float("-inf"))
    scores = scores.view(prompts, heads, shared.most, group, columns).transpose(1, 2).flatten(0, 1)[shared.place]
    own = grouped @ key.transpose(2, 3)  # (R, H, G, T)
    weights = torch.cat([scores, own], dim=3).softmax(3)
    table = weights.new_zeros(prompts * shared.most, heads, group, columns)
    table[shared.place] = weights[..., :columns]
    together = table.view(prompts, shared.most, heads, group, columns).transpose(1, 2).flatten(2, 3)
    seen = (together @ prompt_values).view(prompts, heads, shared.most, group, width).transpose(1, 2)
    result = seen.flatten(0, 1)[shared.place] + weights[..., columns:] @ value  # (R, H, G, D)
    return result.view(rows, 1, heads * group, width), None


AttentionInterface.register(NAME, attention)
