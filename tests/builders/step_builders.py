"""A run whose steps a test makes itself, and sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from run_builders import small_bindings

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.engine import RunSpec, UpdateStats
from exgrpo_orlhf.engines.local import LocalParts, TorchEngine
from exgrpo_orlhf.grader.grade import Grade
from exgrpo_orlhf.records import MixedBatch, Question
from exgrpo_orlhf.rewards import verifier
from exgrpo_orlhf.rewards.kinds import kind_named
from exgrpo_orlhf.training.loop import TrainingRun
from exgrpo_orlhf.training.preparation import prepare, prepare_and_run


def begin(model: Path, run: Path, *more: str) -> TrainingRun:
    experiment = config.load(["toy.gin"], small_bindings(model, *more))
    engine = TorchEngine(LocalParts.of(experiment), model_path=model, seed=experiment.settings.seed)
    return prepare(RunSpec(experiment, run, "unused", {}, prepare_and_run), lambda checkpoint: engine)


def watched(run: TrainingRun, monkeypatch) -> list[tuple[MixedBatch, UpdateStats]]:
    """What the run's steps train on and measure, as they do."""
    seen, update = [], run.engine.update

    def watching(batch, loss):
        seen.append((batch, update(batch, loss)))
        return seen[-1][1]

    monkeypatch.setattr(run.engine, "update", watching)
    return seen


def decide_verdicts(monkeypatch, correct: Callable[[Question, str], bool]) -> None:
    """Chains are graded by this. correct: (question, response) → whether it is"""
    grade = lambda *answer: Grade("correct", 1.0) if correct(*answer) else Grade("wrong", 0.0)
    chains = replace(kind_named("modular_chain"), here=grade)
    monkeypatch.setattr(verifier, "kind_named", lambda name: chains if name == "modular_chain" else kind_named(name))
