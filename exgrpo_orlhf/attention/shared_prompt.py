"""Caches of a generation: keys and values that grow in place, on a CPU with one copy of each prompt's, whatever the
number of its responses.

At every token, transformers' caches copy all keys and values to append one position, and attention repeats grouped keys
and values for each query head. With short responses of a small model on a CPU, that copying takes a third of the time
(benchmarks/generation.py). Here

- a prompt's keys and values are kept once, and the queries of all of its rows are one matrix product with them;
- a row's own keys and values are written in place into a buffer with spare positions;
- the query heads that share a key-value head are rows of one matrix product;
- when a row ends, the last row takes its place, and nothing else is copied.

The model's own modules do the rest: this is an attention function (`AttentionInterface`) and its cache. It computes in
float32 or better, whatever the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from .packing import SHARED, Unfit, is_plain, refuse

BLOCK = 256  # positions reserved at a time
LEAST = 2**18  # numbers that a layer's keys of all rows would be as copies; with fewer, copying is as fast


def fits(model: PreTrainedModel, cache: Cache, rows: int) -> bool:
    """Whether the rows may continue from this cache of prompts with `attention` instead of the model's own, and
    it is worth it.

    What shows only when attention is called raises Unfit then, at the first token.
    """
    if not (
        model.device.type == "cpu"
        and is_plain(model)
        and type(cache) is DynamicCache
        and len(cache.layers) == model.config.get_text_config().num_hidden_layers
        and all(type(layer) is DynamicLayer and layer.is_initialized for layer in cache.layers)
    ):
        return False
    shapes = {tensor.shape for pair in _held(cache) for tensor in pair}
    return len(shapes) == 1 and rows * shapes.pop()[1:].numel() >= LEAST


def _held(cache: Cache) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer of a filled dynamic cache."""
    layers: Any = cache.layers
    return [(layer.keys, layer.values) for layer in layers]


