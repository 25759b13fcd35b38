"""The way of the metrics log to a real MLflow: SQLite files and `mlflow server` processes, stopped and killed."""

import logging
import shutil
import socket
import subprocess
import sys
import time

import pytest
from mlflow.tracking import MlflowClient
from mlflow_server import Server
from run_builders import environment, small_bindings, wait_until
from tracking_builders import tracked_runs, tracker

from exgrpo_orlhf import config
from exgrpo_orlhf.settings import Tracking
from exgrpo_orlhf.tracking.client import address
from exgrpo_orlhf.tracking.metrics_log import METRICS_PER_CALL, MetricsLog
from exgrpo_orlhf.training import run

# A training process: a row every 10 ms, told on standard output; then as the last argument says.
TRAIN = """
import sys, time
from pathlib import Path
from exgrpo_orlhf.settings import Tracking
from exgrpo_orlhf.tracking.metrics_log import MetricsLog
from exgrpo_orlhf.tracking.tracker import MlflowTracker
folder, uri, first, steps, end = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
log = MetricsLog(folder / "metrics.jsonl")
tracker = MlflowTracker(log, Tracking(flush_seconds=0.05), default_uri=uri, run_name=folder.name,
                        params={"a": 1}, tags={})
for step in range(first, first + steps):
    log.append(step, {"reward/mean": step / 2})
    time.sleep(0.01)
while end == "killed" and tracker.run_id is None:
    time.sleep(0.01)
print("trained", flush=True)
if end == "killed":
    for step in range(first + steps, 10_000):
        log.append(step, {"reward/mean": step / 2})
        time.sleep(0.01)
if end == "closed":
    tracker.close("FINISHED", timeout=120)  # making the database takes long on a busy machine
"""


@pytest.fixture
def server(tmp_path, made_database):
    shutil.copy(made_database, tmp_path / "server.db")
    server = Server(tmp_path)
    yield server
    server.stop()


def train(folder, uri, first, steps, end):
    command = [sys.executable, "-c", TRAIN, str(folder), uri, str(first), str(steps), end]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())


def fill(log, steps, offset=0.0):
    for step in steps:
        log.append(step, {"reward/mean": step + offset})


def history(uri, run_id, name="reward/mean"):
    """[(step, value)] as the server kept them, sorted by step."""
    return sorted((metric.step, metric.value) for metric in MlflowClient(uri).get_metric_history(run_id, name))


def once_each(steps):
    return [(step, float(step)) for step in steps]


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_param_that_mlflow_would_refuse_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"'pass@1' cannot name a metric, param or tag.*write 'pass_at_1'"):
        tracker(MetricsLog(tmp_path / "metrics.jsonl"), "sqlite://", params={"pass@1": 1})


def test_a_run_arrives_whole(tmp_path, fresh_sqlite):
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
    params = {"ReplayMixer.rho": 0.5, "none": None, **{f"p{i}": i for i in range(150)}}
    sender = tracker(log, fresh_sqlite, params=params, tags={"engine": "local", "seed": 0})
    fill(log, range(3))
    (tmp_path / "plot.txt").write_text("plot")
    for name in ("plot.txt", "gone.txt"):
        sender.artifact(tmp_path / name)
    sender.close("FINISHED")
    (run,) = tracked_runs(fresh_sqlite)
    assert run.info.run_id == sender.run_id
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params == {name: str(value) for name, value in params.items()}
    assert (run.data.tags["engine"], run.data.tags["seed"]) == ("local", "0")
    assert (
        history(fresh_sqlite, sender.run_id)
        == history(fresh_sqlite, sender.run_id, "train/step")
        == once_each(range(3))
    )
    times = sorted(
        metric.timestamp for metric in MlflowClient(fresh_sqlite).get_metric_history(sender.run_id, "reward/mean")
    )
    assert times == [round(row["time"] * 1000) for row in log.rows()]
    assert run.info.artifact_uri.startswith((tmp_path / "mlartifacts" / "exgrpo").as_uri())
    assert [file.path for file in MlflowClient(fresh_sqlite).list_artifacts(sender.run_id)] == ["plot.txt"]


