"""docs/study/build.py from runs to document: every figure from its files, a signal ends it."""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from run_builders import ROOT, small_bindings
from tracking_builders import tracked_runs

STUDY = ROOT / "docs" / "study"
sys.path.insert(0, str(STUDY))
from document import Document  # noqa: E402

pytestmark = pytest.mark.slow

STEPS = 8
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
    for path in (*STUDY.glob("*.py"), STUDY / "pays_runs.csv"):
        shutil.copy(path, tmp_path / "docs" / "study")
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


@pytest.fixture
def start(project: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts the script, in a process group of its own that does not outlive the test."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    processes = []

    def begin() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(project / "docs" / "study" / "build.py"), "--only", "study_weak", "--jobs", "1"],
            env={**environment, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"},
            cwd=project,
            process_group=0,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_study_runs_and_writes_its_pages_from_its_own_files(project: Path, start) -> None:
    """tests/study/test_ablate.py interrupts the runs and starts them again."""
    process = start()
    output = process.communicate(timeout=900)[0]
    assert process.returncode == 0, output[-4000:]
    runs = tracked_runs(f"sqlite:///{project / 'mlflow.db'}")
    assert sorted(run.data.tags.get("variant", "") for run in runs) == [*["on_policy"] * 2, *["paper"] * 2]

    figures = project / "docs" / "study"
    names = {f"study_weak{end}" for end in (".csv", "_curves.csv", "_quarters.csv")}
    written = {path.name for path in figures.iterdir() if path.is_file() and path.suffix != ".py"}
    assert written == {*TEXTS, "appendix.md", "pays_runs.csv", "pays.png", *names}
    written = (project / "docs" / "study.md").read_text(encoding="utf-8")
    assert written == Document(figures).fill(TEXTS["study.md.in"])
    assert (project / "docs" / "choosing.md").read_text(encoding="utf-8") == "not run yet\n"
    with (figures / "study_weak.csv").open(encoding="utf-8", newline="") as file:
        final = [float(row["value"]) for row in csv.DictReader(file)
                 if (row["kind"], row["measure"], row["variant"]) == ("run", "final", "paper")]  # fmt: skip
    assert written.startswith(f"{sum(final) / 2:.3f}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_a_script_ends_well_in_spite_of_starts_no_other(project: Path, start, number) -> None:
    waits = "import signal, time; signal.signal({0}, lambda *_: exit(0)); print('ready', flush=True); time.sleep(3600)"
    (project / "scripts" / "ablate.py").write_text(waits.format(int(number)), encoding="utf-8")
    process = start()
    assert any(line == "ready\n" for line in process.stdout)
    os.kill(process.pid, number) if number == signal.SIGTERM else os.killpg(process.pid, number)
    output = process.communicate(timeout=600)[0]  # it would sleep for an hour
    assert process.returncode == 128 + number
    assert "compare.py" not in output


def test_a_place_without_a_figure_leaves_the_old_document(project: Path) -> None:
    (project / "docs" / "study.md").write_text("old", encoding="utf-8")
    command = [sys.executable, "docs/study/build.py", "--document"]
    process = subprocess.run(command, cwd=project, env={**os.environ, "PYTHONPATH": str(project)}, capture_output=True)
    assert process.returncode == 2
    assert process.stderr.decode().startswith("error: docs/study/study.md.in: ")
    assert (project / "docs" / "study.md").read_text() == "old"
