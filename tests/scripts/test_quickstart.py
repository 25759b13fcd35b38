"""scripts/quickstart.py: what it says of two runs when they are done."""

from __future__ import annotations

import importlib

import pytest
from run_builders import ROOT
from study_builders import script

from exgrpo_orlhf.testbed.tiny_models import ChainModel
from exgrpo_orlhf.tracking.metrics_log import MetricsLog


def trained(folders, files, seed) -> list[str]:
    """Runs of two steps."""
    for name, folder in folders.items():
        folder.mkdir()
        log = MetricsLog(folder / "metrics.jsonl")
        log.append(0, {"eval/greedy_accuracy": 0.2, "cost/generated_tokens": 0})
        for step in (1, 2):
            log.append(step, {"cost/generated_tokens": 1000 * step, "time/step": 1.0, "reward/mean": 0.5})
        log.append(3, {"eval/greedy_accuracy": {"ExGRPO": 0.8}.get(name, 0.6), "cost/generated_tokens": 3000})
    return []


@pytest.mark.usefixtures("no_tracking_server")
def test_both_runs_are_compared_as_those_of_a_study(tmp_path, monkeypatch, capsys, sqlite):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.setattr(importlib.import_module("quickstart"), "_train", trained)
    monkeypatch.setattr(ChainModel, "prepare", lambda _: None)
    assert script("quickstart", "--out", tmp_path, MLFLOW_TRACKING_URI=sqlite) == 0
    text = capsys.readouterr().out
    assert "ExGRPO: 0.200 before, 0.800 after, 4.0 times" in text
    assert any(line.split()[:4] == ["final", "ExGRPO", "1", "+0.200"] for line in text.split("\n"))
    assert (tmp_path / "quickstart-seed0.png").read_bytes().startswith(b"\x89PNG")
