"""The training loop: steps, evaluations, logs and checkpoints, whichever engine does the work. A step is in step.py."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from .. import checkpoints
from ..engines.engine import Clock
from ..experiment import Outcome
from ..io.files import Files
from ..io.paths import run_name
from ..io.progress import Progress
from ..io.stopping import Stop
from ..replay import snapshot
from ..tracking.listener import Listener
from ..tracking.metrics_log import MetricsLog
from ..tracking.tracker import MlflowTracker
from . import ahead
from .health import Health
from .step import Trainer
from .validation import Validation

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class TrainingRun(Trainer):
    """A run that is ready to make steps; `preparation.prepare` makes it.

    fingerprint: of the prompts; prompt: what a checkpoint records of them
    content: hash of the questions with all their columns
    saved_step: of the newest checkpoint
    best: value of train.best_metric, in step best_step
    """

    validation: Validation
    metrics: MetricsLog
    tracker: MlflowTracker
    listeners: Sequence[Listener]
    fingerprint: str
    content: str
    prompt: Mapping[str, Any]
    saved_step: int | None = None
    best: float | None = None
    best_step: int | None = None

    def run(self, stop: Stop) -> Outcome:
        """Make all steps that are left, until `stop`; evaluate, log and save on the way.

        Raises NonFiniteUpdate, CheckpointError, ValueError, and what the engine and the verifier raise.
        """
        status: Literal["FINISHED", "KILLED", "FAILED"] = "FAILED"
        try:
            settings, mixer = self.experiment.settings, self.experiment.mixer
            self.tracker.catch_up()
            if self.metrics.last_step < 0 and self.steps == 0:  # the policy as it came, before the first update
                metrics = self._evaluate()
                self._best_metric(metrics)  # a vote is not measured where no answers can be compared
                self.metrics.append(0, {**metrics, "cost/generated_tokens": 0})
                self.tracker.send()
            rows = list(self.metrics.rows())
            health = Health(rows, settings.steps, mixer.share.start_at_accuracy if mixer.replays else None)
            evaluation = max((row.get("time/evaluation", 0.0) for row in rows), default=0.0)
            progress = Progress(run_name(self.folder), self.steps, settings.steps, settings.eval_every, evaluation)
            while self.steps < settings.steps and not stop.signal:
                metrics = self.step()
                every, is_last = settings.eval_every, self.steps == settings.steps
                if every and (is_last or self.steps % every == 0):
                    metrics |= self._evaluate()
                self.metrics.append(self.steps, metrics)
                self.tracker.send()
                progress.show(self.steps, metrics)
                health.look(self.steps, metrics, float(mixer.share.at(self.steps)))
                value = self._best_metric(metrics)
                # The rates are of responses that went wrong (validation.metric_names), and tokens are a cost.
                sign = -1 if str(settings.best_metric).endswith(("_rate", "/response_tokens")) else 1
                is_best = value is not None and (self.best is None or sign * value > sign * self.best)
                if is_best:
                    self.best, self.best_step = value, self.steps
                if is_best or self.steps % settings.save_every == 0:
                    self.save()
                if is_best:
                    checkpoints.mark_best(self.folder, self.steps)
            if self.saved_step != self.steps:
                self.save()
            status = "KILLED" if stop.signal and self.steps < settings.steps else "FINISHED"
            for listener in self.listeners:
                listener.ended(self.buffer, self.steps)
            for path in filter(Path.exists, (self.metrics.path, self.decisions.rollouts.path)):
                self.tracker.artifact(path)
        finally:
            self.tracker.close(status)
        return Outcome(self.steps, settings.steps, stop.signal if self.steps < settings.steps else None)

    def _evaluate(self) -> dict[str, float]:
        if not self.validation.questions or self.experiment.settings.eval_every is None:
            return {}
        clock = Clock()
        metrics = self.validation.evaluate((self.steps, self.experiment.settings.steps), self.engine)
        clock.lap("evaluation")
        return {**metrics, "time/evaluation": clock.laps["evaluation"]}

    def _best_metric(self, metrics: Mapping[str, float]) -> float | None:
        """train.best_metric, where there was an evaluation. Raises ValueError if that did not measure it."""
        name = self.experiment.settings.best_metric
        measured = sorted(metric for metric in metrics if metric.startswith("eval/"))
        if name is None or not measured:
            return None
        if name not in metrics:
            raise ValueError(f"train.best_metric = {name!r} was not measured; measured were {', '.join(measured)}")
        return metrics[name]

    def save(self) -> None:
        """Make checkpoint-<steps>. Raises CheckpointError."""
        state = {
            "step": self.steps,
            "identity": dict(self.experiment.identity),
            "own_code": self.experiment.own_code,
            "base": self.experiment.base,
            "mixer": self.experiment.mixer.state_dict(),
            "fresh": self.fresh.state_dict(),
            "validation": self.validation.fingerprint,
            "content": self.content,
            "generated_tokens": self.generated_tokens,
            "best": self.best,
            "best_step": self.best_step,
            "best_of": self.experiment.settings.best_metric,
            "mlflow_run_id": self.tracker.run_id,
            "torch": torch.__version__,
            **({"prompt": self.prompt} if self.prompt else {}),
        }
        self.decisions.sync()
        self.metrics.sync()  # rows of steps that a checkpoint has passed would never be written again

        def fill(folder: Path) -> Files:
            written = self.engine.save(folder)
            tables = snapshot.save(self.buffer, folder / "replay", self.fingerprint)
            if self.batch_ahead:
                ahead.save(self.batch_ahead, folder / ahead.FOLDER)
            checkpoints.write_state(folder, state)
            return {**written, **{f"replay/{name}": entry for name, entry in tables.items()}}

        keep = self.experiment.settings.keep
        checkpoints.save(self.folder, self.steps, self.metrics.identity, fill, keep, self.best_step)
        self.saved_step = self.steps
        for listener in self.listeners:
            listener.saved(self.buffer, self.steps)
        if self.tracker.enabled:
            self.tracker.artifact(self.decisions.write_table())
        self.tracker.catch_up()
