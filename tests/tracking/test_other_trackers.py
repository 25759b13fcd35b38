"""Tracking.also: what TensorBoard's and W&B's own readers find of a run, after a kill, an error and a resume too."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import struct
import subprocess
from pathlib import Path

import pytest
from run_builders import environment, rows, small_bindings, train_command, train_small, wait_until
from tracking_builders import tracker

from exgrpo_orlhf.settings import Tracking
from exgrpo_orlhf.tracking import others
from exgrpo_orlhf.tracking.metrics_log import MetricsLog

Steps = dict[str, dict[int, float]]  # of each metric its value after each step
needs_tensorboard = pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="no tensorboard here")


def logged(run: Path) -> Steps:
    metrics: Steps = {}
    for row in rows(run):
        for name in row.keys() - {"step", "time"}:
            metrics.setdefault(name, {})[row["step"]] = row[name]
    return metrics


def in_tensorboard(run: Path) -> Steps:
    """Raises AssertionError for a step that is there twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    metrics = {name: reader.Scalars(name) for name in reader.Tags()["scalars"]}
    assert all(len({event.step for event in events}) == len(events) for events in metrics.values())
    return {name: {event.step: event.value for event in events} for name, events in metrics.items()}


def in_wandb(run: Path) -> tuple[Steps, set[str]]:
    """What its offline sessions hold, and the run's ids. Raises AssertionError for a step that is twice in one.

    A session that is killed has in its file what W&B had written: every 15 s, its steps so far, which the next session
    sends again. Of a step that is in two of them the first counts, as for W&B's server.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    metrics: Steps = {}
    ids = set()
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime):
        data, at, whole = file.read_bytes(), 7, b""  # LevelDB's log format, behind a head of 7 bytes
        session: Steps = {}
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:  # of a block, too few for a record
                at += left
                continue
            length, kind = struct.unpack_from("<HB", data, at + 4)
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # complete, or its last part
                record, whole = Record.FromString(whole), b""
                ids |= {record.run.run_id} - {""}
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                step = int(items.pop("_step", -1)) if items else -1
                for name, value in items.items():
                    if not name.startswith("_"):
                        assert step not in session.setdefault(name, {}), (name, step)
                        session[name][step] = json.loads(value)
        for name, steps in session.items():
            metrics[name] = {**steps, **metrics.get(name, {})}
    return metrics, ids


def same(found: Steps, expected: Steps) -> bool:
    assert {name: {*steps} for name, steps in found.items()} == {name: {*steps} for name, steps in expected.items()}
    return all(found[name] == pytest.approx(steps, rel=1e-6) for name, steps in expected.items())  # float32 there


@needs_tensorboard
def test_a_damaged_note_of_what_was_sent_is_named_and_nothing_is_sent_twice(tmp_path, caplog):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(0, {"reward/mean": 0.5})
    for damage in ("", "[]", '{"log": "x"', '{"steps": {}}'):
        (tmp_path / others.SENT).write_text(damage)
        caplog.clear()
        others.OtherTrackers(log, Tracking(also=("tensorboard",)), "run", {}).send()
        assert "trackers.json is damaged; without it all steps are sent again" in caplog.text
        assert not (tmp_path / "tensorboard").exists()
    (tmp_path / others.SENT).unlink()
    others.OtherTrackers(log, Tracking(also=("tensorboard",)), "run", {}).send()
    assert in_tensorboard(tmp_path) == {"reward/mean": {0: 0.5}}


@needs_tensorboard
def test_steps_that_a_resumed_run_makes_again_replace_those_that_tensorboard_had(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(6):
        log.append(step, {"reward/mean": step / 10})
    others.OtherTrackers(log, Tracking(also=("tensorboard",)), "run", {}).close()
    log.cut_back(3)
    sender = others.OtherTrackers(log, Tracking(also=("tensorboard",)), "run", {})
    for step in range(4, 7):
        log.append(step, {"reward/mean": 10.0 + step})
    sender.close()
    assert in_tensorboard(tmp_path)["reward/mean"] == pytest.approx({0: 0, 1: 0.1, 2: 0.2, 3: 0.3, 4: 14, 5: 15, 6: 16})


@needs_tensorboard
@pytest.mark.slow
def test_after_a_real_kill_every_step_is_once_in_tensorboard_and_in_wandb(raw_model, tmp_path):
    names = ["tensorboard", *(["wandb"] if importlib.util.find_spec("wandb") else [])]
    bindings = small_bindings(raw_model, "train.steps = 8", "train.save_every = 3", f"Tracking.also = {tuple(names)!r}")
    variables = environment(WANDB_MODE="offline")
    # Where a test before has used W&B in this process, its server would serve the runs too, and survive the kill: the
    # run's id would be in use.
    variables.pop("WANDB_SERVICE", None)
    run, words = tmp_path / "run", {"env": variables, "cwd": tmp_path}
    command, log = train_command(run, bindings), run / "metrics.jsonl"
    process = subprocess.Popen(command, start_new_session=True, **words)
    wait_until(lambda: log.is_file() and '"step":4' in log.read_text().replace(" ", ""))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # As if it had been killed a moment later: the next step is in TensorBoard, the log knows nothing of it.
    sender = others.OtherTrackers(MetricsLog(log), Tracking(also=("tensorboard",)), "run", {})
    sender.send()
    sender._trackers["tensorboard"].log({"reward/mean": 99.0}, step=max(logged(run)["reward/mean"]) + 1)
    resumed = subprocess.run([*command, "--resume"], check=True, capture_output=True, text=True, **words)
    assert "Training goes on" not in resumed.stderr
    # A step that was made again took another time; TensorBoard keeps the first.
    untimed = lambda steps: {name: values for name, values in steps.items() if not name.startswith("time/")}
    assert max(logged(run)["reward/mean"]) == 8
    assert same(untimed(in_tensorboard(run)), untimed(logged(run)))
    if "wandb" in names:
        metrics, ids = in_wandb(run)
        assert same(untimed(metrics), untimed(logged(run)))
        assert ids == {(run / "metrics.id").read_text().splitlines()[0]}, "one run, which its resume continues"


def test_an_error_is_said_once_stops_nothing_and_the_steps_come_at_the_next_checkpoint(tmp_path, monkeypatch, caplog):
    got: list[tuple[int, dict[str, float]]] = []
    broken = True

    class Tracker:
        def log(self, values: dict[str, float], step: int) -> None:
            if broken:
                raise OSError("no route to host")
            got.append((step, values))

        def finish(self) -> None:
            got.append((-1, {}))

    monkeypatch.setattr(others, "find_spec", lambda name: True)
    monkeypatch.setattr(others.OtherTrackers, "_start", lambda self, name: self._trackers.setdefault(name, Tracker()))
    log = MetricsLog(tmp_path / "metrics.jsonl")
    sender = tracker(log, "unused", Tracking(enabled=False, also=("trackio",)))
    for step in range(3):
        log.append(step, {"reward/mean": step / 2})
        sender.send()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "trackio: OSError: no route to host. Training goes on, the metrics are safe in" in caplog.text
    broken = False
    sender.send()
    assert not got, "not before a checkpoint"
    sender.catch_up()
    log.append(3, {"reward/mean": 1.5})
    sender.close("FINISHED")
    assert got == [*((step, {"reward/mean": step / 2}) for step in range(4)), (-1, {})]


def test_a_tracker_that_is_not_known_or_not_installed_is_refused_before_the_run(raw_model, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"Tracking.also takes 'wandb', .*; got \('wandbb',\)"):
        Tracking(also=("wandbb",))
    assert Tracking(also=tuple(others._arguments("", "", "", 0))), "each that has arguments can be bound"
    monkeypatch.setattr(others, "find_spec", lambda name: None if name == "swanlab" else object())
    with pytest.raises(ValueError, match=r"Tracking.also = \('swanlab',\): pip install swanlab"):
        train_small(raw_model, tmp_path / "run", "Tracking.also = ('swanlab',)")
    assert not [path.name for path in tmp_path.glob("run/[!.]*")], "a resumed run stays as it is, too"
