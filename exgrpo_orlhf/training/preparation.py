"""What a training run needs before its first step: from the start, or from its newest checkpoint."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from .. import checkpoints
from ..checkpoints import manifest
from ..engines.engine import MakeEngine, RunSpec
from ..experiment import Experiment, Outcome
from ..io.files import write
from ..io.paths import run_name
from ..io.provenance import provenance
from ..io.stopping import Stop
from ..questions import content_hash
from ..records import Question
from ..replay import snapshot
from ..tracking.decisions import DecisionLog
from ..tracking.listener import ListenedRun, listeners
from ..tracking.metrics_log import MetricsLog
from ..tracking.tracker import MlflowTracker, RunDescription
from . import ahead, initial_buffer
from .load_questions import load_questions
from .loop import TrainingRun
from .supervised_start import CURVE, copy_curve
from .validation import Validation

log = logging.getLogger(__name__)


class _Start(NamedTuple):
    """From where a run goes on: step 0, or a checkpoint and its trainer state."""

    step: int
    checkpoint: Path | None
    state: Mapping[str, Any] | None


def prepare(spec: RunSpec, make_engine: MakeEngine) -> TrainingRun:
    """A run that is ready to make steps: engine and state are loaded, the logs are cut back to the checkpoint, and
    newer ones are set aside.

    Raises ValueError, CheckpointError, SnapshotError, and what `make_engine` raises: then checkpoints and logs are as
    they were.
    """
    experiment, folder = _copy(spec.experiment), spec.run
    training, validation = spec.questions or load_questions(experiment)
    content = content_hash([*training, *validation])
    fresh = experiment.fresh.over(training, experiment.fresh_rng)
    step, checkpoint, state = _start(experiment, folder, spec.checkpoint)
    engine = make_engine(checkpoint)
    fingerprint = engine.prompts.fingerprint()
    evaluator = _validation(experiment, validation, folder, fingerprint)
    prompt = engine.prompts.introduce(training, validation)

    buffer, batch_ahead, best, best_step = experiment.buffer, None, None, None
    if checkpoint and state:
        _check_questions(evaluator, content, checkpoint, state)
        engine.load(checkpoint)
        snapshot.load(checkpoint / "replay", buffer, fingerprint)
        experiment.mixer.load_state_dict(state["mixer"])
        fresh.load_state_dict(state["fresh"])
        if (saved := checkpoint / ahead.FOLDER).exists():
            batch_ahead = ahead.load(saved, fresh.question, step + 1, experiment.mixer.rollouts_per_replayed)
    elif experiment.experience:
        buffer = initial_buffer.load(experiment, training, engine.prompts)

    own, made_by = checkpoints.identify(folder), manifest.read(checkpoint).run if checkpoint else None
    identity = own or made_by if checkpoint else checkpoints.set_aside(folder, experiment.config_text)
    metrics, decisions = _logs(folder, identity, step, experiment.settings.show_every, resumed=checkpoint is not None)
    if state:
        best, best_step = _best(folder, state, experiment.settings.best_metric)
    copy_curve(Path(engine.model_path), folder, resumed=checkpoint is not None)
    write(folder / "config.gin", experiment.config_text)
    mlflow_run = state["mlflow_run_id"] if state and identity == made_by else None  # not of a copy
    questions = {"training": training, "validation": validation}
    tracker = _tracker(replace(spec, experiment=experiment), metrics, questions, mlflow_run, step)
    return TrainingRun(
        experiment=experiment,
        folder=folder,
        engine=engine,
        fresh=fresh,
        buffer=buffer,
        validation=evaluator,
        metrics=metrics,
        decisions=decisions,
        tracker=tracker,
        listeners=listeners(ListenedRun(folder, metrics, tracker, training, engine.decode)),
        fingerprint=fingerprint,
        content=content,
        prompt=prompt,
        steps=step,
        saved_step=step if checkpoint else None,
        generated_tokens=state["generated_tokens"] if state else 0,
        best=best,
        best_step=best_step,
        batch_ahead=batch_ahead,
    )


def prepare_and_run(spec: RunSpec, make_engine: MakeEngine, stop: Stop) -> Outcome:
    """`prepare` a run and make its steps: the `engines.engine.Loop` of training."""
    return prepare(spec, make_engine).run(stop)


def _validation(experiment: Experiment, questions: list[Question], folder: Path, fingerprint: str) -> Validation:
    prompts, settings = experiment.prompts, experiment.settings
    template = {"name": prompts.template, "system": prompts.system, "fingerprint": fingerprint}
    record = {"template": template, "engine": {"name": settings.engine, "reproducible": None}, **provenance()}
    tokens = experiment.sampling.max_response_tokens
    return Validation(questions, experiment.evaluation, experiment.verifier, folder, settings.seed, tokens, record)


def _copy(experiment: Experiment) -> Experiment:
    """With a mixer, a buffer and a generator of its own, which change with every step: it can be run more than once."""
    changing = ("mixer", "buffer", "fresh_rng")
    return replace(experiment, **{name: copy.deepcopy(getattr(experiment, name)) for name in changing})


def _start(experiment: Experiment, folder: Path, chosen: Path | None) -> _Start:
    """At the chosen checkpoint, or the newest, if there is one. Warns of files of the user's own that are not those of
    the checkpoint."""
    checkpoint = chosen or next(reversed(checkpoints.find(folder).values()), None)
    state = checkpoints.read_state(checkpoint, dict(experiment.identity), experiment.defaults) if checkpoint else None
    for binding, digest in experiment.own_code.items():
        if state and digest != state["own_code"].get(binding):
            log.warning("%s: this file is not that of %s, from which the run goes on", binding, checkpoint)
    return _Start(state["step"] if state else 0, checkpoint, state)


def _check_questions(evaluator: Validation, content: str, checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Warns of questions with other columns than the checkpoint's; those of an older version say nothing of theirs.
    Raises ValueError for other validation questions."""
    if (earlier := state["validation"]) != evaluator.fingerprint:
        raise ValueError(
            f"the checkpoint was made with another validation set (fingerprint {earlier}, now "
            f"{evaluator.fingerprint}): one metric would be of two sets; bring Work.validation's questions back, or "
            "begin a new run with its weights: --from CHECKPOINT"
        )
    if state.get("content", content) != content:
        log.warning(
            "the questions' further columns (QuestionFile.meta, extra_info) are not those of %s, from which the run "
            "goes on: what is graded by them is graded otherwise",
            checkpoint,
        )


