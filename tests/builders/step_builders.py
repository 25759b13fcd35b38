"""A run whose steps a test makes itself, and sees."""

from __future__ import annotations

from pathlib import Path

from run_builders import small_bindings

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.engine import UpdateStats
from exgrpo_orlhf.engines.local import TorchEngine
from exgrpo_orlhf.records import MixedBatch
from exgrpo_orlhf.training.loop import TrainingRun
from exgrpo_orlhf.training.preparation import prepare


def begin(model: Path, run: Path, *more: str) -> TrainingRun:
    x = config.load(["toy.gin"], small_bindings(model, *more))
    engine = TorchEngine(x.local, x.optimizer, x.sampling, x.prompts, model_path=model, seed=x.settings.seed)
    return prepare(x, lambda checkpoint: engine, run, "unused", {})


def watched(run: TrainingRun, monkeypatch) -> list[tuple[MixedBatch, UpdateStats]]:
    """What the run's steps train on and measure, as they do."""
    seen, update = [], run.engine.update

    def watching(batch, loss):
        seen.append((batch, update(batch, loss)))
        return seen[-1][1]

    monkeypatch.setattr(run.engine, "update", watching)
    return seen
