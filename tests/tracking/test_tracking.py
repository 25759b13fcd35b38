"""The way of the metrics log to a real MLflow: SQLite files and `mlflow server` processes, stopped and killed."""

import contextlib
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
from exgrpo_orlhf.study.runs import StudyRun
from exgrpo_orlhf.study.store import Store
from exgrpo_orlhf.tracking.client import address, batches
from exgrpo_orlhf.tracking.metrics_log import METRICS_PER_CALL, MetricsLog
from exgrpo_orlhf.training import run

# A training process: a row every 10 ms; then, which is told on standard output, as the last argument says.
TRAIN = """
import sys, time
from pathlib import Path
from exgrpo_orlhf.settings import Tracking
from exgrpo_orlhf.tracking.metrics_log import MetricsLog
from exgrpo_orlhf.tracking.tracker import MlflowTracker, RunDescription
folder, uri, first, steps, end = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
log = MetricsLog(folder / "metrics.jsonl")
tracker = MlflowTracker(log, Tracking(), uri, RunDescription(folder.name, {"a": 1}))
tracker.catch_up()
def train(steps):
    for step in steps:
        log.append(step, {"reward/mean": step / 2})
        tracker.send()
        time.sleep(0.01)
train(range(first, first + steps))
print("trained", flush=True)
if end == "killed":
    train(range(first + steps, 10_000))
tracker.close("FINISHED")
"""


@pytest.fixture
def server(tmp_path, made_database, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "300")  # a busy machine is no outage
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


def attempts(listener):
    """How many connections nobody has accepted yet. They are closed."""
    listener.setblocking(False)
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
            count += 1
    return count


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_param_that_mlflow_would_refuse_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"'pass@1' cannot name a metric, param or tag.*write 'pass_at_1'"):
        tracker(MetricsLog(tmp_path / "metrics.jsonl"), "sqlite://", params={"pass@1": 1})


@pytest.mark.slow
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
    for name in ("reward/mean", "train/step"):
        assert history(fresh_sqlite, sender.run_id, name) == once_each(range(3))
    sent = MlflowClient(fresh_sqlite).get_metric_history(sender.run_id, "reward/mean")
    assert sorted(metric.timestamp for metric in sent) == [round(row["time"] * 1000) for row in log.rows()]
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
    sessions = [(sqlite, "KILLED", False), ("http://127.0.0.1:9", "FINISHED", False), (sqlite, "FINISHED", True)]
    for uri, status, named in sessions:
        sender = tracker(log, uri)
        fill(log, [log.last_step + 1])
        sender.close(status)
        assert arrived.exists() is named, (uri, status)
    study_run = StudyRun(None, 0, None, tmp_path)
    assert study_run.sent(sqlite, "exgrpo")
    assert not study_run.sent(sqlite, "other")
    arrived.write_text(sqlite)
    assert not study_run.sent(sqlite, "exgrpo"), "of an older version: in which experiment is not known"
    sender = tracker(log, sqlite)
    assert not arrived.exists()
    sender.close("FAILED")
    assert not arrived.exists()


def test_a_run_resumed_twice_is_one_run_with_each_step_once_or_with_what_it_came_to_when_it_was_made_again(
    tmp_path, sqlite, caplog
):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    sender = tracker(log, sqlite, params={"train.steps": 3})
    fill(log, range(6))
    sender.close("KILLED")
    for session in (1, 2):  # from checkpoints at steps 2 and 4: steps 3 to 5, then 5 run again, with other numbers
        log = MetricsLog(log.path)
        log.cut_back(2 * session)
        again = tracker(log, sqlite, params={"train.steps": 9, f"new{session}": 1}, id=sender.run_id)
        assert again.run_id == sender.run_id
        again.catch_up()
        assert tracked_runs(sqlite)[0].info.status == "RUNNING"
        fill(log, range(2 * session + 1, 6 + session), offset=0.25)
        again.close("FINISHED")
    (run,) = tracked_runs(sqlite)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"train.steps": "3", "new1": "1", "new2": "1"}
    again = [(step, step + 0.25) for step in range(3, 8)]  # once, also where two sessions made it
    assert history(sqlite, run.info.run_id) == sorted([*once_each(range(6)), *again])
    assert run.data.metrics["reward/mean"] == 7.25
    assert warnings(caplog) == []


