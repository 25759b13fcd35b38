"""scripts/ablate.py: every run once, whatever happens on the way, and nothing starts that cannot be right."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from run_builders import ROOT, rows, rows_so_far, set_words, small_bindings, wait_until
from study_builders import ablate, script
from tracking_builders import tracked_runs

from exgrpo_orlhf import checkpoints, config
from exgrpo_orlhf.checkpoints import claim
from exgrpo_orlhf.study import runner as study_runner
from exgrpo_orlhf.study.runner import Runner
from exgrpo_orlhf.study.runs import plan
from exgrpo_orlhf.study.suite import Variant

STEPS = 32  # so many that both runs are on their way when the slower one has begun
SMOKE = ["--suite", "testbed/smoke.gin", "--jobs", "2"]
RUNS = [f"{name}/seed{seed}" for name in ("on_policy", "paper") for seed in (0, 1)]


def bindings(model: Path, *more: str) -> list[str]:
    every = (f"train.steps = {STEPS}", "train.eval_every = 8", "train.save_every = 4")
    return small_bindings(model, *every, "Tracking.enabled = True", *more)


def words(model: Path, out: Path) -> list[str]:
    return ["--out", str(out), *set_words(bindings(model))]


def newest(run: Path) -> int:
    return max(checkpoints.find(run), default=0)


# -- a study that is interrupted, started again, killed, started again ------------------------------------------------


@dataclass
class Disturbed:
    """status: of the interrupted one; rows, saved: steps of the runs that it had begun, in metrics and checkpoints;
    killed: steps saved by them when the second one was killed; children: how many it had; again: the last one's status
    """

    out: Path
    store: str
    status: int
    rows: list[int]
    saved: list[int]
    begun: set[str]
    killed: list[int]
    children: int
    again: int


@pytest.fixture(scope="module")
def study(warm_model, tmp_path_factory) -> Disturbed:
    folder = tmp_path_factory.mktemp("study")
    out, store = folder / "out", f"sqlite:///{folder / 'mlflow.db'}"
    command = [*SMOKE, *words(warm_model, out)]
    first = [out / "on_policy" / "seed0", out / "paper" / "seed0"]

    process = start(store, command)
    wait_until(lambda: all(len(rows_so_far(run)) > 2 for run in first), process=process)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
    status = process.wait()
    reached, saved = [len(rows_so_far(run)) - 1 for run in first], [newest(run) for run in first]
    begun = {name for name in RUNS if (out / name / "run.log").exists()}

    process = start(store, command)
    wait_until(
        lambda: all(len(rows_so_far(run)) - 1 > n for run, n in zip(first, reached, strict=True)), process=process
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    wait_until(lambda: not any(is_training(pid) for pid in children))
    killed = [newest(run) for run in first]

    return Disturbed(out, store, status, reached, saved, begun, killed, len(children), ablate(store, *command))


def start(store: str, arguments: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, ROOT / "scripts" / "ablate.py", *arguments],
        env={**os.environ, "MLFLOW_TRACKING_URI": store},
        process_group=0,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def is_training(pid: str) -> bool:
    try:
        return b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()  # empty for a zombie
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_ctrl_c_lets_the_running_ones_finish_their_step_and_save_and_starts_no_other(study):
    assert study.status == 128 + signal.SIGINT
    assert study.saved == study.rows
    assert max(study.saved) < STEPS, "the signal came too late to show anything"
    assert study.begun == {"on_policy/seed0", "paper/seed0"}


@pytest.mark.slow
def test_no_run_outlives_a_killed_study(study):
    """The fixture waits for that."""
    assert study.children == 2
    assert min(study.killed) < STEPS, "the kill came too late to show anything"


@pytest.mark.slow
def test_started_again_it_has_every_step_of_every_run_once_in_mlflow_with_the_tags_of_its_group(study):
    """tests/training/test_resume.py compares a resumed run with a straight one."""
    assert study.again == 0
    tracked = tracked_runs(study.store)
    assert Counter(f"{r.data.tags['variant']}/seed{r.data.tags['seed']}" for r in tracked) == Counter(RUNS)
    for run in tracked:
        assert run.info.status == "FINISHED"
        assert run.info.run_name == f"{run.data.tags['variant']}/seed{run.data.tags['seed']}"
        assert run.data.tags["group"] == "smoke"
        assert {"gin", "config_hash", "git_commit", "engine"} <= set(run.data.tags)
        assert run.data.params["ReplayMixer.rho"] == {"on_policy": "0.0", "paper": "0.5"}[run.data.tags["variant"]]
        measured = rows(study.out / run.info.run_name)[1:]
        for name in ("reward/mean", "policy/loss"):
            history = MlflowClient(study.store).get_metric_history(run.info.run_id, name)
            in_order = sorted((metric.step, metric.value) for metric in history)
            assert in_order == [(row["step"], row[name]) for row in measured]
        assert [row["step"] for row in measured] == list(range(1, STEPS + 1))
        assert newest(study.out / run.info.run_name) == STEPS
        sent = {file.path for file in MlflowClient(study.store).list_artifacts(run.info.run_id)}
        assert sent == {"config.gin", "curves.png", "explore.html", "metrics.jsonl", "responses.json", "rollouts.jsonl"}


@pytest.mark.slow
def test_started_again_when_all_is_done_it_starts_nothing_and_shows_the_table(study, warm_model, capsys):
    before = {path: path.stat().st_mtime_ns for path in study.out.rglob("*") if path.parent != study.out}
    assert ablate(study.store, *SMOKE, *words(warm_model, study.out)) == 0
    shown = capsys.readouterr()
    assert "4 runs, 4 finished, 0 failed, 0 to run" in shown.err
    assert {path: path.stat().st_mtime_ns for path in study.out.rglob("*") if path.parent != study.out} == before
    assert len(tracked_runs(study.store)) == 4
    scores = [rows(study.out / name)[-1]["eval/greedy_accuracy"] for name in RUNS]
    for variant, (first, second) in (("on_policy", scores[:2]), ("paper", scores[2:])):
        cells = ["2", "of", "2", f"{first:.3f}", f"{second:.3f}", f"{(first + second) / 2:.3f}"]
        assert [variant, *cells] in [line.split() for line in shown.out.split("\n")]
    assert (
        f"compare.py --experiment exgrpo --group smoke --uri {study.store} --baseline on_policy "
        "--metric eval/greedy_accuracy" in shown.out
    )


@pytest.mark.slow
def test_a_dry_run_says_what_is_done_and_the_commands_and_hours_of_the_rest(study, warm_model, capsys):
    before = {path: path.stat().st_mtime_ns for path in study.out.rglob("*")}
    arguments = [*SMOKE, *words(warm_model, study.out), "--seeds", "0-2", "--dry-run", "--threads", "1"]
    assert ablate("http://127.0.0.1:9", *arguments) == 0, "without a word to MLflow"
    shown = capsys.readouterr()
    assert re.search(r"4 finished, 0 failed, 2 to run, 2 at a time, [\d.]+ \w+ at the pace so far", shown.err)
    commands = [shlex.split(line) for line in shown.out.split("\n") if "train.py" in line]
    assert [command[command.index("--out") + 1] for command in commands] == [
        str(study.out / variant / "seed2") for variant in ("on_policy", "paper")
    ]
    assert all("LocalEngine.threads = 1" in command for command in commands)
    assert {path: path.stat().st_mtime_ns for path in study.out.rglob("*")} == before


def test_a_dry_run_before_a_first_run_names_the_command_that_estimates_the_time(warm_model, tmp_path, capsys):
    arguments = [*SMOKE, *words(warm_model, tmp_path / "none"), "--seeds", "0", "--dry-run", "--threads", "1"]
    assert ablate("http://127.0.0.1:9", *arguments) == 0
    shown = capsys.readouterr()
    (line,) = (line for line in shown.err.split("\n") if "the time is not known" in line)
    trial = shlex.split(line.partition("this estimates a run's: ")[2])
    (first, *_) = (shlex.split(command) for command in shown.out.split("\n") if "train.py" in command)
    assert trial == [*first, "--smoke"]


@pytest.mark.slow
def test_a_folder_with_another_configuration_is_refused_and_the_difference_named(study, warm_model, capsys):
    with claim(study.out, resume=True):
        assert ablate(study.store, *SMOKE, *words(warm_model, study.out)) == 2
    assert "another process" in capsys.readouterr().err
    arguments = [*SMOKE, *words(warm_model, study.out), "--set", "MixedPolicyLoss.beta = 0.2", "--seeds", "1-2"]
    assert ablate(study.store, *arguments) == 2
    assert "MixedPolicyLoss.beta: 0.1 in the checkpoint, 0.2 now" in capsys.readouterr().err
    assert not (study.out / "paper" / "seed2").exists()


# -- failures and outages ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_failed_run_and_an_outage_stop_nothing_and_are_made_good_on_request(
    study, warm_model, tmp_path, capsys, caplog, monkeypatch
):
    """Of two variants one asks for experience that is not there yet; at first, MLflow is not there either."""
    store, experience = f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "experience"
    borrows, out = tmp_path / "borrows.gin", tmp_path / "out"
    borrows.write_text(f"include 'base.gin'\nWork.experience = {str(experience)!r}\n")
    command = ["--gin", str(borrows), "base.gin", "--group", "g", "--jobs", "2", *words(warm_model, out)]

    monkeypatch.setattr(study_runner, "LOOK_AT_STEPS_EVERY", 0.1)
    with caplog.at_level(logging.INFO):
        assert ablate("http://127.0.0.1:9", *command) == 1
    shown = capsys.readouterr()
    progress = r"g: 0 of 2 done, 1 running \(base/seed0 \d+/32\), 1 failed, 0 waiting; [\d.]+ \w+ left, until \w+ \d+:"
    assert re.search(progress, caplog.text)
    assert newest(out / "base" / "seed0") == STEPS
    assert "borrows/seed0 failed (exit status 2)" in shown.err
    assert "is neither a checkpoint of a run" in shown.err, "the end of its log"
    assert ["borrows", "0", "of", "1", "failed", "–"] in [line.split() for line in shown.out.split("\n")]

    tried = (out / "borrows" / "seed0" / "run.log").read_bytes()
    measured = (out / "base" / "seed0" / "metrics.jsonl").read_bytes()
    assert ablate(store, *command) == 1
    shown = capsys.readouterr()
    assert "base/seed0 is trained, but MLflow may lack some of it: it is sent again" in shown.err
    assert (out / "base" / "seed0" / "metrics.jsonl").read_bytes() == measured
    assert "borrows/seed0 failed (exit status 2)" in shown.err
    assert (out / "borrows" / "seed0" / "run.log").read_bytes() == tried, "not without --retry"
    [run] = tracked_runs(store)
    assert (run.info.status, run.data.metrics["train/step"]) == ("FINISHED", STEPS)
    client, killed = MlflowClient(store), run.info.run_id
    client.update_run(killed, status="RUNNING")  # as kill -9 leaves a run: the failed one has its mark from here on
    identity, *_ = (out / "base" / "seed0" / "metrics.id").read_text().splitlines()
    (out / "borrows" / "seed0" / "metrics.id").write_text(f"{identity}\n{(out / 'borrows' / 'seed0').resolve()}\n")
    assert ablate(store, *command) == 1
    assert client.get_run(killed).info.status == "KILLED"
    assert "0 finished" not in capsys.readouterr().err, "all that this server has is not sent again"
    client.update_run(killed, status="FINISHED")
    (out / "borrows" / "seed0" / "metrics.id").unlink()

    shutil.copytree(study.out / "paper" / "seed0" / f"checkpoint-{STEPS}" / "replay", experience)
    assert ablate(store, *command, "--retry") == 0
    assert newest(out / "borrows" / "seed0") == STEPS
    assert [run.info.status for run in tracked_runs(store)] == ["FINISHED"] * 2


@pytest.mark.slow
def test_the_runs_of_a_grid_are_in_mlflow_by_names_that_it_takes(warm_model, sqlite, tmp_path):
    """The name of a grid's variant has a '=', which MLflow takes in the values of tags, and not in their names."""
    grid = ["--gin", "toy.gin", "--grid", "MixedPolicyLoss.beta=0.2,0.3", "--group", "betas", "--jobs", "2"]
    one_step = ["--set", "train.steps = 1"]
    assert ablate(sqlite, *grid, *words(warm_model, tmp_path / "out"), *one_step) == 0
    variants = ["toy-beta=0.2", "toy-beta=0.3"]
    assert sorted(run.data.tags["variant"] for run in tracked_runs(sqlite)) == variants
    assert all(run.info.status == "FINISHED" for run in tracked_runs(sqlite))
    assert script("compare", "--uri", sqlite, "--group", "betas", "--metric", "reward/mean") == 0


