"""What a machine with GPUs must have for a layout. Checked before Ray starts.

Each function returns what is wrong and what to do, or None. None of this was tried on a GPU: it follows from the
sources of torch 2.13, DeepSpeed 0.19.6, vLLM 0.29 and OpenRLHF 0.11.2.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any


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
    from deepspeed.ops.op_builder.builder import CUDAMismatchException, MissingCUDAException, assert_no_cuda_mismatch

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
    variables = [name for name in names if "expandable_segments:true" in environ.get(name, "").replace(" ", "").lower()]
    if not variables or not args.train.colocate_all or args.vllm.sync_backend != "nccl":
        return None
    return (
        f"{variables[0]} sets expandable_segments:True, and with train.colocate_all the weights go to vLLM by CUDA "
        "IPC: torch shares such memory by pidfd_getfd, which containers often forbid (pytorch issue 165685); leave "
        "expandable_segments out"
    )
