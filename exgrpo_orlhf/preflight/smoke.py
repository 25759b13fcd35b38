"""A trial of a run before it starts: everything is loaded and checked, a few steps are made, and the cost of the whole
run is estimated. The steps are made in a folder that is removed, unless they fail, and MLflow gets no run."""

from __future__ import annotations

import copy
import json
import logging
import math
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..engines.engine import MakeEngine, RunSpec
from ..engines.openrlhf.flags import divisible_questions
from ..experiment import Experiment, Outcome
from ..io import tokenizer_file
from ..io.progress import duration, evaluations_left
from ..io.redaction import without_password
from ..io.stopping import Stop
from ..questions.prompts import PromptEncoder
from ..replay.store_rule import AllFinished
from ..tracking.client import address, connect, first_line
from ..training.load_questions import load_questions
from ..training.preparation import prepare
from ..training.run import train

log = logging.getLogger(__name__)
_REPORT = "smoke.json"
_SECONDS = 60.0  # the last step is as large as this time allows


def trial(spec: RunSpec, make_engine: MakeEngine, stop: Stop) -> Outcome:
    """A tiny step, another one to measure, and on the local engine one of at most the run's own size; a checkpoint.
    What they took is written to the folder. An `engines.engine.Loop`."""
    experiment, run = spec.experiment, prepare(spec, make_engine)
    mixer = run.experiment.mixer
    if mixer.share.started_at is None:
        mixer.share.started_at = 0  # so that what replay needs is tried too, where the first step has a success
    tiny = planned = experiment.settings.questions_per_step
    if not run.engine.whole_batches:
        tiny = min(planned, max(2, experiment.optimizer.steps_per_batch))
    steps: list[dict[str, float]] = []

    def make_step(size: int) -> None:
        mixer.questions_per_step = size
        steps.append({**run.step(), "questions": size})

    make_step(tiny)
    if not stop.signal:
        make_step(tiny)
    if not (stop.signal or run.engine.whole_batches):
        # Questions of a step that takes at most `_SECONDS`, if it takes no longer per question than a tiny one.
        unit = experiment.optimizer.steps_per_batch
        largest = min(planned, int(_SECONDS / steps[-1]["time/step"] * tiny) // unit * unit)
        if largest > tiny:
            make_step(largest)
    begin = time.perf_counter()
    run.save()
    checkpoint = spec.run / f"checkpoint-{run.steps}"
    model = getattr(run.engine, "model", None)  # OpenRLHF's is in other processes
    report = {
        "steps": steps,
        "save": time.perf_counter() - begin,
        "checkpoint": sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()),
        "parameters": None if model is None else sum(parameter.numel() for parameter in model.parameters()),
        "cuda": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }
    (spec.run / _REPORT).write_text(json.dumps(report), encoding="utf-8")
    run.tracker.close("FINISHED")
    return Outcome(run.steps, run.steps, stop.signal)


def smoke(experiment: Experiment, run: Path, tracking_uri: str) -> Iterator[str]:
    """Yields the lines of the report. Raises what `run.train` raises.

    run: the run's folder, which stays as it is
    """
    uri = address(experiment.tracking, tracking_uri) if experiment.tracking.enabled else None
    training, validation = load_questions(experiment)
    path = experiment.model.prepare()
    prompts = PromptEncoder(experiment.prompts, tokenizer_file.load(path))
    prompts.check_prompts([*training, *validation])
    longest = max(len(prompts.encode(question)) for question in [*training, *validation])
    counts = f"{len(training):,} to train on, {len(validation):,} for validation"
    yield f"questions   {counts}; longest prompt {longest} tokens"
    if uri is not None:
        yield f"MLflow      {without_password(uri)}: {_reachable(uri)}"

    above = next(folder for folder in run.absolute().parents if folder.is_dir())
    folder = Path(tempfile.mkdtemp(prefix=f"{run.name}-smoke-", dir=above))
    try:
        train(_tiny(experiment), folder / "run", resume=False, tracking_uri="", tags={}, loop=trial)
        report = json.loads((folder / "run" / _REPORT).read_text(encoding="utf-8"))
    except BaseException:
        log.error("the trial did not succeed: its files stay in %s", folder)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    yield from estimate(experiment, report, len(validation), shutil.disk_usage(above).free)


