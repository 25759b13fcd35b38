#!/usr/bin/env python
"""What experience replay costs in a step of the OpenRLHF engine, against OpenRLHF's own on-policy step.

`--bench`, on a machine without CUDA that has the stack (make openrlhf-cpu): three runs one after the other, each in a
process of its own, on the tiny chain model: OpenRLHF's own program, our engine without replay (on_policy.gin), our
engine with it from the first step (base.gin). The same model, B = 32, K = 8, lengths, learning rate (so small that the
responses stay as they are), layout (one rank, one vLLM engine) and stand-ins for CUDA. The first 3 steps do not count.
No goal: a model this small has nothing to hide overheads behind, so this is where to look for them. `forward` measures
log-probs before the update; `rest` is what no part claims, such as making and sending the experience; `score` includes
choosing, `assemble` observing. What differs between the last two columns is replay's.

`--paper`: the training loop's own step at the paper's shape, with made-up responses, grades and scores in the engine's
place: B = 128, K = 8, ρ = 0.5, responses of 2,000 tokens in the mean (lognormal, at most 8,192), 46,000 questions, 4
trajectories stored for 20,000 of them. Goal: plan + choose + assemble + store take less than 1 % of a step of a 7B
model on 8 GPUs, whose seconds are an argument. `experience` (rows into OpenRLHF's form) and `metrics` are there without
replay too. Scoring is a forward pass, reckoned in FLOP; against it stand the responses that replay saves.

Without either, both, the bench where it can run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.engine import UpdateStats
from exgrpo_orlhf.engines.rows import ForwardRow
from exgrpo_orlhf.replay import Grade, MixedBatch, Plan, Rollout, RolloutGroup, Trajectory
from exgrpo_orlhf.tasks.chain_model import ChainModel
from exgrpo_orlhf.training import TrainingRun

ROOT = Path(__file__).resolve().parent.parent
Steps = list[dict[str, float]]  # seconds of each step's parts

# -- the bench --------------------------------------------------------------------------------------------------------

WARM = 3
PARTS = ("plan", "score", "rollout", "grade", "assemble", "forward", "train", "sync", "store", "rest", "step")
# Our name of a part → OpenRLHF's own clock for the same work. It grades while it generates.
SAME_WORK = {"rollout": "generation", "forward": "make_experience", "train": "ppo_train", "sync": "broadcast"}
LAYOUT = "engines/openrlhf_cpu.gin"
BENCH = (
    "Work.model = @PretrainedModel()", "Work.validation = None", "train.eval_every = None", "Tracking.enabled = False",
    "ReplayMixer.start_at_accuracy = None", "Optimizer.learning_rate = 1e-7",
)  # fmt: skip
REWARD = """
import torch
def reward_func(queries, prompts, labels):
    responses = [query[len(prompt):].split("<")[0] for query, prompt in zip(queries, prompts)]
    rewards = torch.tensor([float(r.rpartition("#")[2].strip() == a) for r, a in zip(responses, labels)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
"""


def run_plain(folder: Path, bindings: list[str]) -> None:
    """OpenRLHF's own training, with the arguments that our engine would run with; its clocks go to metrics.jsonl."""
    stack()
    from openrlhf.cli import train_ppo_ray
    from openrlhf.trainer import ppo_trainer
    from ray import remote

    from exgrpo_orlhf.engines.openrlhf import driver, launch

    class Noted(ppo_trainer.PPOTrainer.__ray_metadata__.modified_class):
        def save_logs_and_checkpoints(self, step: int, logs: Any = None, states: Any = None) -> None:
            row = {name.removeprefix("timing/"): seconds for name, seconds in logs.items() if "timing/" in name}
            row |= {"end": time.perf_counter(), "tokens": logs["rollout/response_length_mean"]}
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            super().save_logs_and_checkpoints(step, logs, states)

    x = config.load(["baselines/on_policy.gin", LAYOUT], bindings)
    args = launch.parse(x, x.model.prepare(), folder / "checkpoints", resume=False)
    lines = [json.dumps({"input": question.prompt, "label": question.answer}) for question in x.questions.load()]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "reward.py").write_text(REWARD)
    args.data.prompt_dataset, args.data.input_key, args.data.label_key = f"{folder}/prompts.jsonl", "input", "label"
    args.reward.remote_url, args.ckpt.output_dir = f"{folder}/reward.py", f"{folder}/model"
    args.train.num_episodes = 1
    ppo_trainer.PPOTrainer = remote(Noted)
    with driver._ray(x.openrlhf, launch.needed_gpus(args)):
        train_ppo_ray.train(args)


def stack() -> None:
    """Makes this process able to import OpenRLHF without CUDA."""
    from exgrpo_orlhf.engines.openrlhf import cpu

    os.environ.update(cpu.environment())
    cpu.install()


def rows_of(folder: Path, arguments: list[str]) -> list[dict[str, float]]:
    """The metrics.jsonl that a process writes in `folder`. Raises RuntimeError with the process's last words."""
    folder.mkdir()
    environment = {**os.environ, "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def plain(folder: Path, given: list[str]) -> Steps:
    rows: Steps = []
    ended = math.nan
    for row in rows_of(folder, [__file__, "--plain", str(folder), *given]):
        parts = {part: row[theirs] for part, theirs in SAME_WORK.items()}
        step, ended = row["end"] - ended, row["end"]
        rows.append({**parts, "rest": step - sum(parts.values()), "step": step, "tokens": row["tokens"]})
    return rows


def ours(folder: Path, gin: str, given: list[str]) -> Steps:
    rows: Steps = []
    script = [str(ROOT / "scripts/train.py"), "--out", str(folder), "--gin", gin, "--gin", LAYOUT]
    for row in rows_of(folder, [*script, *given])[1:]:  # row 0 is the policy as it came
        row["time/forward"], step = row["time/measure"], row["time/step"]
        parts = {part: row[f"time/{part}"] for part in PARTS if part not in ("rest", "step")}
        replay = {"tokens": row["rollout/response_tokens"], "scored": row.get("replay/candidates_scored", 0.0)}
        rows.append({**parts, "rest": step - sum(parts.values()), "step": step, **replay})
    return rows


def bench(steps: int) -> dict[str, Any]:
    model = ChainModel(operands=(3, 4, 5, 6, 7, 8)).prepare()  # that of base.gin
    more = f"PretrainedModel.path = '{model}'", f"train.steps = {steps}", f"ModularChains.count = {32 * steps}"
    given = [part for binding in (*BENCH, *more) for part in ("--set", binding)]
    with tempfile.TemporaryDirectory(prefix="openrlhf-overhead-") as temporary:
        folder = Path(temporary)
        runs = {
            "OpenRLHF": plain(folder / "plain", given),
            "ours, on-policy": ours(folder / "on-policy", "baselines/on_policy.gin", given),
            "ours, replay": ours(folder / "replay", "base.gin", given),
        }
    median = {name: medians(rows) for name, rows in runs.items()}
    step = median["OpenRLHF"]["step"]
    print(f"milliseconds, medians of {steps - WARM} steps, and times OpenRLHF's step")
    print(f"{'':20}" + "".join(f"{name:>24}" for name in median))
    for part in PARTS:
        cells = [column.get(part, 0.0) for column in median.values()]
        print(f"{part:20}" + "".join(f"{seconds * 1000:15.1f}{seconds / step:9.3f}" for seconds in cells))
    for what, name in (("tokens a response", "tokens"), ("trajectories scored", "scored")):
        print(f"{what:20}" + "".join(f"{column.get(name, 0.0):15.1f}{'':9}" for column in median.values()))
    return {"steps": steps, "medians": median}


def medians(rows: Steps) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows[WARM:]) for name in rows[0]}