def compared(uri, metrics=("reward/mean",)):
    """{metric: [(step, value)]} of the only run, as comparisons read them. It has a variant and a seed."""
    store = Store(uri)
    runs, _ = store.select("exgrpo", None, metrics, None, unfinished=True)
    return {
        name: [*zip(curve.steps, curve.values, strict=True)] for name, [curve] in store.curves(runs, metrics).items()
    }


def in_log(log, metrics=("reward/mean",)):
    return {name: [(row["step"], row[name]) for row in log.rows() if name in row] for name in metrics}


@pytest.mark.slow
def test_comparisons_read_what_the_log_says_after_several_cuts(tmp_path, sqlite):
    """Fewer steps, values that are not measured again, a session that ends before it has made all steps again, and
    another program's value, which stays."""
    metrics = ("reward/mean", "eval/greedy_accuracy")
    log, sender = MetricsLog(tmp_path / "metrics.jsonl"), None
    sessions = [  # from which step it goes on, the last one, an evaluation every so many steps, what rewards differ by
        *((-1, 10, 5, 0.0), (4, 7, 3, 0.0), (4, 6, 3, 0.5), (2, 9, 2, 0.5), (6, 9, 2, 0.5), (6, 8, 9, 0.25)),
        *((4, 5, 2, 0.5), (5, 11, 4, 0.5), (8, 11, 4, 0.25), (8, 11, 4, 0.25)),
    ]
    for session, (start, end, every, offset) in enumerate(sessions):
        log = MetricsLog(log.path)
        log.cut_back(start)
        tags = {"variant": "v", "seed": "0"}
        sender = tracker(log, sqlite, tags=tags, id=sender and sender.run_id, step=max(start, 0))
        sender.catch_up()
        for step in range(start + 1, end + 1):
            evaluated = {"eval/greedy_accuracy": step / 100} if step % every == 0 else {}
            log.append(step, {"reward/mean": step + offset, "time/step": session, **evaluated})
            if session % 2:
                sender.send()
        sender.close("FINISHED")
        MlflowClient(sqlite).log_metric(sender.run_id, "eval/chains", 0.5, step=end)
        assert compared(sqlite, metrics) == in_log(log, metrics), session
    assert [step for step, _ in compared(sqlite, ["eval/chains"])["eval/chains"]] == [5, 11]
    sent = history(sqlite, sender.run_id)
    assert [sent.count((step, step + 0.25)) for step in (9, 10, 11)] == [1] * 3, (
        "what came out the same is not sent again"
    )


def test_rows_that_a_log_has_lost_stay_in_comparisons(tmp_path, sqlite):
    log, tags = MetricsLog(tmp_path / "metrics.jsonl"), {"variant": "v", "seed": "0"}
    sender = tracker(log, sqlite, tags=tags)
    fill(log, range(5))
    sender.close("FINISHED")
    log.path.unlink()
    tracker(MetricsLog(log.path), sqlite, id=sender.run_id, step=4).close("FINISHED")
    assert compared(sqlite)["reward/mean"] == once_each(range(5))


def test_two_trackers_at_once_on_one_log_send_each_step_once(tmp_path, sqlite):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    fill(log, [0])
    one, two = tracker(log, sqlite), tracker(log, sqlite)
    one.catch_up()
    two.catch_up()
    for step in range(1, 100):
        fill(log, [step])
        for sender in (one, two)[step % 3 :]:
            sender.send()
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


def test_a_long_log_is_sent_in_calls_of_whole_steps_but_of_one_with_more_metrics_than_a_call(tmp_path, sqlite):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(5):
        log.append(step, {f"m{i}": float(step) for i in range(2500 if step == 2 else 400)})
    sender = tracker(log, sqlite)
    sender.close("FINISHED")
    for name in ("m0", "m399", "train/step"):
        assert history(sqlite, sender.run_id, name) == once_each(range(5))
    assert history(sqlite, sender.run_id, "m2499") == [(2, 2.0)]
    calls = [[metric.step for metric in call] for call in batches(log.rows(), "train/step")]
    assert [sorted(set(call)) for call in calls] == [[0, 1], [2], [2], [2, 3], [4]]
    assert max(map(len, calls)) == METRICS_PER_CALL


