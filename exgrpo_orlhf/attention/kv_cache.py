"""The key-value cache of a generation, in the dtype of the computation and with room for the tokens to come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

BLOCK = 256  # positions reserved at a time


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