def test_long_params_are_cut_with_their_hash(tmp_path, sqlite):
    params = {"a": "x" * 7000, "b": "x" * 6999 + "y", "whole": "x" * 6000}
    sender = tracker(MetricsLog(tmp_path / "metrics.jsonl"), sqlite, params=params)
    sender.close("FINISHED")
    stored = tracked_runs(sqlite)[0].data.params
    assert stored["whole"] == params["whole"]
    assert len(stored["a"]) == len(stored["b"]) == 6000
    assert stored["a"] != stored["b"]
    assert "7000 characters" in stored["a"]


def test_a_finished_run_names_the_server_that_has_all_of_it_until_it_is_resumed(tmp_path, sqlite):
    log, arrived = MetricsLog(tmp_path / "metrics.jsonl"), tmp_path / "metrics.arrived"
    for uri, status, named in (
        (sqlite, "KILLED", False),
        ("http://127.0.0.1:9", "FINISHED", False),
        (sqlite, "FINISHED", True),
    ):
        sender = tracker(log, uri)
        fill(log, [log.last_step + 1])
        sender.close(status)
        assert arrived.exists() is named, (uri, status)
    assert arrived.read_text(encoding="utf-8") == sqlite
    sender = tracker(log, sqlite)
    assert not arrived.exists()
    sender.close("FAILED")
    assert not arrived.exists()


def test_a_run_resumed_twice_is_one_run_with_each_step_once(tmp_path, sqlite, caplog):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    sender = tracker(log, sqlite, params={"train.steps": 3})
    fill(log, range(6))
    sender.close("KILLED")
    for session in (1, 2):  # from checkpoints at steps 2 and 4: steps 3 to 5, then 5 run again, with other numbers
        log = MetricsLog(log.path)
        log.cut_back(2 * session)
        again = tracker(log, sqlite, params={"train.steps": 9, f"new{session}": 1}, run_id=sender.run_id)
        assert again.run_id == sender.run_id
        wait_until(lambda: tracked_runs(sqlite)[0].info.status == "RUNNING")
        fill(log, range(2 * session + 1, 6 + session), offset=0.25)
        again.close("FINISHED")
    (run,) = tracked_runs(sqlite)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"train.steps": "3", "new1": "1", "new2": "1"}
    assert history(sqlite, run.info.run_id) == [*once_each(range(6)), (6, 6.25), (7, 7.25)]
    assert warnings(caplog) == []


def test_a_killed_process_goes_on_in_its_run_without_knowing_the_id(tmp_path, sqlite):
    process = train(tmp_path / "run", sqlite, 0, 5, "killed")
    assert process.stdout.readline() == "trained\n"
    time.sleep(0.3)
    process.kill()
    process.wait()
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
    reached = log.last_step
    log.cut_back(3)
    sender = tracker(log, sqlite)
    fill(log, range(4, reached + 3))
    sender.close("FINISHED")
    (run,) = tracked_runs(sqlite)
    assert [step for step, _ in history(sqlite, run.info.run_id)] == list(range(reached + 3))


def test_two_trackers_at_once_on_one_log_send_each_step_once(tmp_path, sqlite):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    fill(log, [0])
    one = tracker(log, sqlite)
    wait_until(lambda: one.run_id)
    two = tracker(log, sqlite)
    for step in range(1, 100):
        fill(log, [step])
        time.sleep(0.002)
    one.close("FINISHED")
    two.close("FINISHED")
    assert one.run_id == two.run_id
    assert history(sqlite, one.run_id) == once_each(range(100))


def test_an_emptied_log_begins_another_run(tmp_path, sqlite):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for _ in range(2):
        sender = tracker(log, sqlite)
        fill(log, range(2))
        sender.close("FINISHED")
        log.cut_back(-1)
    assert [history(sqlite, run.info.run_id) for run in tracked_runs(sqlite)] == [once_each(range(2))] * 2