def test_a_deleted_experiment_warns_and_is_caught_up_when_restored(tmp_path, sqlite, caplog):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    tracker(MetricsLog(tmp_path / "other.jsonl"), sqlite).close("FINISHED")
    experiment = MlflowClient(sqlite).get_experiment_by_name("exgrpo").experiment_id
    MlflowClient(sqlite).delete_experiment(experiment)
    sender = tracker(log, sqlite)
    for step in range(3):
        fill(log, [step])
        sender.catch_up()
    (warning,) = warnings(caplog)
    assert "experiment 'exgrpo' is deleted" in warning
    assert f"mlflow experiments restore --experiment-id {experiment}" in warning
    MlflowClient(sqlite).restore_experiment(experiment)
    sender.close("FINISHED")
    assert history(sqlite, sender.run_id) == once_each(range(3))


def test_a_run_goes_wholly_to_another_experiment_and_stays_in_the_first(tmp_path, sqlite, caplog):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    fill(log, range(3))
    first = tracker(log, sqlite)
    first.close("FINISHED")
    for _ in range(2):  # the checkpoint of a finished run goes on naming the first one
        sender = tracker(log, sqlite, Tracking(experiment="other"), id=first.run_id)
        sender.close("FINISHED")
        assert f"has no run {first.run_id} in the experiment other; all steps go to another" in warnings(caplog)[-1]
    assert StudyRun(None, 0, None, tmp_path).sent(sqlite, "other")
    for experiment, run_id in (("exgrpo", first.run_id), ("other", sender.run_id)):
        assert [run.info.run_id for run in tracked_runs(sqlite, experiment)] == [run_id]
        assert history(sqlite, run_id) == once_each(range(3))


def test_a_run_unknown_to_the_server_becomes_another_with_all_steps(tmp_path, sqlite, caplog):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    fill(log, range(3))
    sender = tracker(log, sqlite, id="0" * 32)
    sender.close("FINISHED")
    assert f"has no run {'0' * 32}" in warnings(caplog)[0]
    assert history(sqlite, sender.run_id) == once_each(range(3))


def test_the_environment_wins_over_the_setting_and_that_over_the_default(tmp_path, made_database, monkeypatch):
    uris = [f"sqlite:///{tmp_path}/{name}.db" for name in ("default", "setting", "environment")]
    for uri in uris[1:]:
        shutil.copy(made_database, uri.removeprefix("sqlite:///"))
    setting = Tracking(uri=uris[1])
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


def test_switched_off_it_leaves_the_log_alone_and_no_address_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "htp://host:5000")
    log = MetricsLog(tmp_path / "metrics.jsonl")
    sender = tracker(log, "unused", Tracking(enabled=False), id="kept for the checkpoint")
    fill(log, [0])
    sender.artifact(log.path)
    sender.catch_up()
    sender.send()
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
    fill(log, [0])
    sender.close("FINISHED")
    assert history(fresh_sqlite, sender.run_id) == once_each(range(1))
    assert {path.name for path in tmp_path.glob("mlflow.db*")} == {"mlflow.db", "mlflow.db.lock"}


