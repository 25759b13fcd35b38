"""What a machine with GPUs must have for a layout. Checked before Ray starts.

Each function returns what is wrong and what to do, or None. None of this was tried on a GPU: it follows from the
sources of torch 2.13, DeepSpeed 0.19.6, vLLM 0.29 and OpenRLHF 0.11.2.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_GB = 1e9
# Bytes of a GPU beside weights and vLLM's share: 3 GB of CUDA and NCCL in up to three processes, 2 GB of fragments.
_RESERVE = 5 * _GB


def wrong_python(version: tuple[int, ...]) -> str | None:
    """version: major, minor"""
    if version[:2] < (3, 13):
        return None
    return (
        "train.engine = 'openrlhf' needs Python 3.11 or 3.12: OpenRLHF 0.11.2 has no build for newer ones, and this is "
        f"Python {version[0]}.{version[1]}"
    )


def wrong_nvcc(args: Any) -> str | None:
    """DeepSpeed's own check of the CUDA compiler, which it would make minutes into a run, when it compiles Adam for the
    CPU.

    With CUDA 13 it requires the same minor version. The fused Adam of the GPU goes through torch's check instead, which
    requires the same major version only. Nothing is checked where torch sees no GPU, because the driver may be on a
    head node without one.

    Args:
        args: OpenRLHF's
    """
    import torch

    if not args.ds.adam_offload or not torch.cuda.is_available():
        return None
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.builder import (
        CUDAMismatchException,
        MissingCUDAException,
        assert_no_cuda_mismatch,
    )

    if installed_ops.get("cpu_adam"):
        return None  # built when DeepSpeed was installed
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            assert_no_cuda_mismatch("cpu_adam")
    except MissingCUDAException:
        return (
            "ds.adam_offload: DeepSpeed compiles its Adam for the CPU and finds no nvcc; install the CUDA toolkit "
            f"{torch.version.cuda} and set CUDA_HOME"
        )
    except CUDAMismatchException as error:
        return (
            f"ds.adam_offload: nvcc is of another version than torch's CUDA {torch.version.cuda}, and DeepSpeed will "
            f"not compile its Adam for the CPU: install that toolkit and set CUDA_HOME, or set DS_SKIP_CUDA_CHECK=1 at "
            f"your own risk ({str(error).removeprefix('>- ')})"
        )
    return None


def wrong_allocator(args: Any, environ: Mapping[str, str]) -> str | None:
    """Refuses torch's expandable segments where weights go from process to process on one GPU.

    Args:
        args: OpenRLHF's
        environ: the driver's variables
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    given = [name for name in names if "expandable_segments:true" in environ.get(name, "").replace(" ", "").lower()]
    if not given or not args.train.colocate_all or args.vllm.sync_backend != "nccl":
        return None
    return (
        f"{given[0]} sets expandable_segments:True, and with train.colocate_all the weights go to vLLM by CUDA IPC: "
        "torch shares such memory by pidfd_getfd, which containers often forbid (pytorch issue 165685); leave "
        "expandable_segments out"
    )


def too_little_memory(args: Any, parameters: int, total: float, *, adapter: bool = False) -> str | None:
    """Estimates what is on a GPU while vLLM generates, where vLLM shares the GPU with the trainer.

    Args:
        args: OpenRLHF's
        parameters: of the model
        total: bytes of a GPU
        adapter: whether only a LoRA adapter is trained
    """
    if not args.train.colocate_all:
        return None
    ranks = args.actor.num_nodes * args.actor.num_gpus_per_node
    weights = 2 * parameters / (ranks if args.ds.zero_stage == 3 else 1)  # bf16; stage 2 keeps all of them on each GPU
    stay = {"the policy": weights}
    if args.algo.kl.init_coef > 0:
        # ref.offload: of parameters that are partitioned; with stage 2 the reference model has no ZeRO stage
        stay["the reference model"] = 0.0 if args.ref.offload and args.ds.zero_stage == 3 else weights
    if args.train.enable_ema:
        stay["the average (train.enable_ema)"] = 2 * parameters
    if not args.ds.enable_sleep and not args.ds.adam_offload and not adapter:
        stay["the optimiser, awake"] = 12 * parameters / ranks
    held = sum(stay.values())
    share, fits = args.vllm.gpu_memory_utilization, (total - held - _RESERVE) / total
    if share <= fits:
        return None
    return (
        f"vllm.gpu_memory_utilization = {share} of {total / _GB:.1f} GB, {held / _GB:.1f} GB of {', '.join(stay)} and "
        f"about {_RESERVE / _GB:.0f} GB of CUDA, NCCL and fragments are more than the GPU has: "
        + (f"at most {int(100 * fits) / 100} fits" if fits > 0 else "no share fits")
    )


def parameters_of(config: PretrainedConfig) -> int | None:
    """Number of parameters of the causal language model with this configuration; tied weights count once.

    None where transformers has no causal language model for it, such as for a model with images.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(config)
        except ValueError:
            return None
    count: int = sum(weight.numel() for weight in model.parameters())
    return count


def gpu_bytes() -> float | None:
    """Memory of the smallest GPU here, or None. By nvidia-smi: torch would create a CUDA context and keep it."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return min(float(line) for line in found.stdout.split("\n") if line) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