def test_a_long_log_is_sent_in_calls_of_whole_steps(tmp_path, sqlite):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(5):
        log.append(step, {f"m{i}": float(step) for i in range(METRICS_PER_CALL - 1 if step == 2 else 400)})
    sender = tracker(log, sqlite)
    sender.close("FINISHED")
    for name in ("m0", "m399", "train/step"):
        assert history(sqlite, sender.run_id, name) == once_each(range(5))
    assert history(sqlite, sender.run_id, "m998") == [(2, 2.0)]
    sender._cursors["train/step"] = -1
    calls = [[metric.step for metric in call] for call in sender._batches("train/step")]
    assert [sorted(set(call)) for call in calls] == [[0, 1], [2], [3, 4]]
    assert max(map(len, calls)) == METRICS_PER_CALL


def test_a_deleted_experiment_warns_and_is_caught_up_when_restored(tmp_path, sqlite, caplog):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    tracker(MetricsLog(tmp_path / "other.jsonl"), sqlite).close("FINISHED")
    experiment = MlflowClient(sqlite).get_experiment_by_name("exgrpo").experiment_id
    MlflowClient(sqlite).delete_experiment(experiment)
    sender = tracker(log, sqlite)
    fill(log, range(3))
    wait_until(lambda: warnings(caplog))
    time.sleep(0.3)
    (warning,) = warnings(caplog)
    assert "experiment 'exgrpo' is deleted" in warning
    assert f"mlflow experiments restore --experiment-id {experiment}" in warning
    MlflowClient(sqlite).restore_experiment(experiment)
    sender.close("FINISHED")
    assert history(sqlite, sender.run_id) == once_each(range(3))


def test_a_run_unknown_to_the_server_becomes_another_with_all_steps(tmp_path, sqlite, caplog):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    fill(log, range(3))
    sender = tracker(log, sqlite, run_id="0" * 32)
    sender.close("FINISHED")
    assert f"has no run {'0' * 32}" in warnings(caplog)[0]
    assert history(sqlite, sender.run_id) == once_each(range(3))


def test_the_environment_wins_over_the_setting_and_that_over_the_default(tmp_path, made_database, monkeypatch):
    uris = [f"sqlite:///{tmp_path}/{name}.db" for name in ("default", "setting", "environment")]
    for uri in uris[1:]:
        shutil.copy(made_database, uri.removeprefix("sqlite:///"))
    setting = Tracking(uri=uris[1], flush_seconds=0.05)
    tracker(MetricsLog(tmp_path / "one.jsonl"), uris[0], setting).close("FINISHED")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uris[2])
    tracker(MetricsLog(tmp_path / "two.jsonl"), uris[0], setting).close("FINISHED")
    assert [run.data.tags["mlflow.runName"] for uri in uris[1:] for run in tracked_runs(uri)] == ["run", "run"]
    assert not (tmp_path / "default.db").exists()


def test_an_address_of_an_impossible_scheme_is_refused_before_anything_is_loaded(raw_model, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "htp://somebody:secret@host:5000")
    text = r"MLFLOW_TRACKING_URI = 'htp://host:5000': MLflow has no store for htp://; give sqlite:///FILE, http://HOST"
    experiment = config.load(["toy.gin"], [*small_bindings(raw_model), "Tracking.enabled = True"])
    with pytest.raises(ValueError, match=text):
        run.train(experiment, tmp_path / "run", resume=False, tracking_uri="unused", tags={})
    assert not (tmp_path / "run").exists()
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(ValueError, match=r"Tracking\.uri = 'sqlight:///x': MLflow has no store for sqlight://"):
        address(Tracking(uri="sqlight:///x"), "unused")
    for uri in ("mysql+pymysql://host/db", "databricks", "./mlruns", "file:///x", "https://host"):
        assert address(Tracking(uri=uri), "unused") == uri


def test_switched_off_it_leaves_the_log_alone(tmp_path, fresh_sqlite):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    sender = tracker(log, fresh_sqlite, Tracking(enabled=False), run_id="kept for the checkpoint")
    fill(log, [0])
    sender.artifact(log.path)
    sender.close("FINISHED")
    assert sender.run_id == "kept for the checkpoint"
    assert list(tmp_path.iterdir()) == [log.path]


