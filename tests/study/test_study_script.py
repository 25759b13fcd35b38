"""docs/study/build.py from runs to document: every figure from its files."""

from __future__ import annotations

import csv
import shutil
import sys
from pathlib import Path

import pytest
from run_builders import ROOT, python, small_bindings
from tracking_builders import tracked_runs

STUDY = ROOT / "docs" / "study"
sys.path.insert(0, str(STUDY))
from document import Document  # noqa: E402

pytestmark = pytest.mark.slow

STEPS = 8
RUNS = ("pays_runs.csv", "controls_runs.csv", "prefixes_rarer_runs.csv")
TEXTS = {
    "study.md.in": "{{mean study_weak paper final}}, {{column study_weak_quarters age variant=paper quarter=4}}\n",
    "appendix.md.in": "{{rows study_weak}}\n",
    "choosing.md.in": "{{verdict newest.gin}}\n",
}


@pytest.fixture
def project(warm_model: Path, tmp_path: Path) -> Path:
    """A copy of the code with one small part and a short text."""
    for name in ("exgrpo_orlhf", "gin", "scripts", "evals"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs" / "study" / "suites").mkdir(parents=True)
    files = [*RUNS, *(f"suites/{name}.gin" for name in ("pays", "pays_others"))]
    for path in (*STUDY.glob("*.py"), *(STUDY / name for name in files)):
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    for name, text in TEXTS.items():
        (tmp_path / "docs" / "study" / name).write_text(text, encoding="utf-8")
    more = ("Tracking.enabled = True", f"train.steps = {STEPS}", "train.eval_every = 2", "train.save_every = 50")
    lines = [
        "include 'base.gin'",
        *small_bindings(warm_model, *more),
        "Suite.variants = {'on_policy': ('baselines/on_policy.gin',), 'paper': ()}",
        "Suite.baseline = 'on_policy'",
        "Suite.seeds = (0, 1)",
    ]
    (tmp_path / "docs" / "study" / "suites" / "study_weak.gin").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path


def build(project: Path, *words: str):
    return python("docs/study/build.py", *words, cwd=project, env={"PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"})


def test_a_study_runs_and_writes_its_pages_from_its_own_files(project: Path, monkeypatch) -> None:
    """tests/study/test_ablate.py interrupts the runs and starts them again."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    done = build(project, "--only", "study_weak", "--jobs", "1")
    assert done.returncode == 0, done.stderr[-4000:]
    runs = tracked_runs(f"sqlite:///{project / 'mlflow.db'}")
    assert sorted(run.data.tags.get("variant", "") for run in runs) == [*["on_policy"] * 2, *["paper"] * 2]

    figures = project / "docs" / "study"
    names = {f"study_weak{end}" for end in (".csv", "_curves.csv", "_quarters.csv")}
    written = {path.name for path in figures.iterdir() if path.is_file() and path.suffix != ".py"}
    assert written == {*TEXTS, "appendix.md", *RUNS, "pays.png", "controls.png", *names}
    written = (project / "docs" / "study.md").read_text(encoding="utf-8")
    assert written == Document(figures).fill(TEXTS["study.md.in"])
    with (figures / "study_weak.csv").open(encoding="utf-8", newline="") as file:
        final = [float(row["value"]) for row in csv.DictReader(file)
                 if (row["kind"], row["measure"], row["variant"]) == ("run", "final", "paper")]  # fmt: skip
    assert written.startswith(f"{sum(final) / 2:.3f}")


def test_a_place_without_a_figure_leaves_the_old_document(project: Path) -> None:
    (project / "docs" / "study.md").write_text("old", encoding="utf-8")
    done = build(project, "--document")
    assert done.returncode == 2
    assert done.stderr.startswith("error: docs/study/study.md.in: ")
    assert (project / "docs" / "study.md").read_text() == "old"