def _best(folder: Path, state: Mapping[str, Any], metric: str | None) -> tuple[float | None, int | None]:
    """The best value of this metric and its step, whose checkpoint is there; the link in the folder says the same."""
    if state["best_of"] != metric:
        return None, None
    # The link too: a kill may have come before it, or its checkpoint may have been set aside.
    if state["best_step"] not in checkpoints.find(folder):
        checkpoints.unmark_best(folder)
        return None, None
    checkpoints.mark_best(folder, state["best_step"])
    return state["best"], state["best_step"]


def _logs(
    folder: Path, identity: str | None, step: int, show_every: int | None, resumed: bool
) -> tuple[MetricsLog, DecisionLog]:
    """Metrics and decisions of the run, up to this step, whose checkpoint becomes the newest."""
    metrics, decisions = MetricsLog(folder / "metrics.jsonl", identity), DecisionLog(folder, show_every)
    # Nothing refuses the run from here on.
    checkpoints.remove_partial(folder)
    checkpoints.set_newer_aside(folder, step, (metrics, decisions.decisions, decisions.rollouts))
    decisions.cut_back(step)
    metrics.cut_back(step)
    metrics.warn_if_missing(range(step + 1) if resumed else ())
    _ = metrics.identity  # writes metrics.id, before all other files: by it a killed start is known as a run's
    return metrics, decisions


def _tracker(
    spec: RunSpec, metrics: MetricsLog, questions: Mapping[str, list[Question]], mlflow_run: str | None, step: int
) -> MlflowTracker:
    """mlflow_run: the id of the run in MLflow that is continued; step: of the checkpoint"""
    experiment, folder = spec.experiment, spec.run
    hashes = {f"{binding} sha256": digest for binding, digest in experiment.own_code.items()}
    tags = {**spec.tags, "config_hash": experiment.config_hash, **hashes}
    described = RunDescription(run_name(folder), experiment.params, tags, questions, mlflow_run, step)
    start = MetricsLog(folder / CURVE) if (folder / CURVE).exists() else None
    tracker = MlflowTracker(metrics, experiment.tracking, spec.tracking_uri, described, start)
    tracker.artifact(folder / "config.gin")
    return tracker
