"""The key-value cache of a generation: in the dtype of the computation, with room for the tokens to come."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

BLOCK = 256  # positions reserved at a time


def reserve(cache: Cache, positions: int, dtype: torch.dtype | None) -> None:
    """Replace the layers of a model's filled cache by layers that append in place, where transformers has such a kind.

    transformers' dynamic layers copy all their keys and values at every token. Its static ones do not, but are of one
    size from the first token to the last, so that attention runs over positions that nobody has filled.
    Layers of other kinds than full and sliding attention, and caches of a model's own, stay as they are.

    positions: that will be appended at most; dtype: to keep keys and values in, None: as they are. Under autocast a
    rotary embedding makes float32 of bfloat16 keys; attention turns them back, so nothing is lost by keeping bfloat16.
    """
    if type(cache) is not DynamicCache:
        return
    kinds = {DynamicLayer: ReservedLayer, DynamicSlidingWindowLayer: ReservedSlidingLayer}
    for i, layer in enumerate(cache.layers):
        if type(layer) in kinds and layer.is_initialized:
            cache.layers[i] = kinds[type(layer)](layer, positions, dtype)


class _Reserved:
    """A tensor (R, H, T, D) that grows along T: part of a buffer with free positions behind it."""

    def __init__(self, tensor: Tensor, positions: int, dtype: torch.dtype | None) -> None:
        self._buffer, self._begin, self._end = tensor.to(dtype=dtype), 0, tensor.shape[2]
        self._positions = positions  # that may still be appended

    @property
    def held(self) -> Tensor:
        return self._buffer[:, :, self._begin : self._end]

    def append(self, new: Tensor) -> Tensor:
        """new: (R, H, N, D), of any dtype; returns the whole (R, H, T + N, D)"""
        end = self._end + new.shape[2]
        if end > self._buffer.shape[2]:
            held = self.held
            rows, heads, length, width = held.shape
            free = max(new.shape[2], min(BLOCK, self._positions))
            self._buffer = held.new_empty(rows, heads, length + free, width)
            self._begin, self._end, end = 0, length, length + new.shape[2]
            self.held.copy_(held)
        self._buffer[:, :, self._end : end] = new
        self._positions -= new.shape[2]
        self._end = end
        return self.held

    def forget(self, keep: int) -> Tensor:
        """All but the last `keep` positions."""
        self._begin = max(self._begin, self._end - keep)
        return self.held

    def select(self, rows: Tensor) -> Tensor:
        self._buffer = self._buffer.index_select(0, rows)
        return self.held


class ReservedLayer(DynamicLayer):
    """Keys and values are views of buffers that new ones are written into."""

    def __init__(self, layer: DynamicLayer, positions: int, dtype: torch.dtype | None) -> None:
        """layer: filled, and not to be used any more"""
        CacheLayerMixin.__init__(self)
        vars(self).update(vars(layer))
        self._keys, self._values = (_Reserved(tensor, positions, dtype) for tensor in (layer.keys, layer.values))
        self.keys, self.values = self._keys.held, self._values.held
        self.dtype = self.keys.dtype

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self._keys.append(key_states), self._values.append(value_states)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.keys, self.values = self._keys.select(beam_idx), self._values.select(beam_idx)


class ReservedSlidingLayer(ReservedLayer, DynamicSlidingWindowLayer):
    """The same with a window: attention sees the window, the cache keeps what the next token will see of it."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.cumulative_length += key_states.shape[2]
        seen = super().update(key_states, value_states)
        keep = self.sliding_window - 1
        self.keys, self.values = self._keys.forget(keep), self._values.forget(keep)
        return seen
