"""Sections 6 and 8 of gpu.py: runs of scripts/train.py on both engines, and TRL's trainer on the same work."""

from __future__ import annotations

import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from command_line import TINY
from gpu_work import LOOP, Figures, Work

from exgrpo_orlhf import config
from exgrpo_orlhf.experiment import Experiment

ROOT = Path(__file__).resolve().parents[1]
UNTIMED = 2  # steps at the start
MEMORY = 0.3  # of the GPU, for TRL's vLLM


def layout(work: Work, *files: str) -> tuple[list[str], list[str]]:
    """Files and bindings: SmolLM2 after its supervised start and word problems of two calculations; at the small size a
    tiny model and chains. files: further ones"""
    questions, steps = work.size.run
    bindings = [f"train.questions_per_step = {questions}", "train.group_size = 8", f"train.steps = {steps}"]
    bindings += ["train.eval_every = None", "train.save_every = 1000", "train.keep = 1", "Tracking.enabled = False"]
    if not work.size.counts:
        return ["toy.gin", *files], [*bindings, *TINY, "LocalEngine.device = 'cpu'"]
    bindings += ["WordProblems.steps = (2,)", "WordProblems.count = 2000", "validation/WordProblems.steps = (2,)"]
    bindings += ["LocalEngine.gradient_checkpointing = False", "LocalEngine.micro_batch_tokens = 65536"]
    return ["testbed/smollm2_one_step.gin", "engines/local_gpu.gin", *files], [
        *bindings,
        "LocalEngine.generation_rows = 512",
    ]


def product(work: Work, files: list[str], bindings: list[str]) -> Figures:
    """Medians of all metrics over the later steps of a run. Raises RuntimeError with the run's last lines."""
    run = Path(tempfile.mkdtemp(dir=work.folder)) / "run"
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--out", str(run)]
    command += [part for file in files for part in ("--gin", file)] + [f"--set={binding}" for binding in bindings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stderr or done.stdout)[-1500:]}")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "time/step" in row][UNTIMED:]
    return {name: statistics.median(row.get(name, 0.0) for row in rows) for name in rows[-1] if name != "step"}


def trl(work: Work, experiment: Experiment, model: Path, with_vllm: bool) -> Figures:
    """Median seconds of a step of TRL's trainer, and the tokens that it has generated."""
    import torch
    from against_trl import trl_trainer
    from transformers import AutoTokenizer, TrainerCallback

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if work.cuda:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    machine: dict[str, Any] = {"bf16": True} if work.cuda else {"use_cpu": True, "bf16": False}
    if with_vllm:
        machine |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": MEMORY}
        machine["vllm_max_model_length"] = experiment.prompts.max_tokens + experiment.sampling.max_response_tokens
    questions, steps = work.size.run
    counted: list[int] = []
    with tempfile.TemporaryDirectory(dir=work.folder) as folder:
        shape = (questions, 8, min(128, questions * 8))
        trainer = trl_trainer(
            experiment, AutoTokenizer.from_pretrained(model), model, shape, steps, folder, counted, **machine
        )
        trainer.add_callback(Clock())
        trainer.train()
    seconds = [end - begin for begin, end in itertools.pairwise(ends)]
    return {"seconds": statistics.median(seconds[UNTIMED - 1 :]), "tokens": sum(counted) / steps}


def against_trl_here(work: Work) -> Figures:
    """On-policy Dr. GRPO by both, each alone on the machine."""
    files, bindings = layout(work, "baselines/on_policy.gin")
    experiment = config.load(files, bindings)
    model = experiment.model.prepare()
    figures: Figures = {}
    vllm = work.cuda and importlib.util.find_spec("vllm") is not None
    if not LOOP:
        figures["LocalEngine.sampler: missing here, no vLLM in our process"] = 0.0
    for name, with_vllm in (("loop", False), *([("vllm", True)] if vllm else [])):
        theirs = trl(work, experiment, model, with_vllm)
        figures |= {f"TRL, {name}: s a step": theirs["seconds"], f"TRL, {name}: tokens a step": theirs["tokens"]}
        if with_vllm and not LOOP:
            continue
        ours = product(work, files, [*bindings, *([f"LocalEngine.sampler = {name!r}"] if LOOP else [])])
        figures |= {f"ours, {name}: {part[5:]}, s": ours[part] for part in sorted(ours) if part.startswith("time/")}
        figures[f"steps, times TRL's, {name}"] = theirs["seconds"] / ours["time/step"]
    return figures


def openrlhf_step(work: Work) -> Figures:
    """ExGRPO's step on OpenRLHF by parts, in seconds, replay from the second step."""
    files, bindings = layout(work, "engines/openrlhf_1gpu.gin" if work.cuda else "engines/openrlhf_cpu.gin")
    values = product(work, files, [*bindings, "ReplayMixer.start_at_accuracy = None"])
    figures = {f"{name[5:]}: s": values[name] for name in sorted(values) if name.startswith("time/")}
    parts = ("score", "inject", "plan", "store", "assemble")
    figures["replay's part of a step"] = sum(values.get(f"time/{part}", 0.0) for part in parts) / values["time/step"]
    return figures | {"replayed rows, share": values["replay/actual_share"]}
