"""Weights from the policy actors to vLLM, many parameters at a time. Written against OpenRLHF 0.11.2 and vLLM 0.29.0.

OpenRLHF makes a remote call for each parameter, 272 for SmolLM2-135M, and on a shared GPU a barrier after each. Here it
gets buckets instead, each one flat tensor, and sends them in its own ways: by CUDA IPC on a shared GPU, else by a
broadcast from rank 0 (NCCL; gloo on the CPU test layout).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..lora import Adapter, gathered
from . import packed_attention, patches

if packed_attention.is_needed():  # in a process of vLLM, which is spawned
    packed_attention.install()

from openrlhf.trainer.ray import vllm_engine
from openrlhf.trainer.ray.utils import get_physical_gpu_id
from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap

BUCKET = 512 * 2**20  # bytes; a larger parameter has a bucket of its own, because vLLM loads whole ones


@contextmanager
def in_buckets(model: torch.nn.Module, adapter: Adapter | None) -> Iterator[None]:
    """Within this context OpenRLHF's `broadcast_to_vllm` takes a bucket for a parameter, and the buckets for all that
    there are. With LoRA they hold merged weights under the base model's names: vLLM knows no others (issue 991)."""
    buckets: list[list[tuple[str, Any]]] = []
    room = 0  # bytes, in the last bucket
    for name, weight in adapter.base_parameters() if adapter else model.named_parameters():
        size = _shape(weight).numel() * weight.element_size()
        if not buckets or size > room or weight.dtype != buckets[-1][0][1].dtype:
            buckets.append([])
            room = BUCKET
        buckets[-1].append((name, weight))
        room -= size
    named = [([name for name, _ in bucket], _Bucket([weight for _, weight in bucket])) for bucket in buckets]
    with patches.sent_parameters(model, named, lambda bucket: bucket.filled(adapter)):
        yield


class _Bucket:
    """Has the attributes of a parameter that OpenRLHF uses."""

    requires_grad = True

    def __init__(self, weights: list[Any]) -> None:
        self.weights, self.dtype = weights, weights[0].dtype
        self.shape = self.ds_shape = [_shape(weight) for weight in weights]

    @contextmanager
    def filled(self, adapter: Adapter | None) -> Iterator[None]:
        """Within this context `data` is one flat tensor of all weights. All ranks must enter it."""
        whole = [adapter.merged_weight(weight) for weight in self.weights] if adapter else [gathered(self.weights)]
        with ExitStack() as stack:
            for context in whole:
                stack.enter_context(context)
            self.data = torch.cat([weight.data.flatten() for weight in self.weights])
        yield
        del self.data


def _shape(weight: Any) -> torch.Size:
    """Of the whole parameter: under ZeRO-3 a rank holds a flat part of it."""
    return torch.Size(getattr(weight, "ds_shape", weight.shape))


class WeightReceiver(WorkerWrap):  # type: ignore[misc]
    """OpenRLHF's extension of vLLM's worker, whose two methods take a bucket instead of a parameter. vLLM imports it by
    its name. Shapes come as lists: its processes exchange no torch.Size."""

    def update_weight(self, name: list[str], dtype: torch.dtype, shape: list[list[int]], _: bool = False) -> None:
        """Receives a bucket from the actor's rank 0. Raises ValueError if its dtype is not this model's."""
        flat = torch.empty(sum(map(math.prod, shape)), dtype=dtype, device=self.device)
        if self._model_update_with_ray:
            import ray.util.collective as collective

            collective.broadcast(flat, 0, group_name=self._model_update_group)
        else:
            self._model_update_group.broadcast(flat, src=0, stream=torch.cuda.current_stream())
        self._load_bucket(name, shape, flat)

    def update_weight_cuda_ipc(
        self, name: list[str], dtype: torch.dtype, shape: list[list[int]], ipc_handles: dict[str, Any], _: bool = False
    ) -> None:
        """Reads the bucket of the actor on this GPU. Raises as `update_weight` does."""
        rebuild, arguments = ipc_handles[get_physical_gpu_id()]
        # The GPU may have another number in the actor's process.
        self._load_bucket(name, shape, rebuild(*arguments[:6], self.device.index, *arguments[7:]))
        torch.cuda.synchronize()

    def _load_bucket(self, names: Sequence[str], shapes: Sequence[Sequence[int]], flat: Tensor) -> None:
        if flat.dtype != self.model_config.dtype:  # only now: the actor waits until all of it is received
            raise ValueError(f"{names[0]} … come as {flat.dtype}, this vLLM model holds {self.model_config.dtype}")
        parts = flat.split([*map(math.prod, shapes)])
        weights = [(name, part.view(shape)) for name, part, shape in zip(names, parts, shapes, strict=True)]
        self.model_runner.model.load_weights(weights)

    def model_weights(self) -> dict[str, Any]:
        """Each parameter as a float32 array, because numpy has no bfloat16. For the doctor."""
        named = self.model_runner.model.named_parameters()
        return {name: weight.detach().float().cpu().numpy() for name, weight in named}


class VllmEngine(vllm_engine.RolloutRayActor.__ray_metadata__.modified_class):  # type: ignore[misc]
    """OpenRLHF's vLLM actor with our extension of its worker."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        kwargs["worker_extension_cls"] = f"{WeightReceiver.__module__}.{WeightReceiver.__name__}"
        await super().__init__(*args, **kwargs)