def _tiny(experiment: Experiment) -> Experiment:
    """The experiment without tracking and evaluation; on OpenRLHF, whose batches have one size, with a quarter of the
    batch, in portions that its ranks can share."""
    settings = replace(experiment.settings, steps=3, eval_every=None, best_metric=None, save_every=2**62)
    mixer = copy.deepcopy(experiment.mixer)
    if experiment.openrlhf is None:  # it generates nothing beside an update, and each of the trial's steps has its size
        settings = replace(settings, generate_ahead=False)
    else:
        unit, size = divisible_questions(experiment), settings.questions_per_step
        mixer.questions_per_step = min(size, max(1, size // 4 // unit) * unit)
        settings = replace(settings, questions_per_step=mixer.questions_per_step)
    tracking = replace(experiment.tracking, enabled=False, also=())
    return replace(experiment, settings=settings, mixer=mixer, tracking=tracking)


def _reachable(uri: str) -> str:
    try:
        connect(uri).search_experiments(max_results=1)
    except Exception as error:  # whatever MLflow, its database or the network raised
        return f"NOT reachable: {first_line(error)}. The run would go on, and send its metrics when it answers"
    return "reachable"


def estimate(experiment: Experiment, report: dict[str, Any], validation: int, free: int) -> Iterator[str]:
    """The lines on time, memory and disk. report: of `trial`; validation: questions; free: bytes of the disk"""
    steps, batch_size = report["steps"], experiment.settings.questions_per_step
    last, planned = steps[-1], experiment.settings.steps
    yield (
        f"step        {last['questions']} of {batch_size} questions in {last['time/step']:.1f} s (rollouts "
        f"{last['time/rollout']:.1f} s, update {last['time/update']:.1f} s); reward {last['reward/mean']:.2f}, "
        f"{last['rollout/response_tokens']:.0f} tokens a response, {last['rollout/truncated_share']:.0%} cut off, "
        f"{last['reward/groups_with_signal']:.0%} of the groups with a signal"
    )
    step = seconds_of(batch_size, [(timed["questions"], timed["time/step"]) for timed in steps])
    rows = last["questions"] * experiment.settings.group_size
    evaluations = 0
    if validation and experiment.settings.eval_every:
        evaluations = 1 + evaluations_left(0, planned, experiment.settings.eval_every)
    evaluation = last["time/rollout"] / rows * validation * experiment.evaluation.samples
    saves = -(-planned // experiment.settings.save_every)
    total = planned * step + evaluations * evaluation + saves * report["save"]
    parts = f"{planned} steps of {step:.1f} s"
    if evaluations:
        parts += f", {evaluations} evaluations of {evaluation:.1f} s"
    about = "about" if last["questions"] == batch_size else "at most"  # small batches are slower per question
    yield f"time        {about} {duration(total)}: {parts}, {saves} checkpoints of at most {report['save']:.1f} s"

    buffer = buffer_bytes(experiment, 1.0, last["rollout/response_tokens"])
    machine = torch.cuda.get_device_properties(0).total_memory if report["cuda"] else None
    if report["parameters"] is None:
        yield f"memory      the buffer at most {size(buffer)}; scripts/doctor.py examines the layout's GPUs"
    else:
        where = f"{size(report['cuda'])} of {size(machine)} on the GPU" if machine else size(report["resident"])
        yield (
            f"memory      {where} at the peak of this trial, with {report['parameters'] / 1e6:.1f} million parameters; "
            f"the buffer adds at most {size(buffer)}"
        )
    yield f"disk        {disk_text(experiment, report['checkpoint'] + buffer, free)}"


def buffer_bytes(experiment: Experiment, correct: float, tokens: float) -> float:
    """Of the replay buffer at the end, at most. correct: share of the rollouts, unless all are stored; tokens: of a
    response"""
    settings, mixer = experiment.settings, experiment.mixer
    if not (mixer.collects and mixer.replays):
        return 0.0
    share = 1.0 if isinstance(mixer.store_rule, AllFinished) else correct
    stored = settings.steps * settings.questions_per_step * settings.group_size * share
    return min(stored * (64 + 8 * tokens), experiment.buffer.max_bytes or math.inf)  # as ReplayBuffer.max_bytes counts


def disk_text(experiment: Experiment, checkpoint: float, free: int) -> str:
    """What the checkpoints need. checkpoint: bytes of one; free: bytes of the disk"""
    disk = (experiment.settings.keep + 1 + (experiment.settings.best_metric is not None)) * checkpoint
    enough = "" if disk < free else ": NOT ENOUGH, lower train.keep or choose another --out"
    return f"{size(checkpoint)} a checkpoint, at most {size(disk)} at a time; {size(free)} are free{enough}"


def seconds_of(questions: int, measured: Sequence[tuple[int, float]]) -> float:
    """Seconds of a step with so many questions, on the line through the last two of (questions, seconds); in
    proportion to the last one if they have the same size. The first step is left out: it is slower."""
    (n, last), (m, before) = measured[-1], measured[-2] if len(measured) > 2 else measured[-1]
    slope = last / n if n == m else max((last - before) / (n - m), 0.0)
    return last + slope * (questions - n)


def size(bytes_: float) -> str:
    return f"{bytes_ / 1e9:.1f} GB" if bytes_ >= 1e9 else f"{bytes_ / 1e6:.1f} MB"
