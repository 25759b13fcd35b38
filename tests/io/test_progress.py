"""What is said about the time that a run and a study still need."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from exgrpo_orlhf.io.paths import run_name
from exgrpo_orlhf.io.progress import Progress, evaluations_left
from exgrpo_orlhf.study.runs import RunProgress, seconds_left
from exgrpo_orlhf.tracking.metrics_log import MetricsLog

METRICS = {"reward/mean": 0.5, "replay/actual_share": 0.5, "replay/trajectories": 3, "replay/retired": 1}


@pytest.mark.parametrize(("folder", "name"), [("study/rho_25/seed0", "rho_25/seed0"), ("runs/seedling", "seedling")])
def test_a_run_has_its_variants_name_in_a_study_alone(folder, name):
    assert run_name(Path(folder)) == name


def test_evaluations_follow_in_every_so_many_steps_and_at_the_end():
    for steps in range(1, 30):
        for every in range(1, 12):
            evaluated = {step for step in range(1, steps + 1) if step % every == 0 or step == steps}
            for done in range(steps + 1):
                assert evaluations_left(done, steps, every) == len([step for step in evaluated if step > done])
    assert evaluations_left(3, 30, None) == 0


def test_a_run_says_the_time_of_the_steps_and_evaluations_that_are_left(caplog, monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    progress = Progress("x", 40, 100, eval_every=20, evaluation=10.0)
    with caplog.at_level(logging.INFO):
        for step in (41, 42):
            now += 7.0
            progress.show(step, {**METRICS, "time/step": 6.0})
        now += 7.0 + 30.0
        progress.show(43, {**METRICS, "time/step": 6.0, "time/evaluation": 30.0})
    left = [line.rpartition("s/step  ")[2] for line in caplog.messages]
    seconds = [59 * 7 + 3 * 10, 58 * 7 + 3 * 10, 57 * 7 + 3 * 30]  # evaluations at 60, 80 and 100
    assert left == [f"{s // 60}:{s % 60:02d} left" for s in seconds]


@pytest.mark.parametrize(
    ("jobs", "measured", "left"),
    [
        (2, {"a/seed0": (10, 40.0), "b/seed0": (10, 20.0)}, 120.0),  # 120 and 60 s side by side
        (1, {"a/seed0": (10, 40.0), "b/seed0": (10, 20.0)}, 180.0),
        (1, {"a/seed0": (10, 40.0), "a/seed1": (20, 80.0), "b/seed0": (10, 20.0)}, 40.0 + 60.0),  # 20 of 30 are done
        (1, {"a/seed0": (10, 40.0)}, 240.0),  # b at the pace of all
        (1, {"a/seed0": (0, 3.0)}, None),
    ],
)
def test_the_time_left_is_at_the_pace_of_each_variant_and_as_long_as_the_longest_run(jobs, measured, left):
    waiting = [planned(variant, eval_every=None) for variant in "ab"]
    progress = {name: RunProgress(step, seconds / max(1, step)) for name, (step, seconds) in measured.items()}
    assert seconds_left(waiting, progress, jobs) == left


def test_the_time_left_includes_evaluations():
    waiting = [planned(variant, eval_every=20) for variant in "ab"]  # at steps 0, 20 and 30
    progress = {"a/seed0": RunProgress(step=30, pace=2.0, evaluation=5.0), "a/seed1": RunProgress(step=25, pace=2.0)}
    assert seconds_left(waiting[:1], progress, 1) == 5 * 2.0 + 5.0
    assert seconds_left(waiting, progress, 1) == 5 * 2.0 + 5.0 + 30 * 2.0 + 3 * 5.0


def planned(variant: str, eval_every: int | None) -> SimpleNamespace:
    settings = SimpleNamespace(eval_every=eval_every)
    experiment = SimpleNamespace(settings=settings)
    name = f"{variant}/seed1"
    return SimpleNamespace(name=name, variant=SimpleNamespace(name=variant), steps=30, experiment=experiment)


def test_a_step_during_which_the_machine_slept_does_not_count_as_the_pace(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step, seconds in enumerate([2.0, 2.0, 36000.0, 3.0]):
        log.append(step, {"time/step": seconds})
    assert RunProgress.of(SimpleNamespace(folder=tmp_path)).pace == 2.5