def runner(model: Path, out: Path, script: str, variants: int) -> Runner:
    """Of runs of one step whose process is another script than train.py; it gets the same words."""
    file = out.parent / "script.py"
    file.write_text(script)
    variants_ = [
        Variant(f"v{i}", ("toy.gin",), (*bindings(model), f"MixedPolicyLoss.beta = 0.{i + 1}")) for i in range(variants)
    ]
    return Runner("g", plan(variants_, [0], out, config.load), {}, script=file, jobs=1, threads=None)


DEAF = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
signal.signal(signal.SIGINT, lambda *_: (folder / "asked").touch())
(folder / "ready").touch()
while True:
    time.sleep(1)
"""


def test_a_second_ctrl_c_kills_what_does_not_end(warm_model, tmp_path):
    study = runner(warm_model, tmp_path / "out", DEAF, variants=2)
    folder = tmp_path / "out" / "v0" / "seed0"

    def press_twice() -> None:
        for sign in ("ready", "asked"):
            wait_until((folder / sign).exists)
            os.kill(os.getpid(), signal.SIGINT)

    presses = threading.Thread(target=press_twice)
    presses.start()
    study.run()
    presses.join()
    assert study.stopped_by == signal.SIGINT
    assert [process.poll() for process in study.running.values()] == [-signal.SIGKILL]
    assert study.failed == {}
    assert not (folder / "failed.json").exists()
    assert [run.name for run in study.waiting] == ["v1/seed0"]


def test_a_run_in_whose_folder_another_process_trains_waits_for_it(warm_model, tmp_path):
    study = runner(warm_model, tmp_path / "out", "", variants=2)
    with contextlib.ExitStack() as held:
        held.enter_context(claim(tmp_path / "out" / "v0" / "seed0", resume=True))

        def let_go() -> None:
            wait_until(lambda: study.finished)
            held.close()

        other = threading.Thread(target=let_go)
        other.start()
        study.run()
        other.join()
    assert [run.name for run in study.finished] == ["v1/seed0", "v0/seed0"]


FAULTS = """
import pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
match folder.parent.name:
    case "v0":
        (folder / "failed.json").mkdir()
        sys.exit(3)
    case "v1":
        (folder / "metrics.jsonl").write_text("no metrics\\n")
