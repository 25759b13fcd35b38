"""A frozen copy of a policy's trained weights, and an optimiser that begins anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..io.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class FrozenCopy:
    """The trained weights of a model as they once were, where the model is: with LoRA those of its adapter alone.

    It changes places with the model's weights, value by value and in their memory, so that views of them stay what they
    are (DeepSpeed's flat buffers, ZeRO-3's shards) and no second module is needed.
    """

    def __init__(self, model: Any) -> None:
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._kept = [weight.clone() for weight in self._weights()]

    def _weights(self) -> list[Tensor]:
        """Of a parameter that ZeRO-3 has cut: this rank's shard."""
        return [weight.ds_tensor.data if hasattr(weight, "ds_tensor") else weight.data for weight in self._trained]

    def exchange(self) -> None:
        """Called twice, nothing has changed. All ranks must ask."""
        for weight, kept in zip(self._weights(), self._kept, strict=True):
            weight_now = weight.clone()
            weight.copy_(kept)
            kept.copy_(weight_now)
        for whole in self._trained:
            if hasattr(whole, "ds_tensor") and whole.data.numel():  # a small one, which ZeRO-3 leaves whole beside
                shards = [torch.empty_like(whole.ds_tensor) for _ in range(torch.distributed.get_world_size())]
                torch.distributed.all_gather(shards, whole.ds_tensor.data)
                whole.data.copy_(torch.cat(shards)[: whole.data.numel()].view_as(whole.data))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this context the model computes with the copy."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    def take(self) -> None:
        """From now on it is a copy of the present weights."""
        for weight, kept in zip(self._weights(), self._kept, strict=True):
            kept.copy_(weight)

    def save(self, path: Path) -> None:
        torch.save(self._kept, path)

    def load(self, path: Path) -> None:
        """Raises ValueError for a copy of other weights."""
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if [tensor.shape for tensor in saved] != [tensor.shape for tensor in self._kept]:
            raise ValueError(f"{path} is a copy of other weights than this run trains")
        for kept, tensor in zip(self._kept, saved, strict=True):
            kept.copy_(tensor)


def begin_anew(optimizer: Any) -> None:
    """Adam's moments and its count of steps are 0 again; the weights and the learning rate stay."""
    for state in [*optimizer.param_groups, *optimizer.state.values()]:
        for name in {"step", "exp_avg", "exp_avg_sq"} & {*state}:
            state[name] = state[name].zero_() if isinstance(state[name], torch.Tensor) else 0