# -- the paper's shape ------------------------------------------------------------------------------------------------

STORED_QUESTIONS, STORED, MEAN_LENGTH, SIGMA, MAX_LENGTH, PROMPT_TOKENS = 20_000, 4, 2000, 0.7, 8192, 300
BINDINGS = (
    "ModularChains.count = 46000", "ModularChains.operands = (6, 7)", "train.questions_per_step = 128",
    "train.eval_every = None", "ReplayMixer.start_at_accuracy = None", "Tracking.enabled = False",
)  # fmt: skip
GOAL = 0.01
OWN = ("plan", "choose", "assemble", "store")
# docs/cluster.md reckons 210 GPU-hours on H100 for 700 steps on 8 GPUs: 210 / 700 / 8 · 3600 s. On A100, with 550
# hours, a step has 354 s: the easier goal. Parameters, peak, share and generated tokens a second are from there too.
STEP_SECONDS, STEP_GPUS, PARAMETERS, PEAK, SHARE, GENERATED = 135.0, 8, 7.62e9, 989e12, 0.3, 4000
RIGHT, WRONG = Grade("correct", 1.0), Grade("wrong", 0.0)


class MadeUp:
    """Stands in the engine's and the verifier's place: random tokens, log-probs, scores and grades."""

    prompts = SimpleNamespace(check=lambda questions: None, fingerprint=lambda: "benchmark")

    def __init__(self, as_experience: Any) -> None:
        self.as_experience, self.rng, self.made, self.scored = as_experience, np.random.default_rng(0), 0, 0
        self.ids = self.rng.integers(0, 150_000, (64, MAX_LENGTH), dtype=np.int32)
        self.logprobs = -self.rng.exponential(0.3, (64, MAX_LENGTH)).astype(np.float32)

    def tokens(self) -> np.ndarray:
        """int32 (T,), in no other response."""
        self.made += 1
        length = int(self.rng.lognormal(math.log(MEAN_LENGTH) - SIGMA**2 / 2, SIGMA))
        ids = self.ids[self.made % 64, : min(max(length, 2), MAX_LENGTH)].copy()
        ids[:2] = divmod(self.made, 100_000)
        return ids

    def measure(self, ids: np.ndarray) -> np.ndarray:
        return self.logprobs[int(ids[1]) % 64, : len(ids)].copy()

    def score(self, plan: Plan, to_score: Any, score: Any) -> dict[str, list[float]]:
        began = time.perf_counter()
        self.scored = sum(PROMPT_TOKENS + len(t) for stored in to_score.values() for t in stored)
        scores = {question_id: self.rng.random(len(stored)).tolist() for question_id, stored in to_score.items()}
        self.scoring = time.perf_counter() - began
        return scores

    def rollout(self, plan: Plan, k: int) -> list[RolloutGroup]:
        fresh = [RolloutGroup(question, self.group(k), False) for question in plan.fresh]
        return fresh + [RolloutGroup(question, self.group(k - 1), True) for question in plan.replayed]

    def group(self, n: int) -> tuple[Rollout, ...]:
        return tuple(Rollout(self.tokens(), "stop", (RIGHT, WRONG)[self.rng.integers(2)]) for _ in range(n))

    def decode(self, ids: np.ndarray) -> str:
        return ""

    def grade_groups(self, groups: list[RolloutGroup], decode: Any) -> list[RolloutGroup]:
        return groups

    def update(self, batch: MixedBatch, loss: Any) -> UpdateStats:
        flat = batch.flat_rows()
        policy = [self.measure(row.token_ids) for row in flat]
        stored = [None if row.replayed is None else row.replayed.behaviour_logprobs for row in flat]
        behaviour = [now if old is None else old for now, old in zip(policy, stored, strict=True)]
        rows = [ForwardRow(range(PROMPT_TOKENS), row.token_ids) for row in flat]
        began = time.perf_counter()
        if self.as_experience:
            self.as_experience(batch, rows, behaviour)
        seconds = {"time/experience": time.perf_counter() - began}
        return UpdateStats(policy, behaviour, self.rng.random(len(flat)).tolist(), seconds)


