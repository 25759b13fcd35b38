"""One run: its folder, its engine, its signals, its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..checkpoints import claim, refuse_earlier, refuse_other, to_resume
from ..engines.engine import Engine, Loop, RunSpec
from ..experiment import Experiment, Outcome
from ..io import weights
from ..io.lazy import transformers
from ..io.metric_names import check_name
from ..io.stopping import StopRequest
from ..tracking.client import address
from ..tracking.others import refuse_absent
from .load_questions import load_questions


def train(
    experiment: Experiment,
    run: Path,
    *,
    resume: bool,
    tracking_uri: str,
    tags: Mapping[str, str],
    resume_from: str | None = None,
    loop: Loop | None = None,
) -> Outcome:
    """Train in the folder `run`, from the start or from its newest checkpoint, which is verified first.

    resume_from: the name of an older checkpoint to resume from, such as 'checkpoint-100'
    tracking_uri: where MLflow is unless a binding or the environment says otherwise
    loop: instead of `preparation.prepare_and_run`
    Raises RunFolderError, CheckpointError, SnapshotError, NonFiniteUpdate (the batch is dumped in `run`), ValueError.
    """
    refuse_earlier(run, resume)
    refuse_other(run)
    if experiment.tracking.enabled:
        address(experiment.tracking, tracking_uri)
    refuse_absent(experiment.tracking)
    for name in tags:
        check_name(name)
    questions = load_questions(experiment)
    # Seconds to import, after all that can be checked without them: torch, transformers, MLflow.
    from . import initial_buffer
    from .preparation import prepare_and_run

    transformers.utils.logging.disable_progress_bar()
    model_path = experiment.model.prepare()  # may take an hour; until it is done a signal simply ends the program
    if experiment.lora.rank is not None or experiment.loss.kl_coef > 0:  # a resumed run needs the base model again
        experiment = replace(experiment, base=weights.fingerprint(model_path))
    spec = RunSpec(experiment, run, tracking_uri, tags, loop or prepare_and_run, questions, initial_buffer.load)
    if experiment.settings.engine == "openrlhf":
        from ..engines.openrlhf.launch import launch  # Ray, DeepSpeed and vLLM: only where they are needed

        return launch(spec, str(model_path), resume=resume, resume_from=resume_from, logs=run / "logs")

    from ..engines.local import LocalParts, TorchEngine

    def make_engine(checkpoint: Path | None) -> Engine:
        return TorchEngine(
            LocalParts.of(experiment),
            model_path=model_path,
            weights_path=checkpoint,
            seed=experiment.settings.seed,
            reference=experiment.loss.kl_coef > 0,
        )

    with claim(run, resume), StopRequest() as stop:
        contents, identity = experiment.settings.verify_checkpoint, dict(experiment.identity)
        checkpoint = to_resume(
            run, identity, experiment.defaults, name=resume_from, contents=contents, base=experiment.base
        )
        return spec.loop(replace(spec, checkpoint=checkpoint), make_engine, stop)