"""


def test_a_run_whose_folder_cannot_be_written_or_read_has_failed_and_the_others_go_on(warm_model, tmp_path, caplog):
    study = runner(warm_model, tmp_path / "out", FAULTS, variants=4)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "v2").touch()
    study.run()
    assert {run.name: status for run, status in study.failed.items()} == {"v0/seed0": 3, "v1/seed0": 1, "v2/seed0": 1}
    assert [run.name for run in study.finished] == ["v3/seed0"]
    assert study.waiting == []
    assert [run.failure() for run in study.failed] == [None, 1, None]
    assert [run.log_tail() for run in study.failed] == ["", "", "(no log)"]
    assert "v0/seed0: its failure cannot be noted (" in caplog.text
    assert "metrics.jsonl, line 1: not a row of metrics" in caplog.text


SAVING = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])

def save(*_):
    time.sleep(0.5)
    (folder / "saved").touch()
    sys.exit()

signal.signal(signal.SIGINT, save)
(folder / "ready").touch()
time.sleep(600)
"""


def test_an_error_of_the_study_itself_lets_the_running_ones_save(warm_model, tmp_path, monkeypatch):
    study, folder = runner(warm_model, tmp_path / "out", SAVING, variants=1), tmp_path / "out" / "v0" / "seed0"

    def fails(self: Runner) -> None:
        if (folder / "ready").exists():
            raise RuntimeError("of the study itself")

    monkeypatch.setattr(study_runner, "LOOK_AT_STEPS_EVERY", 0.0)
    monkeypatch.setattr(Runner, "_log_news", fails)
    with pytest.raises(RuntimeError, match="of the study itself"):
        study.run()
    assert (folder / "saved").exists()
    assert [process.poll() for process in study.running.values()] == [0]
