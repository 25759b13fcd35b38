"""A mistake is refused before torch, transformers and MLflow are imported, which takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from run_builders import ROOT, set_words

HEAVY = ("torch", "transformers", "mlflow", "datasets", "sympy", "matplotlib", "scipy", "ray", "vllm")
PROGRAM = f"""
import runpy, sys
sys.argv = ["train.py", *sys.argv[1:]]
status = runpy.run_path({str(ROOT / "scripts" / "train.py")!r})["main"]()
print(status, *(name for name in {HEAVY!r} if name in sys.modules))
"""
MISTAKES = {
    "a name": (["ReplayMixer.roh = 0.5"], "there is no setting ReplayMixer.roh; nearest: ReplayMixer.rho"),
    "two settings": (["Evaluation.samples = 4"], "Evaluation.samples = 4 at Evaluation.temperature = 0"),
    "a file": (["Work.questions = @QuestionFile()", "QuestionFile.path = '/no.jsonl'"], "/no.jsonl: no such file"),
    "a metric": (
        ["train.best_metric = 'eval/gredy_accuracy'"],
        "'eval/gredy_accuracy' is not measured by this evaluation; nearest: eval/greedy_accuracy; measured are ",
    ),
    "a metric without validation": (
        ["train.best_metric = 'eval/gredy_accuracy'", "Work.validation = None"],
        "train.best_metric = 'eval/gredy_accuracy' is never measured: bind Work.validation and train.eval_every (20)",
    ),
    "a metric without evaluations": (
        ["train.best_metric = 'eval/greedy_accuracy'", "train.eval_every = None"],
        "'eval/greedy_accuracy' is never measured: bind Work.validation and train.eval_every (None)",
    ),
    "an address": (["Tracking.uri = 'htp://host'"], "Tracking.uri = 'htp://host': MLflow has no store for htp://"),
}


def refused(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True)
    assert done.stdout == "2\n", done.stderr
    [line] = done.stderr.strip().split("\n")
    return line


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_before_anything_heavy_is_imported(mistake, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    bindings, message = MISTAKES[mistake]
    line = refused("--gin", "toy.gin", *set_words(bindings), "--out", str(tmp_path / "run"))
    assert line.startswith("error: ")
    assert message in line
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_libraries_say_when_they_are_imported_is_not_on_the_terminal():
    """pynvml's deprecation and DeepSpeed's choice of a CPU, where they are installed."""
    program = """
from importlib.util import find_spec
from exgrpo_orlhf.io import terminal
terminal.messages()
for name in ("torch", "transformers", "deepspeed"):
    if find_spec(name):
        __import__(name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_script_of_another_checkout_than_the_package_says_so(tmp_path):
    script = tmp_path / "scripts" / "mine.py"
    for folder in (script.parent, tmp_path / "exgrpo_orlhf"):
        folder.mkdir()
    script.write_text("from exgrpo_orlhf.io import terminal\nterminal.messages()\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert f"{script} imports {ROOT / 'exgrpo_orlhf'}, not the package of its own checkout" in done.stderr


def test_more_threads_than_cores_are_said_at_the_start(tmp_path):
    (tmp_path / "metrics.jsonl").touch()  # so that it ends there
    arguments = ["--gin", "toy.gin", "--set", "LocalEngine.threads = 5000", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True)
    warning, refusal = done.stderr.strip().split("\n")
    assert warning.startswith("LocalEngine.threads = 5000, but this process has ")
    assert "holds a run already" in refusal


@pytest.mark.slow
@pytest.mark.parametrize("smoke", [[], ["--smoke"]], ids=["run", "smoke"])
def test_a_folder_that_holds_a_run_or_cannot_be_made_is_refused_as_early(smoke, tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.touch()
    no_folder = f"the run's folder cannot be made or written ({file} is not a folder)"
    refusals = {tmp_path: "holds a run already", file: f"--out {file}: {no_folder}"}
    for out, refusal in {**refusals, file / "run": f"--out {file / 'run'}: {no_folder}"}.items():
        assert refusal in refused("--gin", "toy.gin", "--out", str(out), *smoke)