@pytest.mark.slow
def test_two_processes_starting_at_once_on_a_fresh_database_both_arrive(tmp_path, fresh_sqlite):
    processes = [train(tmp_path / name, fresh_sqlite, 0, 3, "closed") for name in ("one", "two")]
    assert [process.wait(120) for process in processes] == [0, 0]
    runs = tracked_runs(fresh_sqlite)
    assert sorted(run.info.run_name for run in runs) == ["one", "two"]
    assert all([step for step, _ in history(fresh_sqlite, run.info.run_id)] == [0, 1, 2] for run in runs)
    assert {path.name for path in tmp_path.glob("mlflow.db*")} == {"mlflow.db", "mlflow.db.lock"}


@pytest.mark.slow
def test_a_kill_while_the_database_is_made_leaves_none_and_the_next_start_makes_it(tmp_path, fresh_sqlite):
    process = train(tmp_path / "run", fresh_sqlite, 0, 1, "killed")
    wait_until(lambda: [path for path in tmp_path.glob("mlflow.db.*.new") if path.stat().st_size > 100_000])
    process.kill()
    process.wait()
    assert not (tmp_path / "mlflow.db").exists()
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
    sender = tracker(log, fresh_sqlite)
    sender.close("FINISHED")
    assert len(history(fresh_sqlite, sender.run_id)) == len(list(log.rows())) > 0
    assert {path.name for path in tmp_path.glob("mlflow.db*")} == {"mlflow.db", "mlflow.db.lock"}


@pytest.mark.slow
def test_a_server_that_comes_later_and_goes_and_returns_gets_all_once(tmp_path, server, caplog):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    sender = tracker(log, server.uri, params={"a": 1})
    fill(log, range(3))
    wait_until(lambda: warnings(caplog))
    assert sender.run_id is None
    server.start()
    wait_until(lambda: sender.run_id and history(server.uri, sender.run_id) == once_each(range(3)))
    wait_until(lambda: len(warnings(caplog)) == 2)
    server.stop()
    fill(log, range(3, 6))
    wait_until(lambda: len(warnings(caplog)) == 3)
    fill(log, range(6, 9))
    server.start()
    fill(log, range(9, 12))
    (tmp_path / "config.gin").write_text("config")
    sender.artifact(tmp_path / "config.gin")
    wait_until(lambda: len(warnings(caplog)) == 4)
    sender.close("FINISHED")
    first, back, second, again = warnings(caplog)
    assert "Training goes on" in first
    assert "Training goes on" in second
    assert "answers again" in back
    assert "answers again" in again
    (run,) = tracked_runs(server.uri)
    assert (run.info.status, run.data.params) == ("FINISHED", {"a": "1"})
    assert history(server.uri, run.info.run_id) == once_each(range(12))
    assert [file.path for file in MlflowClient(server.uri).list_artifacts(run.info.run_id)] == ["config.gin"]


@pytest.mark.slow
def test_a_server_that_never_answers_holds_nobody_and_a_later_tracker_catches_up(tmp_path, sqlite, caplog, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        sender = tracker(log, f"http://someone:secret@127.0.0.1:{silent.getsockname()[1]}")
        longest = 0.0
        for step in range(200):
            before = time.monotonic()
            fill(log, [step])
            longest = max(longest, time.monotonic() - before)
        assert longest < 4  # seconds; one request takes 5
        before = time.monotonic()
        sender.close("FINISHED", timeout=0.5)
        assert time.monotonic() - before < 4
        sender.close("FINISHED")  # a second time does nothing
        sender._thread.join(120)
        assert not sender._thread.is_alive()
    assert "200 steps of" in warnings(caplog)[0]
    assert "resume this run" in warnings(caplog)[0]
    assert "secret" not in caplog.text
    later = tracker(log, sqlite)
    later.close("FINISHED")
    assert history(sqlite, later.run_id) == once_each(range(200))


def test_the_thread_does_not_keep_a_process_alive(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = train(tmp_path / "run", f"http://127.0.0.1:{silent.getsockname()[1]}", 0, 200, "left")
        assert process.stdout.readline() == "trained\n"
        before = time.monotonic()
        assert process.wait(60) == 0
    assert time.monotonic() - before < 50  # seconds; the request under way would take 60
    assert len(list(MetricsLog(tmp_path / "run" / "metrics.jsonl").rows())) == 200
