"""The replay core in a process that has numpy and torch alone (docs/replay_core.md)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent.parent
REQUIRED = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
# What the package requires, but for what its core does; torch itself requires jinja2.
ABSENT = {re.match(r"[\w-]+", text)[0].replace("-", "_") for text in REQUIRED} - {"numpy", "torch", "jinja2"}
ABSENT |= {"gin", "ray", "openrlhf", "vllm", "deepspeed"}
HOOK = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (absent in this test)", name=name)

sys.meta_path.insert(0, Absent())
"""
PAGE = "\n".join(
    re.findall(r"^```python\n(.*?)^```", (PROJECT / "docs/replay_core.md").read_text(encoding="utf-8"), re.S | re.M)
)
REPORT = """
import json, pickle
p = torch.stack([policy(one).log_prob(torch.tensor([*map(int, one.answer)])).sum().exp() for one in questions])
saved = pickle.loads(pickle.dumps(buffer))
print(json.dumps({
    "success": p.mean().item(),
    "replayed": len(plan.replayed),
    "fresh": len(plan.fresh),
    "stored": buffer.n_trajectories,
    "same": saved.canonical_order() == buffer.canonical_order(),
    "retired": len(buffer.retired),
    "log_weight_max": loss.replayed_metrics(rows, [one.detach().numpy() for one in logprobs], behaviour)[
        "replay/log_weight_max"],
}))
"""


def _run(code: str, absent: set[str]) -> subprocess.CompletedProcess[str]:
    code = HOOK.format(absent=absent) + code
    return subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=300)


def test_what_is_absent_is_what_the_package_requires():
    assert {"transformers", "mlflow", "gin", "pyarrow", "peft", "datasets"} <= ABSENT


def test_the_hook_hides_what_is_installed():
    assert "absent in this test" in _run("import mlflow", ABSENT).stderr


def test_the_core_is_imported_with_numpy_alone():
    """torch is imported at its first use."""
    result = _run("import exgrpo_orlhf.replay, exgrpo_orlhf.objective, exgrpo_orlhf.records", ABSENT | {"torch"})
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_the_page_trains_with_numpy_and_torch_alone():
    result = _run(PAGE + REPORT, ABSENT)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["success"] > 0.3  # it began at 0.01
    assert (report["replayed"], report["fresh"]) == (8, 8)
    assert report["stored"] > 0
    assert report["retired"] > 0
    assert report["same"]
    assert report["log_weight_max"] > 0  # the policy has moved since what is replayed was stored
