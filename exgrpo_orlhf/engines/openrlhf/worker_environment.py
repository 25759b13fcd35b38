"""Which environment variables the driver passes on to Ray's workers. `environ` is the driver's own.

A worker has the variables with which its node joined Ray (`ray start`), overridden by those that ray.init names. Where
a run starts Ray itself, the node has the driver's variables. So this file matters on a cluster.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # a submitted job's runtime environment, for its driver

# Passed on when set. Patterns are shell patterns.
_FORWARDED = (
    *("CUDA_*", "CUBLAS_*", "CUDNN_*", "PYTORCH_*", "TORCH_*", "TORCHINDUCTOR_*", "TRITON_*"),
    *("NCCL_*", "GLOO_*", "UCX_*", "FI_*"),  # FI: libfabric, which NCCL uses on AWS
    *("DEEPSPEED_*", "DS_*", "VLLM_*", "FLASHINFER_*", "FLASH_ATTENTION_*", "OPENRLHF_*"),
    *("OMP_*", "KMP_*", "MKL_*", "MAX_JOBS"),  # MAX_JOBS: compilers that build DeepSpeed's kernels at once
    *("HF_*", "TRANSFORMERS_*", "TOKENIZERS_*", "EXGRPO_*"),
    *("MLFLOW_*", "WANDB_*", "COMET_*", "SWANLAB_*", "TRACKIO_*"),
)

# Not passed on, even if they match the list above: what is right on one machine may be wrong on another, and a
# submitted job's driver has the variables of the head node. Each must be set before `ray start` on every node.
_OF_A_NODE = (
    "CUDA_VISIBLE_DEVICES",  # Ray sets it for every actor
    # Network devices and names of this machine; *_IFNAME of NCCL and Gloo
    *("*_IFNAME", "NCCL_IB_HCA", "UCX_NET_DEVICES", "NCCL_HOSTID", "VLLM_HOST_*"),
    # Paths of this machine
    *("CUDA_HOME", "CUDA_PATH", "CUDA_MPS_*", "CC", "CXX", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH"),
    # What Ray reads when a node starts: RAY_memory_usage_threshold …
    *("RAY_[a-z]*", "RAY_EXPERIMENTAL_*", "RAY_TMPDIR"),
)

_DEFAULTS = {
    "NCCL_DEBUG": "WARN",
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
    "TOKENIZERS_PARALLELISM": "true",
    "TQDM_DISABLE": "1",  # no bar for every pass of every actor; the training loop prints a line per step
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def ray_address(bound: str | None, environ: Mapping[str, str]) -> str:
    """The address of the Ray to use, or 'local' for a new Ray, so that a run does not join another one on this machine
    by chance. A submitted job gets its cluster from RAY_ADDRESS. bound: OpenRLHF.ray_address"""
    if bound in (None, "auto"):  # Ray itself reads the variable for 'auto'
        return environ.get("RAY_ADDRESS") or bound or "local"
    return bound


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for runtime_env["env_vars"] of ray.init: OpenRLHF's defaults and ours, overridden by those that are
    set and do not belong to one node."""
    passed_on = {
        name: value
        for name, value in environ.items()
        if name in _DEFAULTS or (_matches(name, _FORWARDED) and not _matches(name, _OF_A_NODE))
    }
    if JOB_CONFIG in environ and environ.get("OMP_NUM_THREADS") == "1":
        # Ray itself sets this in the actor that starts a job's driver, as in every actor with fewer than 2 CPUs.
        del passed_on["OMP_NUM_THREADS"]
    return {**_DEFAULTS, **passed_on}


def wrong_arch_list(environ: Mapping[str, str]) -> str | None:
    """What is wrong with TORCH_CUDA_ARCH_LIST, or None. DeepSpeed 0.19.6 builds its Adam by it, minutes after a start,
    and reads numbers alone, while torch takes letters too. environ: the variables of the process that builds"""
    entries = environ.get("TORCH_CUDA_ARCH_LIST", "").replace(" ", ";").split(";")
    unread = [entry for entry in entries if entry and not re.fullmatch(r"\d+\.\d+(\+PTX)?", entry)]
    if not unread:
        return None
    return (
        f"TORCH_CUDA_ARCH_LIST has {', '.join(unread)}, which DeepSpeed cannot read: unset it, or set it to the GPU's "
        "compute capability, such as 9.0"
    )


def not_forwarded(environ: Mapping[str, str]) -> list[str]:
    """The variables that are set, matter to Ray, NCCL, DeepSpeed, vLLM or torch, and are not passed on, sorted.

    Where the run starts Ray itself, its workers have them anyway. In the driver of a submitted job, Ray's own settings
    are left out, because Ray or the head node has set them, and so are those of the job's runtime environment.
    """
    in_job = JOB_CONFIG in environ
    return [
        name
        for name in sorted(environ.keys() - _job_env(environ))
        if _matches(name, _OF_A_NODE) and not (in_job and name.startswith("RAY_"))
    ]


def without_job_env(variables: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """`variables` without those of a submitted job's own runtime environment, which Ray refuses, even if equal."""
    return {name: value for name, value in variables.items() if name not in _job_env(environ)}


def for_cpu_adam(environ: Mapping[str, str], nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """OMP_NUM_THREADS for actors whose optimiser works on the CPU. Without it, Ray gives one thread to an actor with
    fewer than two CPUs, which all of OpenRLHF's are.

    Returns the CPUs of a node divided by its GPUs, as Ray counts both, the smallest of all nodes (`ray.nodes()`); {}
    where the driver passes on its own number, and where there is at most one CPU per GPU.
    """
    if "OMP_NUM_THREADS" in forwarded(environ) or "OMP_NUM_THREADS" in _job_env(environ):
        return {}
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    shares = [int(have.get("CPU", 0) // have["GPU"]) for have in alive if have.get("GPU", 0) >= 1]
    return {"OMP_NUM_THREADS": str(min(shares))} if shares and min(shares) > 1 else {}


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _job_env(environ: Mapping[str, str]) -> set[str]:
    return set((json.loads(environ.get(JOB_CONFIG, "{}")).get("runtime_env") or {}).get("env_vars") or {})
