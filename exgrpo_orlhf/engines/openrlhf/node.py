"""What a machine with GPUs must have for a layout. Checked before Ray starts.

Each function returns what is wrong and what to do, or None. None of this was tried on a GPU: it follows from the
sources of torch 2.13, DeepSpeed 0.19.6, vLLM 0.29 and OpenRLHF 0.11.2.
"""

from __future__ import annotations

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
