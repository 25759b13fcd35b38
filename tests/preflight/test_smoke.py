"""A trial of a run finds what is wrong before it starts, estimates its cost, and leaves nothing behind."""

from __future__ import annotations

import re

import pytest
from run_builders import set_words, small_bindings

from exgrpo_orlhf import config
from exgrpo_orlhf.preflight.smoke import estimate, seconds_of

ON = "Tracking.enabled = True"


def smoke(run_script, model, out, *more):
    words = set_words(small_bindings(model, *more))
    return run_script("train.py", "--gin", "toy.gin", *words, "--smoke", "--out", out / "run")


@pytest.mark.slow
def test_a_trial_makes_a_whole_step_and_leaves_nothing_behind(warm_model, tmp_path, run_script, monkeypatch):
    database = tmp_path / "mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    done = smoke(run_script, warm_model, tmp_path, "train.steps = 40", "train.eval_every = 10", ON)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(None, 1) for line in done.stdout.splitlines())
    assert list(lines) == ["questions", "MLflow", "step", "time", "memory", "disk"]
    assert lines["MLflow"] == f"sqlite:///{database}: reachable"
    assert re.match(r"8 of 8 questions in \d+\.\d s", lines["step"])
    assert re.search(r"40 steps of .* 5 evaluations of", lines["time"])
    assert {path.name for path in tmp_path.iterdir()} <= {"mlflow.db", "mlflow.db.lock"}


def test_a_trial_that_fails_keeps_its_files_and_says_where(warm_model, tmp_path, run_script, monkeypatch, caplog):
    def fail(experiment, run, **_):
        run.mkdir()
        (run / "batch.json").touch()
        raise ArithmeticError("the update is not finite: see batch.json")

    monkeypatch.setattr("exgrpo_orlhf.preflight.smoke.train", fail)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "htp://host:5000")  # of no use without tracking, and not refused
    assert smoke(run_script, warm_model, tmp_path, "Tracking.enabled = False").returncode == 1
    [folder] = tmp_path.iterdir()
    assert (folder / "run" / "batch.json").exists()
    assert f"its files stay in {folder}" in caplog.text


def test_a_server_that_does_not_answer_is_said_and_the_trial_goes_on(warm_model, tmp_path, run_script, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    done = smoke(run_script, warm_model, tmp_path, ON)
    assert done.returncode == 0
    assert "http://127.0.0.1:9: NOT reachable" in done.stdout


def test_the_most_that_the_buffer_takes_does_not_go_by_the_successes_of_the_trial():
    timed = {"questions": 32, "time/step": 1.0, "time/rollout": 1.0, "time/update": 1.0, "reward/mean": 0.0}
    timed |= {"rollout/response_tokens": 117.0, "rollout/truncated_share": 0.0, "reward/groups_with_signal": 0.0}
    report = {"steps": [{**timed, "reward/pass_at_1": 0.0}], "save": 1.0, "checkpoint": 2_000_000, "cuda": None}
    *_, memory, disk = estimate(
        config.load(["toy.gin"], ["train.steps = 10"]), {**report, "parameters": 1, "resident": 1}, 0, 10**12
    )
    assert memory.endswith("the buffer adds at most 2.6 MB"), "10 · 32 · 8 rollouts of 64 + 8 · 117 bytes"
    assert "4.6 MB a checkpoint" in disk


@pytest.mark.parametrize(
    ("questions", "measured", "seconds"),
    [
        (32, [(2, 9.0), (2, 1.0), (8, 4.0)], 16.0),  # on the line through (2, 1) and (8, 4)
        (8, [(2, 9.0), (2, 1.0), (8, 4.0)], 4.0),
        (32, [(2, 9.0), (2, 1.0), (8, 0.5)], 0.5),  # never less for more questions
        (32, [(4, 9.0), (4, 2.0)], 16.0),  # in proportion: an upper bound
    ],
)
def test_the_seconds_of_a_step_are_on_the_line_through_the_measured_ones(questions, measured, seconds):
    assert seconds_of(questions, measured) == seconds