def paper(steps: int, step_seconds: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    as_experience = None
    if importlib.util.find_spec("openrlhf"):
        stack()
        from exgrpo_orlhf.engines.openrlhf.experience_maker import as_experience
    engine = MadeUp(as_experience)
    x = replace(config.load(["base.gin"], BINDINGS), verifier=engine)
    b, k = x.settings.questions_per_step, x.settings.group_size
    with tempfile.TemporaryDirectory(prefix="openrlhf-overhead-") as folder:
        run = TrainingRun(x, lambda checkpoint: engine, Path(folder), "", {})
        for i, question in enumerate(x.questions.load()[:STORED_QUESTIONS]):
            seen = k - i % 2  # rollouts: fresh K, replayed K − 1; else the few that are replayed first would come again
            run.buffer.record(question.id, Fraction(1 + i // 2 % (seen - 1), seen), 0)
            stored = [engine.tokens() for _ in range(STORED)]
            run.buffer.store([(question.id, Trajectory(ids, engine.measure(ids), 1.0, 0)) for ids in stored])
        tokens = run.buffer.n_tokens
        rows = []
        for step in range(1, WARM + steps + 1):
            row = {name.removeprefix("time/"): value for name, value in run._step(step).items() if "time/" in name}
            row["choose"] = row["score"] - engine.scoring
            laps = ("plan", "score", "rollout", "grade", "assemble", "update", "store")
            row |= {"metrics": row["step"] - sum(row[lap] for lap in laps), "scored_tokens": engine.scored}
            rows.append({**row, "own": sum(row[part] for part in OWN)})
        run.tracker.close("FINISHED")
    median = medians(rows)
    scoring = median["scored_tokens"] * 2 * PARAMETERS / (STEP_GPUS * PEAK * SHARE)
    saved = x.mixer.rho * b * MEAN_LENGTH / (STEP_GPUS * GENERATED)
    share = median["own"] / step_seconds
    met = bool(share < GOAL)
    print(
        f"\nB = {b}, K = {k}, {STORED_QUESTIONS * STORED:,} trajectories of {tokens / 1e6:.0f} M tokens stored: ",
        end="",
    )
    print(f"milliseconds, medians of {steps} steps")
    for part in (*OWN, "experience", "metrics"):
        absent = part == "experience" and as_experience is None
        print(f"{part:12}{'  OpenRLHF is not installed' if absent else f'{median[part] * 1000:10.1f}'}")
    print(
        f"reckoned: scoring {median['scored_tokens']:,.0f} tokens · 2 · {PARAMETERS:g} FLOP, {STEP_GPUS} GPUs at "
        f"{SHARE:.0%} of {PEAK:g} FLOP/s: {scoring:.1f} s, {scoring / step_seconds:.1%} of a step of {step_seconds:g} s; "
        f"{float(x.mixer.rho * b):g} of {b * k} responses less to generate: {float(saved):.1f} s"
    )
    print(
        f"{'met' if met else 'MISSED'}: {' + '.join(OWN)} take {median['own'] * 1000:.1f} ms, {share:.3%} of a step "
        f"(goal {GOAL:.0%})"
    )
    reckoned = {"scoring": scoring, "saved": float(saved)}
    return {"steps": steps, "step_seconds": step_seconds, "medians": median, **reckoned, "share": share, "met": met}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--paper", action="store_true")
    parser.add_argument("--steps", type=int, default=20, help="counted steps of each (default 20)")
    parser.add_argument("--step-seconds", type=float, default=STEP_SECONDS, help="of a 7B step (default: 8 H100)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)  # what --bench starts
    parser.add_argument("--set", action="append", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plain:
        run_plain(arguments.plain, arguments.set)
        return 0
    neither = not (arguments.bench or arguments.paper)
    can = not torch.cuda.is_available() and importlib.util.find_spec("openrlhf") is not None
    if arguments.bench and not can:
        parser.error("--bench needs the OpenRLHF stack (make openrlhf-cpu) on a machine without CUDA")
    figures = {}
    if arguments.bench or (neither and can):
        figures["bench"] = bench(WARM + arguments.steps)
    if arguments.paper or neither:
        figures["paper"] = paper(arguments.steps, arguments.step_seconds)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if figures.get("paper", {}).get("met", True) else 1


if __name__ == "__main__":
    sys.exit(main())
