"""Sections 6 and 8 of gpu.py: runs of scripts/train.py on both engines, and TRL's trainer on the same work."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
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
REPLAY = ("plan", "score", "inject", "store")  # parts of a step that on-policy training does not have


def layout(work: Work, *files: str) -> tuple[list[str], list[str]]:
    """Files, with these further ones, and bindings: SmolLM2 after its supervised start and word problems of two
    calculations; at the small size a tiny model and chains."""
    questions, steps = work.size.run
    bindings = [f"train.questions_per_step = {questions}", "train.group_size = 8", f"train.steps = {steps}"]
    bindings += ["train.eval_every = None", "train.save_every = 1000", "train.keep = 1", "Tracking.enabled = False"]
    if not work.cuda:
        return ["toy.gin", *files], [*bindings, *TINY, "LocalEngine.device = 'cpu'"]
    bindings += ["WordProblems.steps = (2,)", "WordProblems.count = 2000", "LocalEngine.generation_rows = 512"]
    bindings += ["LocalEngine.gradient_checkpointing = False", "LocalEngine.micro_batch_tokens = 65536"]
    return ["testbed/smollm2_one_step.gin", "engines/local_gpu.gin", *files], bindings


def product(work: Work, files: list[str], bindings: list[str]) -> Figures:
    """Medians of all metrics over the later steps of a run. Raises RuntimeError with the run's last lines."""
    run = Path(tempfile.mkdtemp(dir=work.folder)) / "run"
    words = [f"--gin={file}" for file in files] + [f"--set={binding}" for binding in bindings]
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--out", str(run), *words]
    # Of the processes of this benchmark alone: Ray would find that its two pretended GPUs are hidden.
    environment = {name: value for name, value in os.environ.items() if work.cuda or name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
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

    more: dict[str, Any] = {"bf16": work.cuda, "use_cpu": not work.cuda}
    if with_vllm:
        more |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}  # of the GPU
        more["vllm_max_model_length"] = experiment.prompts.max_tokens + experiment.sampling.max_response_tokens
    questions, steps = work.size.run
    more |= {"output_dir": str(work.folder / "trl"), "max_steps": steps}
    rows, counted = min(128, questions * 8), list[int]()
    trainer = trl_trainer(experiment, AutoTokenizer.from_pretrained(model), model, rows, counted, **more)
    trainer.add_callback(Clock())
    trainer.train()
    seconds = [end - begin for begin, end in itertools.pairwise(ends)]
    return {"s a step": statistics.median(seconds[UNTIMED - 1 :]), "tokens a step": sum(counted) / steps}


def against_trl_here(work: Work) -> Figures:
    """On-policy Dr. GRPO by both, each alone on the machine."""
    files, bindings = layout(work, "baselines/on_policy.gin")
    experiment = config.load(files, bindings)
    model = experiment.model.prepare()
    figures: Figures = {} if LOOP else {"no LocalEngine.sampler: ours has no vLLM here": 0.0}
    for name in ("loop", "vllm") if work.cuda and importlib.util.find_spec("vllm") else ("loop",):
        theirs = trl(work, experiment, model, name == "vllm")
        figures |= {f"TRL, {name}: {what}": value for what, value in theirs.items()}
        if name == "loop" or LOOP:
            ours = product(work, files, [*bindings, *([f"LocalEngine.sampler = {name!r}"] if LOOP else [])])
            figures |= {f"ours, {name}: {part[5:]}, s": ours[part] for part in sorted(ours) if part.startswith("time/")}
            figures[f"steps, times TRL's, {name}"] = theirs["s a step"] / ours["time/step"]
    return figures


def openrlhf_step(work: Work) -> Figures:
    """ExGRPO's step on OpenRLHF by parts, in seconds, replay from the second step."""
    files, bindings = layout(work, "engines/openrlhf_1gpu.gin" if work.cuda else "engines/openrlhf_cpu.gin")
    values = product(work, files, [*bindings, "ReplayMixer.start_at_accuracy = None"])
    figures = {f"{name[5:]}: s": values[name] for name in sorted(values) if name.startswith("time/")}
    share = sum(values[f"time/{part}"] for part in REPLAY) / values["time/step"]
    return figures | {"replayed rows, share": values["replay/actual_share"], "replay's part of a step": share}
