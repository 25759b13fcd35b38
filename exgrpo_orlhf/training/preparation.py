"""What a training run needs before its first step: from the start, or from its newest checkpoint."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path

from .. import checkpoints
from ..checkpoints import manifest
from ..engines.engine import MakeEngine, RunSpec
from ..experiment import Experiment, Outcome
from ..io.files import write
from ..io.paths import run_name
from ..io.provenance import provenance
from ..io.stopping import Stop
from ..records import Question
from ..replay import snapshot
from ..tracking.decisions import DecisionLog
from ..tracking.metrics_log import MetricsLog
from ..tracking.tracker import MlflowTracker, RunDescription
from . import ahead, initial_buffer
from .listener import ListenedRun, listeners
from .load_questions import load_questions
from .loop import TrainingRun
from .supervised_start import CURVE, copy_curve
from .validation import Validation

log = logging.getLogger(__name__)


def prepare(spec: RunSpec, make_engine: MakeEngine) -> TrainingRun:
    """A run that is ready to make steps: engine and state are loaded, the logs are cut back to the checkpoint.

    Raises ValueError, CheckpointError, SnapshotError, and what `make_engine` raises.
    """
    experiment, folder = spec.experiment, spec.run
    # Copies, so that an experiment can be run more than once: the mixer and the generators change with every step.
    mixer, buffer = copy.deepcopy(experiment.mixer), copy.deepcopy(experiment.buffer)
    fresh_rng = copy.deepcopy(experiment.fresh_rng)
    experiment = replace(experiment, mixer=mixer, buffer=buffer, fresh_rng=fresh_rng)
    training, validation = spec.questions or load_questions(experiment)
    fresh = experiment.fresh.over(training, fresh_rng)

    available = checkpoints.find(folder)
    step = max(available, default=0)
    checkpoint = available.get(step)
    state = checkpoints.read_state(checkpoint, dict(experiment.identity), experiment.defaults) if checkpoint else None
    checkpoints.remove_partial(folder)
    own_code = experiment.own_code
    before = state["own_code"] if state else own_code
    for binding, digest in own_code.items():
        if digest != before.get(binding):
            log.warning("%s: this file is not that of %s, from which the run goes on", binding, checkpoint)
    engine = make_engine(checkpoint)
    fingerprint = engine.prompts.fingerprint()
    evaluator = _validation(experiment, validation, folder, fingerprint)
    prompt = engine.prompts.introduce(training, validation)

    batch_ahead, best, best_step = None, None, None
    if checkpoint and state:
        if (earlier := state["validation"]) != evaluator.fingerprint:
            raise ValueError(
                f"the checkpoint was made with another validation set (fingerprint {earlier}, now "
                f"{evaluator.fingerprint}): one metric would be of two sets; bring Work.validation's questions back"
            )
        engine.load(checkpoint)
        snapshot.load(checkpoint / "replay", buffer, fingerprint)
        mixer.load_state_dict(state["mixer"])
        fresh.load_state_dict(state["fresh"])
        if (saved := checkpoint / ahead.FOLDER).exists():
            batch_ahead = ahead.load(saved, fresh.question, step + 1, mixer.rollouts_per_replayed)
        if state["best_of"] == experiment.settings.best_metric:
            # The link too: a kill may have come before it, or its checkpoint may have been set aside.
            if state["best_step"] in available:
                best, best_step = state["best"], state["best_step"]
                checkpoints.mark_best(folder, best_step)
            else:
                checkpoints.remove(folder / checkpoints.BEST)
    elif experiment.experience:
        buffer = initial_buffer.load(experiment, training, engine.prompts)

    own, made_by = checkpoints.identify(folder), manifest.read(checkpoint).run if checkpoint else None
    identity = own or made_by if checkpoint else checkpoints.set_aside(folder, experiment.config_text)
    metrics, decisions = MetricsLog(folder / "metrics.jsonl", identity), DecisionLog(folder)
    decisions.cut_back(step)
    metrics.cut_back(step)
    metrics.warn_if_missing(range(step + 1) if checkpoint else ())
    _ = metrics.identity  # writes metrics.id, before all other files: by it a killed start is known as a run's
    copy_curve(Path(engine.model_path), folder, resumed=checkpoint is not None)
    write(folder / "config.gin", experiment.config_text)
    hashes = {f"{binding} sha256": digest for binding, digest in own_code.items()}
    described = RunDescription(
        run_name(folder),
        experiment.params,
        tags={**spec.tags, "config_hash": experiment.config_hash, **hashes},
        questions={"training": training, "validation": validation},
        id=state["mlflow_run_id"] if state and identity == made_by else None,  # not of a copy
    )
    start = MetricsLog(folder / CURVE) if (folder / CURVE).exists() else None
    tracker = MlflowTracker(metrics, experiment.tracking, spec.tracking_uri, described, start)
    tracker.artifact(folder / "config.gin")
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
