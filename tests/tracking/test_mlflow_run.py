"""What a user of MLflow finds in a run: user, source, commit, description, datasets, readable params, metrics that say
something."""

from __future__ import annotations

import getpass
import json
import logging
import shutil
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from run_builders import ROOT, python, rows, small_bindings, train_command, train_small, wait_until
from tracking_builders import tracked_runs, tracker

from exgrpo_orlhf import config
from exgrpo_orlhf.config import gin_files
from exgrpo_orlhf.questions.reading import fingerprint
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.settings import Tracking
from exgrpo_orlhf.study.curve import logged_curve
from exgrpo_orlhf.study.store import Store
from exgrpo_orlhf.tracking.client import mark_killed, page
from exgrpo_orlhf.tracking.metrics_log import MetricsLog
from exgrpo_orlhf.training.run import train


def the_run(sqlite: str):
    (run,) = tracked_runs(sqlite)
    return run


def trained(model, sqlite, out, *more, file="toy.gin") -> str:
    _, *words = train_command(out / "run", small_bindings(model, "Tracking.enabled = True", *more), file)
    done = python(*words, env={"MLFLOW_TRACKING_URI": sqlite})
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_a_run_has_its_user_source_commit_description_and_datasets(warm_model, sqlite, tmp_path):
    output = trained(warm_model, sqlite, tmp_path, "train.steps = 2", file="ablations/newest.gin")
    run = the_run(sqlite)
    tags = run.data.tags
    assert tags["mlflow.user"] == getpass.getuser()
    assert tags["mlflow.source.name"] == str(ROOT / "scripts" / "train.py")
    assert tags["mlflow.source.type"] == "LOCAL"
    assert {"train.steps = 2", "train.group_size = 4"} <= set(tags["set"].split("\n")), "the bindings of --set"
    assert tags["git_commit"].startswith(tags["mlflow.source.git.commit"])
    assert tags["mlflow.note.content"] == gin_files.hypothesis(ROOT / "gin" / "ablations/newest.gin")
    assert tags["mlflow.note.content"].startswith("the newest trajectory")
    assert run.data.params["TrajectorySelector.by"] == "recency", "without quotes"
    assert f"#/experiments/{run.info.experiment_id}?workflowType=machine_learning" in output

    used = {each.tags[0].value: each.dataset for each in run.inputs.dataset_inputs}
    assert used.keys() == {"training", "validation"}
    assert used["training"].digest != used["validation"].digest
    assert json.loads(used["training"].profile) == {"questions": 24}
    assert json.loads(used["training"].source) == {"binding": run.data.params["Work.questions"]}
    experiment = config.load(["toy.gin"], small_bindings(warm_model, "train.seed = 5"))
    questions = sorted(experiment.questions.load(), key=lambda question: question.id)
    assert fingerprint(questions) == used["training"].digest, "of the questions, whatever the run"