class SharedPromptCache(Cache):
    """Keys and values of P prompts of W columns, and of R rows of T tokens that continue them.

    For each layer and both keys and values: (P · H, W, D) of the prompts, H heads of D features, and (R, H, T, D) of
    the rows.
    """

    def __init__(self, filled: Cache, attention: Tensor, owner: Tensor, tokens: int) -> None:
        """filled: by the prompts; attention: (P, W), 0 where a column is padding; owner: (R,), the prompt of each row;
        tokens: to be appended to a row at most"""
        super().__init__(layers=[])
        pairs = _held(filled)
        dtype = torch.promote_types(pairs[0][0].dtype, torch.float32)
        self.prompts = [(keys.to(dtype), values.to(dtype)) for keys, values in pairs]
        _, self.heads, self.columns, features = pairs[0][0].shape
        empty = torch.empty(len(owner), self.heads, 0, features, dtype=dtype)
        self.rows = [(Reserved(empty, tokens, None), Reserved(empty, tokens, None)) for _ in pairs]
        self.owner = owner
        self.starts = attention.sum(1)  # (P,) the position of the first token after a prompt
        self.length = 0  # T
        self._attended: set[int] = set()  # layers, at the newest token
        self.hidden = None  # or (P, 1, 1, W), added to scores: -inf where a column is padding
        if not attention.all():
            self.hidden = torch.zeros(attention.shape, dtype=dtype).masked_fill_(attention == 0, float("-inf"))
            self.hidden = self.hidden[:, None, None]
        self._arrange()

    def _arrange(self) -> None:
        """Finds for each row and head its place in a table (P, H, N), N: the most rows of a prompt, and the reverse."""
        count = torch.bincount(self.owner, minlength=len(self.starts))
        self.most = int(count.max())
        order = self.owner.argsort(stable=True)
        among = torch.empty_like(order)  # number of a row among those of its prompt
        among[order] = torch.arange(len(order)) - (count.cumsum(0) - count)[self.owner[order]]
        heads = torch.arange(self.heads)
        places = (self.owner[:, None] * self.heads + heads) * self.most + among[:, None]
        self.to_rows = places.flatten()  # (R · H)
        self.to_table = torch.zeros(len(count) * self.heads * self.most, dtype=torch.int64)  # empty places: any row
        self.to_table[self.to_rows] = torch.arange(len(self.to_rows))

    def keep(self, rows: Tensor) -> Tensor:
        """Drops all rows but these, (n,) ascending. Returns them in the order that they have now."""
        order, holes, tails = _closed(rows)
        for pair in self.rows:
            for reserved in pair:
                reserved.shorten(len(rows), holes, tails)
        self.owner = self.owner[order]
        if self.length:  # before the first token, the batch may still need all prompts
            self._drop_prompts()
        self._arrange()
        return order

    def _drop_prompts(self) -> None:
        """Those without a row."""
        owners = self.owner.unique()
        if len(owners) == len(self.starts):
            return
        order, holes, tails = _closed(owners)
        for pair in self.prompts:
            for tensor in pair:
                tensor[holes] = tensor[tails]
        self.prompts = [(first(keys, len(owners)), first(values, len(owners))) for keys, values in self.prompts]
        moved = torch.empty_like(self.starts)
        moved[order] = torch.arange(len(order))
        self.owner, self.starts = moved[self.owner], self.starts[order]
        if self.hidden is not None:
            self.hidden = self.hidden[order]

    def computed(self, row: int) -> Tensor:
        """(2 · layers, H, T, D): keys and values of a row, those of its prompt included."""
        prompt = self.owner[row]
        columns = slice(None) if self.hidden is None else self.hidden[prompt, 0, 0] == 0
        prompts, rows = chain.from_iterable(self.prompts), chain.from_iterable(self.rows)
        pairs = zip(prompts, rows, strict=True)
        return torch.stack([torch.cat([shared[prompt][:, columns], layer.held[row]], 1) for shared, layer in pairs])

    def positions(self) -> Tensor:
        """(R,) of the next tokens"""
        return self.starts[self.owner] + self.length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns + self.length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """key_states, value_states: (R, H, 1, D) of the newest token. Returns the rows' own (R, H, T + 1, D)."""
        keys, values = self.rows[layer_idx]
        self._newest = layer_idx, keys.append(key_states), values.append(value_states)
        return self._newest[1:]

    def finish(self) -> None:
        """Ends a token. Raises Unfit if a layer did not attend: it has no access to its prompt's keys and values."""
        if len(self._attended) < len(self.rows):
            raise Unfit("a layer computes its attention itself")
        self._attended.clear()
        self.length += 1

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query: (R · H, G, D), scaled, G query heads for each key-value head; key, value: (R, H, T, D), what `update`
        returned. Returns (R · H, G, D).

        Raises Unfit if key or value are anything else, because the prompts' are as they were in the cache, or if the
        layer attends twice.
        """
        layer, keys, values = self._newest
        if key is not keys or value is not values or layer in self._attended:
            raise Unfit("a layer changes the keys or values of its cache, or attends twice")
        self._attended.add(layer)
        group, features = query.shape[1:]
        prompt_keys, prompt_values = (tensor.flatten(0, 1) for tensor in self.prompts[layer])  # (P · H, W, D)
        table = query.index_select(0, self.to_table).view(len(prompt_keys), -1, features)  # (P · H, N · G, D)
        scores = table @ prompt_keys.transpose(1, 2)  # (P · H, N · G, W)
        if self.hidden is not None:
            scores.view(len(self.starts), self.heads, -1, self.columns).add_(self.hidden)
        scores = scores.view(-1, group, self.columns).index_select(0, self.to_rows)  # (R · H, G, W)
        row_scores = query @ key.flatten(0, 1).transpose(1, 2)  # (R · H, G, T)
        weights = torch.cat([scores, row_scores], dim=2).softmax(2)
        table = weights[..., : self.columns].index_select(0, self.to_table)
        result = table.view(len(prompt_keys), -1, self.columns) @ prompt_values  # (P · H, N · G, D)
        result = result.view(-1, group, features).index_select(0, self.to_rows)
        return torch.baddbmm(result, weights[..., self.columns :], value.flatten(0, 1))


def _closed(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For (n,) ascending indices that stay: their order when those from n on have moved into the places below n that
    became free; these places; and what moves there."""
    n = len(rows)
    free = torch.ones(n, dtype=torch.bool)
    free[rows[rows < n]] = False
    holes, tails = free.nonzero().squeeze(1), rows[rows >= n]
    return torch.arange(n).index_copy_(0, holes, tails), holes, tails


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    shared_prompt: SharedPromptCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One new token per row. query: (R, H · G, 1, D); key, value: (R, H, T, D). Returns (R, 1, H · G, D).

    Raises Unfit if the model asks for more than that.
    """
    refuse(kwargs)
    if shared_prompt is None or attention_mask is not None:
        raise Unfit("attention is called without the shared prompts, or with a mask")
    rows, heads, _, features = query.shape
    scaled = query.to(key.dtype) * (features**-0.5 if scaling is None else scaling)
    scaled = scaled.reshape(rows * key.shape[1], -1, features)
    if torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            result = shared_prompt.attend(scaled, key, value)
    else:
        result = shared_prompt.attend(scaled, key, value)
    return result.view(rows, 1, heads, features).to(query.dtype), None


AttentionInterface.register(SHARED, attention)


def reserve(cache: Cache, positions: int, dtype: torch.dtype | None) -> None:
    """Makes layers of full attention of a filled cache append in place, in buffers with spare positions.

    transformers' dynamic layers copy all their keys and values at every token. Its static layers do not, but have their
    final length from the first token on, and attention runs over the empty positions too. Other kinds of layers (those
    of a window hold no more than that), and a model's own cache classes, stay as they are.

    positions: the most that will be appended
    dtype: of keys and values; None: unchanged. Under autocast a rotary embedding turns bfloat16 keys into float32, and
        attention casts them back: keeping them in bfloat16 gives the same result with half the memory.
    """
    if type(cache) is not DynamicCache:
        return
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[i] = ReservedLayer(layer, positions, dtype)


def padded(rows: Sequence[Tensor]) -> DynamicCache:
    """A cache of rows (2 · layers, H, T, D) of keys and values by turns, with zeros before those of shorter rows."""
    cache, length = DynamicCache(), max(row.shape[2] for row in rows)
    for layer in range(0, len(rows[0]), 2):
        keys, values = (
            torch.stack([torch.nn.functional.pad(row[i], (0, 0, length - row.shape[2], 0)) for row in rows])
            for i in (layer, layer + 1)
        )
        cache.update(keys, values, layer // 2)
    return cache


def first(tensor: Tensor, count: int) -> Tensor:
    """The first entries along the first dimension. They are copied if the rest takes more than half of the memory."""
    part = tensor[:count]
    return part.clone() if 2 * part.nbytes < part.untyped_storage().nbytes() else part


class Reserved:
    """A tensor (R, H, T, D) of rows, heads, positions and features, which grows along T within a larger buffer."""

    def __init__(self, tensor: Tensor, positions: int, dtype: torch.dtype | None) -> None:
        self._buffer, self._end = tensor.to(dtype=dtype), tensor.shape[2]
        self._positions = positions  # that may still be appended

    @property
    def held(self) -> Tensor:
        return self._buffer[:, :, : self._end]

    def append(self, new: Tensor) -> Tensor:
        """new: (R, H, N, D), of any dtype. Returns the whole tensor (R, H, T + N, D)."""
        count = new.shape[2]
        if self._end + count > self._buffer.shape[2]:
            held = self.held
            rows, heads, length, width = held.shape
            self._buffer = held.new_empty(rows, heads, length + max(count, min(BLOCK, self._positions)), width)
            self.held.copy_(held)
        self._buffer[:, :, self._end : self._end + count] = new
        self._end += count
        self._positions -= count
        return self.held

    def shorten(self, rows: int, holes: Tensor, tails: Tensor) -> None:
        """Keeps that many rows, after the rows `tails` have moved into the places `holes`."""
        self.held[holes] = self.held[tails]
        self._buffer = first(self._buffer, rows)

    def select(self, rows: Tensor) -> Tensor:
        self._buffer = self._buffer.index_select(0, rows)
        return self.held


class ReservedLayer(DynamicLayer):
    """Its keys and values are the filled part of buffers. New ones are written behind them."""

    def __init__(self, layer: DynamicLayer, positions: int, dtype: torch.dtype | None) -> None:
        """layer: the filled layer that this one replaces"""
        CacheLayerMixin.__init__(self)
        vars(self).update(vars(layer))
        filled: Any = (layer.keys, layer.values)
        self._keys, self._values = (Reserved(tensor, positions, dtype) for tensor in filled)
        self.keys, self.values = self._keys.held, self._values.held
        self.dtype = self.keys.dtype

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self._keys.append(key_states), self._values.append(value_states)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.keys, self.values = self._keys.select(beam_idx), self._values.select(beam_idx)
