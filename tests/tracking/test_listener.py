"""Entry points: what another distribution registers can be bound in gin, and is told of a run's checkpoints and end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from run_builders import ROOT, bindings, train_in

PART = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Theirs:
    value: int = 1

class Notes:
    def __init__(self, run):
        self.file = run.folder / "notes.txt"

    def saved(self, buffer, step):
        self.note(f"saved {step}: {buffer.n_trajectories} stored")

    def ended(self, buffer, step):
        self.note(f"ended {step}")

    def note(self, text):
        with self.file.open("a") as file:
            print(text, file=file)
"""


@pytest.fixture
def distribution(tmp_path: Path) -> Path:
    folder = tmp_path / "installed"
    (folder / "theirs-1.0.dist-info").mkdir(parents=True)
    (folder / "theirs.py").write_text(PART)
    (folder / "theirs-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    points = "[exgrpo_orlhf.gin]\nTheirs = theirs:Theirs\n[exgrpo_orlhf.listeners]\nnotes = theirs:Notes\n"
    (folder / "theirs-1.0.dist-info" / "entry_points.txt").write_text(points)
    return folder


@pytest.mark.slow
def test_a_listener_of_another_distribution_is_told_of_each_checkpoint_and_of_the_end(
    distribution, warm_model, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(distribution)
    train_in(tmp_path / "run", [*bindings(warm_model, []), "train.steps = 4", "train.save_every = 2"])
    notes = (tmp_path / "run" / "notes.txt").read_text().split("\n")
    assert [note.partition(":")[0] for note in notes] == ["saved 2", "saved 4", "ended 4", ""]


@pytest.mark.parametrize(
    ("path", "binding", "said"),
    [
        ("", "Theirs.value = 2", "there is no setting Theirs.value"),
        ("installed", "Theirs.value = 'two'", "Theirs.value takes int, got 'two'"),
        ("installed", "Theirs.value = 2", "ended well"),
    ],
)
def test_a_class_of_another_distribution_can_be_bound(path, binding, said, distribution):
    program = f"from exgrpo_orlhf import config; config.load(['quickstart.gin'], [{binding!r}]); print('ended well')"
    found = [str(ROOT), *([str(distribution.parent / path)] if path else [])]
    command = f"import sys; sys.path[:0] = {found!r}; {program}"
    process = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False)
    assert said in process.stdout + process.stderr
