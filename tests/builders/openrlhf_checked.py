"""Trains like scripts/train.py with the CPU test layout, and records what the engine does. A program.

    python openrlhf_checked.py RUN RESUME(0/1) FILE.gin… BINDING…

A file RUN/.kill-an-engine has the first vLLM engine killed when the update of the fourth step begins. Besides the run's
own files it writes into RUN/seen/:

sync.jsonl       after each weight sync the names of the tensors in which a vLLM engine differs from the actor
update.jsonl     for each update how many rows were measured before it, whether stored rows kept their log-probs, and
                 the largest mean difference of a row's log-probs from vLLM's
killed.jsonl     whether the engine was generating ahead
loaded-<step>/   the state with which the training loop begins
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import ray

from exgrpo_orlhf import config
from exgrpo_orlhf.checkpoints import RunFolderError
from exgrpo_orlhf.engines.openrlhf import cpu
from exgrpo_orlhf.training import loop
from exgrpo_orlhf.training.run import train

os.environ.update(cpu.environment())
cpu.install()

from exgrpo_orlhf.engines.openrlhf import driver, openrlhf_engine, trainer, weight_sync  # noqa: E402
from exgrpo_orlhf.replay import snapshot  # noqa: E402
from exgrpo_orlhf.selftest import actors  # noqa: E402  (after install)


class CheckedActor(actors.DoctorActor):
    """Its weights go to vLLM in many buckets; a few parameters are larger than one."""

    def broadcast_to_vllm(self):
        weight_sync.BUCKET = 5000  # bytes
        super().broadcast_to_vllm()


class CheckedEngine(openrlhf_engine.OpenRLHFEngine):
    def __init__(self, args, *rest, **calls):
        super().__init__(args, *rest, **calls)
        self.run = args.exgrpo_spec.run
        self.killed, self.killing = threading.Event(), (self.run / ".kill-an-engine").exists()

    def rollout(self, plan, group_size):
        groups = super().rollout(plan, group_size)
        if plan.step == 5 and self.killing:  # it is under way until the engine is killed
            yield next(groups)
            self.killed.wait(600)
        yield from groups

    def record(self, what, line):
        with (self.run / "seen" / f"{what}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def measure(self, rows, method="measure"):
        if method == "measure":
            self.measured = len(rows)
        return super().measure(rows, method)

    def update(self, batch, loss):
        import numpy as np

        if self.step == 3 and (self.run / ".kill-an-engine").exists():
            (self.run / ".kill-an-engine").unlink()
            self.record("killed", any(thread.name == "generate-ahead" for thread in threading.enumerate()))
            os.kill(self.engine_process, signal.SIGKILL)
            self.killed.set()
        stats, flat = super().update(batch, loss), batch.flat_rows()
        stored = [
            row.trajectory is None or row.trajectory.behaviour_logprobs.tobytes() == logprobs.tobytes()
            for row, logprobs in zip(flat, stats.behaviour_logprobs, strict=True)
        ]
        gaps = [
            np.abs(logprobs - row.response.sampler_logprobs).mean()
            for logprobs, row in zip(stats.policy_logprobs, flat, strict=True)
            if row.trajectory is None and row.response.sampler_logprobs is not None
        ]
        seen = {"rows": len(flat), "measured": self.measured, "stored": all(stored), "gap": float(max(gaps, default=0))}
        self.record("update", seen)
        return stats

    def sync(self):
        super().sync()
        self.engine_process = ray.get(self.sampler.engines[0].__ray_call__.remote(lambda engine: os.getpid()))
        ours = ray.get([a.weights.remote() for a in self.actors._actor_handlers])[0]
        differ = []
        for i, engine in enumerate(self.sampler.engines):
            theirs = ray.get(engine.weights.remote())
            names, compared = actors.compare_weights(theirs, ours)
            assert compared == len(theirs)
            differ += [f"engine {i}: {name}" for name in names]
        self.record("sync", differ)


class CheckedTrainer(trainer.MixedTrainer):
    def __init__(self, *args, **generate_kwargs):
        trainer.OpenRLHFEngine = CheckedEngine
        super().__init__(*args, **generate_kwargs)

    def fit(self):
        import numpy as np

        run_steps, seen, hog = loop.TrainingRun.run, self.spec.run / "seen", []
        seen.mkdir(exist_ok=True)

        def looked_at(run, stop):
            folder = seen / f"loaded-{run.steps}"
            folder.mkdir()
            snapshot.save(run.buffer, folder / "replay", run.fingerprint)
            state = {"step": run.steps, "mixer": run.experiment.mixer.state_dict(), "fresh": run.fresh.state_dict()}
            (folder / "state.json").write_text(json.dumps(state))
            return run_steps(run, stop)

        loop.TrainingRun.run = looked_at
        if (seen.parent / ".fill-the-store").exists():
            step = loop.TrainingRun.step

            def full(run):
                if run.steps == 2:  # held by arrays: on a busy machine Ray evicts objects that it has not pinned yet
                    hog.extend(ray.get(ray.put(np.zeros(2**20, np.uint8))) for _ in range(1500))
                return step(run)

            loop.TrainingRun.step = full
        super().fit()


def main() -> int:
    run, resume, *words = sys.argv[1:]
    files, bindings = ([word for word in words if word.endswith(".gin") == named] for named in (True, False))
    driver.CLASSES = (CheckedActor, CheckedTrainer, actors.DoctorEngine)
    experiment = config.load(["toy.gin", *files, "engines/openrlhf_cpu.gin"], bindings)
    try:
        outcome = train(experiment, Path(run), resume=resume == "1", tracking_uri="unused", tags={})
    except (RunFolderError, RuntimeError, ValueError, OSError, ArithmeticError) as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0 if outcome.stopped_by is None else 128 + outcome.stopped_by


if __name__ == "__main__":
    import openrlhf_checked  # by its name: Ray would ship the classes of __main__ by value, bases and globals included

    sys.exit(openrlhf_checked.main())