@pytest.mark.slow
def test_a_server_that_comes_later_and_goes_and_returns_gets_all_once(tmp_path, server, caplog):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    sender = tracker(log, server.uri, params={"a": 1})

    def train(steps, arrived=None, said=None):
        for step in steps:
            fill(log, [step])
            sender.send()
        assert arrived is None or history(server.uri, sender.run_id) == once_each(range(arrived))
        assert said is None or len(warnings(caplog)) == said

    sender.catch_up()
    train(range(3), said=1)
    assert sender.run_id is None
    server.start()
    sender.catch_up()
    train([], arrived=3)
    train(range(3, 5), arrived=5, said=2)
    server.stop()
    train(range(5, 9))
    sender.catch_up()
    train([], said=3)
    server.start()
    train(range(9, 12), arrived=5)  # no attempt before the next checkpoint
    (tmp_path / "config.gin").write_text("config")
    sender.artifact(tmp_path / "config.gin")
    sender.catch_up()
    train([12])
    sender.close("FINISHED")
    texts = ["Training goes on", "answers again"] * 2
    assert all(text in warning for text, warning in zip(texts, warnings(caplog), strict=True))
    (run,) = tracked_runs(server.uri)
    assert (run.info.status, run.data.params) == ("FINISHED", {"a": "1"})
    assert history(server.uri, run.info.run_id) == once_each(range(13))
    assert [file.path for file in MlflowClient(server.uri).list_artifacts(run.info.run_id)] == ["config.gin"]


@pytest.mark.slow
def test_a_server_that_is_killed_while_steps_are_sent_gets_the_others_after_a_resume(tmp_path, server):
    """And the training process is killed as well, in the outage."""
    server.start()
    process = train(tmp_path / "run", server.uri, 0, 20, "killed")
    assert process.stdout.readline() == "trained\n"
    written = lambda: (tmp_path / "run" / "metrics.jsonl").read_bytes().count(b"\n")
    wait_until(lambda: tracked_runs(server.uri)[0].data.metrics["train/step"] >= 20)
    server.stop()
    before = written()
    wait_until(lambda: written() > before + 20)
    process.kill()
    process.wait()
    server.start()
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
    (run,) = tracked_runs(server.uri)
    assert 20 <= run.data.metrics["train/step"] < log.last_step - 3
    log.cut_back(log.last_step - 2)
    sender = tracker(log, server.uri)
    sender.catch_up()
    assert history(server.uri, run.info.run_id, "train/step") == once_each(range(log.last_step + 1))


def test_a_store_that_takes_no_files_holds_no_steps_back(tmp_path, sqlite, caplog, monkeypatch):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    sender = tracker(log, sqlite)
    refuse = lambda *_: (_ for _ in ()).throw(OSError("no such bucket"))
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_artifact", refuse)
        for step in range(4):
            fill(log, [step])
            sender.artifact(log.path)
            (sender.catch_up if step % 2 else sender.send)()
            assert step == 0 or history(sqlite, sender.run_id) == once_each(range(step + 1))
        assert "no such bucket" in warnings(caplog)[0]
        assert len(warnings(caplog)) == 1
    sender.close("FINISHED")
    assert [file.path for file in MlflowClient(sqlite).list_artifacts(sender.run_id)] == ["metrics.jsonl"]


@pytest.mark.slow
def test_a_server_that_never_answers_costs_one_timeout_a_checkpoint(tmp_path, sqlite, caplog, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        sender = tracker(log, f"http://someone:secret@127.0.0.1:{silent.getsockname()[1]}")
        sender.catch_up()
        assert attempts(silent) == 1
        for step in range(200):
            fill(log, [step])
            sender.send()
        assert attempts(silent) == 0
        before = time.monotonic()
        sender.catch_up()
        sender.close("FINISHED")
        assert attempts(silent) == 2
        assert time.monotonic() - before > 3.5  # seconds, two timeouts
    assert "200 steps of" in warnings(caplog)[1]
    assert "resume this run" in warnings(caplog)[1]
    assert "secret" not in caplog.text
    later = tracker(log, sqlite)
    later.close("FINISHED")
    assert history(sqlite, later.run_id) == once_each(range(200))


def test_a_database_that_cannot_be_opened_costs_no_retries(tmp_path, caplog):
    (tmp_path / "mlflow.db").mkdir()
    sender = tracker(MetricsLog(tmp_path / "metrics.jsonl"), f"sqlite:///{tmp_path}/mlflow.db")
    before = time.monotonic()
    sender.catch_up()
    assert time.monotonic() - before < 30  # seconds; MLflow itself would try for 101
    assert "unable to open database file" in warnings(caplog)[-1]
