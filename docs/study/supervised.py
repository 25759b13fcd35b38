#!/usr/bin/env python
"""The control `supervised_k8` of plan_controls.md: questions asked again by their latest accuracy, and before each
evaluation a supervised epoch over all successes that were sampled so far.

    python docs/study/supervised.py                              # the eight tuning runs, to runs/controls_supervised/
    python docs/study/supervised.py --rates 2e-4 --seeds 10-17 [--twice]         # to runs/controls_supervised_twice/
    python docs/study/controls.py --add runs/controls_supervised

Finished runs are skipped. The folder of a stopped one has to be removed, and it begins again. Exit status: 0, or 2 for
a folder that cannot be used.
"""

from __future__ import annotations

import argparse
import os
import sys
from types import SimpleNamespace

from exgrpo_orlhf import config
from exgrpo_orlhf.checkpoints import RunFolderError
from exgrpo_orlhf.engines.engine import MakeEngine, RunSpec
from exgrpo_orlhf.engines.rows import ForwardRow
from exgrpo_orlhf.experiment import Experiment, Outcome
from exgrpo_orlhf.io.paths import WORKPLACE
from exgrpo_orlhf.io.stopping import Stop
from exgrpo_orlhf.records import MixedBatch, Row
from exgrpo_orlhf.training.preparation import prepare
from exgrpo_orlhf.training.run import train
from exgrpo_orlhf.training.supervised_training import SupervisedTraining

ARM = "supervised_k8"
FOLDER = WORKPLACE / "runs" / "controls_supervised"
FILES = ["docs/study/suites/controls.gin", "baselines/on_policy.gin"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="5e-5,1e-4,2e-4,4e-4", help="of both trainings")
    parser.add_argument("--seeds", default="100,101", help="100,101 or 10-17")
    parser.add_argument("--twice", action="store_true", help="twice the steps")
    arguments = parser.parse_args()
    folder = FOLDER.with_name(FOLDER.name + "_twice" * arguments.twice)
    first, _, last = arguments.seeds.partition("-")
    seeds = range(int(first), int(last) + 1) if last else map(int, first.split(","))
    for seed in seeds:
        for rate in arguments.rates.split(","):
            bindings = ["FreshSampler.by = 'accuracy'", f"Optimizer.learning_rate = {rate}", "Tracking.enabled = False"]
            experiment = config.load(FILES, bindings, seed)
            if arguments.twice:
                bindings += [f"train.steps = {2 * experiment.settings.steps}"]
                experiment = config.load(FILES, bindings, seed)
            run = folder / f"{ARM}-learning_rate={rate}" / f"seed{seed}"
            if (run / f"checkpoint-{experiment.settings.steps}").exists():
                continue
            print(f"{run.parent.name} seed {seed}", file=sys.stderr)
            try:
                outcome = train(experiment, run, resume=False, tracking_uri="", tags={}, loop=supervised)
            except RunFolderError as error:
                print(f"error: {error}; remove it to begin again", file=sys.stderr)
                return 2
            if outcome.stopped_by is not None:
                return 128 + outcome.stopped_by
    return 0


def supervised(spec: RunSpec, make_engine: MakeEngine, stop: Stop) -> Outcome:
    """The loop of training, but for the supervised epochs."""
    run = prepare(spec, make_engine)
    update, step = run.engine.update, run.step
    successes: dict[tuple[str, bytes], Row] = {}

    def remember(batch: MixedBatch, *rest: object) -> object:
        for row in batch.flat_rows():
            if row.response.grade.correct:
                successes[row.question.id, row.token_ids.tobytes()] = row
        return update(batch, *rest)

    def step_and_epoch() -> dict[str, float]:
        metrics = step()
        if run.steps % spec.experiment.settings.eval_every == 0 and successes:
            metrics |= epoch(spec.experiment, run.engine, [*successes.values()], run.steps)
        return metrics

    run.engine.update, run.step = remember, step_and_epoch
    return run.run(stop)


def epoch(experiment: Experiment, engine: object, rows: list[Row], seed: int) -> dict[str, float]:
    """One pass over the rows in batches of 32, at the run's rate, which falls to 0; Adam's moments begin at 0.
    L = −Σ log π(token) / tokens of the batch."""
    settings = SimpleNamespace(
        **{"epochs": 1, "batch_size": 32, "seed": seed, "machine": experiment.local},
        **{"learning_rate": experiment.optimizer.learning_rate, "warmup": 0.0, "schedule": "linear"},
        **{"weight_decay": 0.0, "max_grad_norm": 1.0},
    )
    training = SupervisedTraining(engine.model, [ForwardRow.of(row.prompt, row.response) for row in rows], settings)
    losses = [metrics["supervised/loss"] for _, metrics in training.run()]
    engine.model.zero_grad(set_to_none=True)
    return {"supervised/rows": float(len(rows)), "supervised/loss": losses[-1]}


if __name__ == "__main__":
    os.chdir(WORKPLACE)
    sys.exit(main())
