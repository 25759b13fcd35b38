"""What vLLM's worker needs on a machine without CUDA: plain linear layers, and weights that arrive over gloo.

vLLM imports this module by the name of the worker extension class before it builds the model. The import replaces the
linear layers.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.utils import stateless_init_torch_distributed_process_group

from ...sampling import vllm_cpu  # noqa: F401  (its import keeps linear layers plain)


class GlooGroup:
    """A group of the actor's rank 0 and all vLLM workers, with the one method of PyNccl's communicator that OpenRLHF
    calls."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, device: object) -> None:
        self._group: Any = stateless_init_torch_distributed_process_group(host, port, rank, world_size, backend="gloo")

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        self._group.broadcast(tensor, src).wait()


class CpuWorkerWrap:
    """Methods that vLLM adds to its worker: OpenRLHF's two for the weight sync, and one that reads the weights."""

    device: Any  # these three are the worker's
    model_config: Any
    model_runner: Any

    def init_process_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        use_ray: bool,
    ) -> None:
        if backend != "gloo" or use_ray:
            raise ValueError(f"without CUDA weights go over gloo, not through Ray: got {backend!r}, use_ray={use_ray}")
        rank = rank_offset + torch.distributed.get_rank()
        self._weights_from_actor = GlooGroup(master_address, master_port, rank, world_size, self.device)

    def update_weight(self, name: str, dtype: torch.dtype, shape: torch.Size, empty_cache: bool) -> None:
        """Receives one parameter from the actor's rank 0. Raises ValueError if its dtype is not this model's."""
        if dtype != self.model_config.dtype:
            raise ValueError(f"{name} comes as {dtype}, this vLLM model holds {self.model_config.dtype}")
        weight = torch.empty(shape, dtype=dtype)
        self._weights_from_actor.broadcast(weight, src=0)
        self.model_runner.model.load_weights([(name, weight)])

    def model_weights(self) -> dict[str, Any]:
        """Each parameter as a float32 array, for the doctor, which compares them with the actor's."""
        return {name: weight.detach().float().numpy() for name, weight in self.model_runner.model.named_parameters()}
