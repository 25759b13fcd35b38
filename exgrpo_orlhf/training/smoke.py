"""A trial of a run before it starts: everything is loaded and checked, a few steps are made, and the cost of the whole
run is estimated. Nothing is left behind: the steps are made in a folder that is removed, and MLflow gets no run."""

from __future__ import annotations

import copy
import json
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
import transformers

from ..engines.openrlhf.flags import divisible_questions
from ..experiment import Experiment, Outcome
from ..progress import duration, evaluations_left
from ..questions.prompts import PromptEncoder
from ..redaction import without_password
from ..stopping import Stop
from ..tracking.client import address, connect, first_line
from .load_questions import load_questions
from .loop import TrainingRun
from .run import train

_REPORT = "smoke.json"
_SECONDS = 60.0  # the last step is as large as this time allows


class SmokeRun(TrainingRun):
    """A tiny step, another one to measure, and on the local engine one of at most the run's own size."""

    def go(self, stop: Stop) -> Outcome:
        x = self.x
        done: list[dict[str, float]] = []
        if x.mixer.started_at is None:
            x.mixer.started_at = 0  # so that what replay needs is tried too, where the first step has a success
        tiny, whole = x.settings.questions_per_step, x.settings.questions_per_step
        if not self.engine.whole_batches:
            tiny = min(whole, max(2, x.optimizer.steps_per_batch))
        for size in (tiny, tiny, None):
            if size is None:
                size = self._largest(tiny, whole, done[-1]["time/step"])
                if size <= tiny:
                    break
            x.mixer.questions_per_step = self.batch_size = size
            metrics = self._step(self.step + 1)
            self.step += 1
            done.append({**metrics, "questions": size})
            if stop.signal:
                break
        begin = time.perf_counter()
        self._save()
        folder = self.run / f"checkpoint-{self.step}"
        model = getattr(self.engine, "model", None)  # OpenRLHF's is in other processes
        report = {
            "steps": done,
            "save": time.perf_counter() - begin,
            "checkpoint": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
            "parameters": None if model is None else sum(each.numel() for each in model.parameters()),
            "cuda": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
            "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        }
        (self.run / _REPORT).write_text(json.dumps(report), encoding="utf-8")
        self.tracker.close("FINISHED")
        return Outcome(self.step, self.step, stop.signal)

    def _largest(self, tiny: int, whole: int, seconds: float) -> int:
        """Questions of a step that takes at most `_SECONDS`, if it takes no longer per question than a tiny one."""
        if self.engine.whole_batches:
            return 0
        unit = self.x.optimizer.steps_per_batch
        return min(whole, int(_SECONDS / seconds * tiny) // unit * unit)


def smoke(x: Experiment, run: Path, tracking_uri: str) -> Iterator[str]:
    """Yields the lines of the report. Raises what `run.train` raises.

    run: the run's folder, which stays as it is
    """
    uri = address(x.tracking, tracking_uri)
    questions, asked = load_questions(x)
    path = x.model.prepare()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    prompts = PromptEncoder(x.prompts, tokenizer)
    prompts.check([*questions, *asked])
    longest = max(len(prompts.encode(question)) for question in [*questions, *asked])
    yield f"questions   {len(questions):,} to train on, {len(asked):,} for validation; longest prompt {longest} tokens"
    if x.tracking.enabled:
        yield f"MLflow      {without_password(uri)}: {_reachable(uri)}"

    above = next(folder for folder in run.absolute().parents if folder.is_dir())
    trial = Path(tempfile.mkdtemp(prefix=f"{run.name}-smoke-", dir=above))
    try:
        train(_tiny(x), trial / "run", resume=False, tracking_uri="", tags={}, loop=SmokeRun)
        report = json.loads((trial / "run" / _REPORT).read_text(encoding="utf-8"))
    finally:
        shutil.rmtree(trial, ignore_errors=True)
    yield from estimate(x, report, len(asked), shutil.disk_usage(above).free)


def _tiny(x: Experiment) -> Experiment:
    """The experiment without tracking and evaluation; on OpenRLHF, whose batches have one size, with a quarter of the
    batch, in portions that its ranks can share."""
    settings = replace(x.settings, steps=3, eval_every=None, best_metric=None, save_every=2**62)
    if x.openrlhf is None:  # this engine generates nothing beside an update, and each of the trial's steps has its size
        settings = replace(settings, generate_ahead=0)
    mixer = copy.deepcopy(x.mixer)
    if x.openrlhf is not None:
        unit = divisible_questions(x)
        size = min(x.settings.questions_per_step, max(1, x.settings.questions_per_step // 4 // unit) * unit)
        settings = replace(settings, questions_per_step=size)
        mixer.questions_per_step = size
    return replace(x, settings=settings, mixer=mixer, tracking=replace(x.tracking, enabled=False))


def _reachable(uri: str) -> str:
    try:
        connect(uri).search_experiments(max_results=1)
    except Exception as error:  # whatever MLflow, its database or the network came up with
        return f"NOT reachable: {first_line(error)}. The run would go on, and send its metrics when it answers"
    return "reachable"


def estimate(x: Experiment, report: dict[str, Any], asked: int, free: int) -> Iterator[str]:
    """The lines on time, memory and disk. report: of SmokeRun; asked: validation questions; free: bytes of the disk"""
    steps, wanted = report["steps"], x.settings.questions_per_step
    last, planned = steps[-1], x.settings.steps
    yield (
        f"step        {last['questions']} of {wanted} questions in {last['time/step']:.1f} s (rollouts "
        f"{last['time/rollout']:.1f} s, update {last['time/update']:.1f} s); reward {last['reward/mean']:.2f}, "
        f"{last['rollout/response_tokens']:.0f} tokens a response, {last['rollout/truncated_share']:.0%} cut off, "
        f"{last['reward/groups_with_signal']:.0%} of the groups with a signal"
    )
    step = seconds_of(wanted, [(each["questions"], each["time/step"]) for each in steps])
    rows = last["questions"] * x.settings.group_size
    evaluations = 0
    if asked and x.settings.eval_every:
        evaluations = 1 + evaluations_left(0, planned, x.settings.eval_every)
    evaluation = last["time/rollout"] / rows * asked * x.evaluation.samples
    saves = -(-planned // x.settings.save_every)
    total = planned * step + evaluations * evaluation + saves * report["save"]
    parts = f"{planned} steps of {step:.1f} s"
    if evaluations:
        parts += f", {evaluations} evaluations of {evaluation:.1f} s"
    about = "about" if last["questions"] == wanted else "at most"  # small batches are slower per question
    yield f"time        {about} {duration(total)}: {parts}, {saves} checkpoints of at most {report['save']:.1f} s"

    buffer = buffer_bytes(x, last["reward/pass_at_1"], last["rollout/response_tokens"])
    machine = torch.cuda.get_device_properties(0).total_memory if report["cuda"] else None
    if report["parameters"] is None:
        yield f"memory      the buffer at most {size(buffer)}; scripts/doctor.py examines the layout's GPUs"
    else:
        where = f"{size(report['cuda'])} of {size(machine)} on the GPU" if machine else size(report["resident"])
        yield (
            f"memory      {where} at the peak of this trial, with {report['parameters'] / 1e6:.1f} million parameters; "
            f"the buffer adds at most {size(buffer)}"
        )
    yield f"disk        {disk_text(x, report['checkpoint'] + buffer, free)}"


def buffer_bytes(x: Experiment, correct: float, tokens: float) -> float:
    """Of the replay buffer at the end, at most. correct: share of the rollouts; tokens: of a response"""
    if not (x.mixer.collects and x.mixer.replays):
        return 0.0
    stored = x.settings.steps * x.settings.questions_per_step * x.settings.group_size * correct
    return min(stored * (64 + 8 * tokens), x.buffer.max_bytes or math.inf)  # as ReplayBuffer.max_bytes counts


def disk_text(x: Experiment, kept: float, free: int) -> str:  # bytes of a checkpoint, and free ones
    disk = (x.settings.keep + 1 + (x.settings.best_metric is not None)) * kept
    enough = "" if disk < free else ": NOT ENOUGH, lower train.keep or choose another --out"
    return f"{size(kept)} a checkpoint, at most {size(disk)} at a time; {size(free)} are free{enough}"


def seconds_of(questions: int, measured: Sequence[tuple[int, float]]) -> float:
    """Seconds of a step with so many questions, on the line through the last two of (questions, seconds); in
    proportion to the last one if they have the same size. The first step is left out: it is slower."""
    (n, last), (m, before) = measured[-1], measured[-2] if len(measured) > 2 else measured[-1]
    slope = last / n if n == m else max((last - before) / (n - m), 0.0)
    return last + slope * (questions - n)


def size(bytes_: float) -> str:
    return f"{bytes_ / 1e9:.1f} GB" if bytes_ >= 1e9 else f"{bytes_ / 1e6:.1f} MB"