def test_long_names_of_sources_and_a_tag_with_a_secret_keep_no_run_out_of_mlflow(sqlite, tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(0, {"x": 1.0})
    questions = {"training": [Question.make(f"{i}" + "s" * 300, f"{i}?", "1") for i in range(5)]}
    tags = {"api_key": "hunter2", "store": "http://me:hunter2@host"}
    tracker(log, sqlite, questions=questions, tags=tags).close("FINISHED")
    run = the_run(sqlite)
    assert run.data.metrics["x"] == 1.0
    assert run.inputs.dataset_inputs[0].dataset.name.endswith("s and 2 more")
    assert (run.data.tags["api_key"], run.data.tags["store"]) == ("***", "http://host")


@pytest.mark.slow
def test_a_run_has_no_metrics_of_parts_that_are_switched_off(warm_model, sqlite, tmp_path):
    trained(warm_model, sqlite, tmp_path, "train.steps = 2", "ReplayMixer.rho = 0.0")
    sent = set(the_run(sqlite).data.metrics)
    written = {name for row in rows(tmp_path / "run") for name in row} - {"step", "time"}
    assert sent == written | {"train/step"}
    assert (tmp_path / "run" / "curves.png").is_file()
    assert not any(name.startswith("replay/") for name in sent)
    assert {"reward/mean", "policy/loss", "eval/greedy_accuracy", "reward/lucky_guess_rate"} <= sent
    assert not {"rollout/rounds", "rollout/filtered_groups", "rollout/age_mean"} & sent
    assert len(sent) < 55
    scores = [name for name in sorted(sent) if name.startswith(("eval/validation/", "interval/"))]
    assert scores[0] == "eval/validation/avg_at_1"
    bounds = ["interval/validation/avg_at_1_high", "interval/validation/avg_at_1_low"]
    assert scores[-2:] == bounds, "MLflow shows metrics by name: the bounds come after all scores"


@pytest.mark.slow
def test_a_switched_on_part_has_its_metrics(warm_model, tmp_path):
    def metrics(name, *more) -> set[str]:
        short = ("train.steps = 2", "train.eval_every = None")
        train_small(warm_model, tmp_path / name, *short, *more, files=["base.gin"])
        return set(rows(tmp_path / name)[-1])

    on = ["DynamicSampling.max_rounds = 2", "ReplayBuffer.max_bytes = 1000", "train.generate_ahead = True"]
    on += ["ReplayMixer.start_at_accuracy = 0.35"]
    of_rounds, of_limits = {"rollout/rounds", "rollout/filtered_groups"}, {"replay/stored_bytes", "replay/evicted"}
    plain, full = metrics("plain"), metrics("full", *on)
    assert full - plain >= {"replay/started", "rollout/age_mean", *of_rounds, *of_limits}
    assert "replay/retired" in plain - metrics("kept", "RetirementPolicy.at_accuracy = None")
    late = metrics("late", "ReplayMixer.rho = 0.0", "ReplayMixer.injection = @LateInjection()")
    assert "replay/injected" in late - plain
    assert "reward/lucky_guess_rate" in plain
    assert not any("lucky" in name for name in metrics("exact", "Verifier.kind = 'exact'"))


def test_a_description_that_its_user_has_changed_stays(sqlite, tmp_path):
    def session(run_id=None):
        tags = {"mlflow.note.content": "as the file says"}
        sender = tracker(tmp_path / "run", sqlite, tags=tags, id=run_id)
        sender.close("FINISHED")
        return sender.run_id

    run_id = session()
    assert the_run(sqlite).data.tags["mlflow.note.content"] == "as the file says"
    MlflowClient(sqlite).set_tag(run_id, "mlflow.note.content", "mine")
    session(run_id)
    assert the_run(sqlite).data.tags["mlflow.note.content"] == "mine"


def test_a_resumed_run_says_how_often_it_was_killed(sqlite, tmp_path, caplog):
    folder = tmp_path / "run"
    for session in range(3):  # the first two end without a word, as a killed process does
        log = MetricsLog(folder / "metrics.jsonl")
        sender = tracker(log, sqlite, params={"a": "'x'"})
        sender.catch_up()
        log.append(session, {"reward/mean": 0.0})
        sender.send()
        assert the_run(sqlite).data.metrics["train/step"] == session
        if session == 2:
            with caplog.at_level(logging.INFO):
                sender.close("FINISHED")
    assert the_run(sqlite).data.tags["killed"] == "2"
    assert "keeps its first values" not in caplog.text


def test_a_run_is_marked_as_killed_by_its_own_folder_and_not_by_a_copy_and_no_experiment_is_made(sqlite, tmp_path):
    run, copy, elsewhere = (tmp_path / name for name in ("run", "copy", "elsewhere"))
    tracker(run, sqlite).catch_up()
    shutil.copytree(run, copy)
    run.rename(elsewhere)  # as on another machine, where the original is not seen
    mark_killed(Tracking(), sqlite, [copy, elsewhere])
    assert the_run(sqlite).info.status == "RUNNING"
    elsewhere.rename(run)
    mark_killed(Tracking(experiment="other"), sqlite, [run])
    assert MlflowClient(sqlite).get_experiment_by_name("other") is None
    mark_killed(Tracking(), sqlite, [run, copy])
    assert the_run(sqlite).info.status == "KILLED"


@pytest.mark.slow
def test_a_copy_of_a_run_is_a_run_of_its_own_and_a_moved_one_is_the_same(warm_model, sqlite, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", sqlite)
    original, copy, again, moved, begun = (tmp_path / name for name in ("original", "copy", "again", "moved", "begun"))
    tracked = ("Tracking.enabled = True", "train.eval_every = None", "train.keep = 9")

    def go(run: Path, steps: int, **how: str) -> None:
        train_small(warm_model, run, *tracked, f"train.steps = {steps}", resume=True, **how)

    go(original, 2)
    shutil.copytree(original, copy)
    shutil.copytree(original, begun)
    shutil.rmtree(begun / "checkpoint-2")  # before its first checkpoint: it begins again, with the same configuration
    go(begun, 2)
    go(copy, 3)
    copy.rename(moved)
    go(moved, 4)
    shutil.copytree(moved, again)
    go(again, 5)
    go(moved, 2, resume_from="checkpoint-2")
    go(original, 6)
    last_steps = {run.info.run_name: run.data.metrics["train/step"] for run in tracked_runs(sqlite)}
    assert last_steps == {"original": 6, "copy": 4, "again": 5, "begun": 2}


@pytest.mark.slow
def test_comparisons_have_nothing_of_an_attempt_that_was_set_aside(warm_model, sqlite, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", sqlite)
    metric, run = "eval/greedy_accuracy", tmp_path / "run"
    for steps, every, how in ((10, 5, {}), (6, 3, {"resume_from": "checkpoint-4"})):
        more = ("Tracking.enabled = True", "train.keep = 9", f"train.steps = {steps}", f"train.eval_every = {every}")
        experiment = config.load(["toy.gin"], small_bindings(warm_model, *more))
        tags = {"variant": "v", "seed": "0"}
        train(experiment, run, resume=bool(how), tracking_uri="", tags=tags, **how)
    store = Store(sqlite)
    runs, _ = store.select("exgrpo", None, [metric], None, unfinished=False)
    [curve] = store.curves(runs, [metric])[metric]
    logged = logged_curve("v", 0, rows(run), metric)
    assert logged.steps.tolist() == [0, 6]
    for axis in ("steps", "values", "tokens", "seconds"):
        assert (getattr(curve, axis) == getattr(logged, axis)).all(), axis


def test_the_machine_is_measured_if_bound(sqlite, tmp_path, monkeypatch):
    monkeypatch.setattr("exgrpo_orlhf.tracking.tracker.SYSTEM_SECONDS", 0.2)
    sender = tracker(tmp_path / "run", sqlite, Tracking(system_metrics=True))
    sender.catch_up()
    wait_until(lambda: "system/cpu_utilization_percentage" in the_run(sqlite).data.metrics)
    sender.close("FINISHED")
    assert the_run(sqlite).info.status == "FINISHED"


def test_the_address_to_look_at_is_that_of_training_runs():
    assert page("http://host:5000/", "3") == "http://host:5000/#/experiments/3?workflowType=machine_learning"
    local = page("sqlite:///a/mlflow.db", "1")
    assert local.startswith("mlflow ui --backend-store-uri sqlite:///a/mlflow.db, then http://127.0.0.1:5000/#/exp")
    assert Path(local).name == "1?workflowType=machine_learning"
