#!/usr/bin/env python
"""What experience replay costs in a step of the OpenRLHF engine, against OpenRLHF's own on-policy step.

`--cpu`, on a machine without CUDA that has the stack (make openrlhf-cpu): three runs, one after the other, each in a
process of its own: OpenRLHF's own program, our engine without replay, our engine with it from the first step. The same
tiny chain model, B = 32, K = 8, lengths, layout (one rank, one vLLM engine), stand-ins for CUDA, and a learning rate so
small that responses stay as they are. No goal: a model this small has nothing to hide overheads behind. `measure` is of
log-probs before the update, `rest` what no part claims, such as making and sending the experience; `score` includes
choosing, `assemble` observing. The last two columns differ by replay. Other work on the cores shows.

`--paper`: the training loop's own step at the paper's shape, with made-up responses, grades, log-probs and scores in
the engine's place: B = 128, K = 8, ρ = 0.5, responses of 2,000 tokens in the mean (lognormal, at most 8,192), 46,000
questions, 4 trajectories stored for 20,000 of them. Goal: plan + score + assemble + store take less than 1 % of a step
of a 7B model on 8 GPUs. `experience` (rows in OpenRLHF's form) and `metrics` are there without replay too. Scoring's
forward passes are estimated in FLOP; against them stand the responses that replay saves.

Without either, both, the CPU layout where it can run. The first 3 steps never count.
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
from command_line import TINY, finish, make_parser

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.engine import UpdateStats
from exgrpo_orlhf.engines.openrlhf import launch
from exgrpo_orlhf.engines.rows import ForwardRow
from exgrpo_orlhf.records import Grade, Measured, MixedBatch, Question, Rollout, RolloutGroup, Trajectory
from exgrpo_orlhf.replay import Plan
from exgrpo_orlhf.rewards import Verifier
from exgrpo_orlhf.training.preparation import prepare

ROOT = Path(__file__).resolve().parent.parent

WARM = 3
PARTS = ("plan", "score", "rollout", "grade", "assemble", "measure", "train", "sync", "store")
# Our name of a part → OpenRLHF's own clock for the same work. It grades while it generates.
SAME_WORK = {"rollout": "generation", "measure": "make_experience", "train": "ppo_train", "sync": "broadcast"}
COUNTS = {"response_tokens": "rollout", "actual_share": "replay", "candidates_scored": "replay"}
LAYOUT = "engines/openrlhf_cpu.gin"
BOTH = ("train.eval_every = None", "ReplayMixer.start_at_accuracy = None", "Tracking.enabled = False")
ON_CPU = ("Work.model = @PretrainedModel()", "Work.validation = None", "Optimizer.learning_rate = 1e-7", *BOTH)
PAPER = ("ModularChains.count = 46000", "ModularChains.operands = (6, 7)", "train.questions_per_step = 128", *BOTH)
REWARD = """
import torch
def reward_func(queries, prompts, labels):
    responses = [query[len(prompt):].split("<")[0] for query, prompt in zip(queries, prompts)]
    rewards = torch.tensor([float(r.rpartition("#")[2].strip() == a) for r, a in zip(responses, labels)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
"""


def run_plain(folder: Path, bindings: list[str]) -> None:
    """OpenRLHF's own training with the arguments that our engine would run with; writes metrics.jsonl as that does."""
    x = config.load(["baselines/on_policy.gin", LAYOUT], bindings)
    launch.prepare(x.openrlhf)
    from exgrpo_orlhf.engines.openrlhf.driver import connected, ppo_trainer, ray, train_ppo_ray

    class Noted(ppo_trainer.PPOTrainer.__ray_metadata__.modified_class):
        ended = math.nan

        def save_logs_and_checkpoints(self, step: int, logs: Any = None, states: Any = None) -> None:
            began, self.ended = self.ended, time.perf_counter()
            row = {f"time/{ours}": logs[f"timing/{theirs}"] for ours, theirs in SAME_WORK.items()}
            row |= {"time/step": self.ended - began, "rollout/response_tokens": logs["rollout/response_length_mean"]}
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            super().save_logs_and_checkpoints(step, logs, states)

    args = launch.parse(x, x.model.prepare(), folder / "checkpoints", resume=False)
    lines = [json.dumps({"input": question.prompt, "label": question.answer}) for question in x.questions.load()]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "reward.py").write_text(REWARD)
    args.data.prompt_dataset, args.data.input_key, args.data.label_key = f"{folder}/prompts.jsonl", "input", "label"
    args.reward.remote_url, args.ckpt.output_dir = f"{folder}/reward.py", f"{folder}/model"
    args.train.num_episodes = 1
    ppo_trainer.PPOTrainer = ray.remote(Noted)
    with connected(x.openrlhf, launch.needed_gpus(args)):
        train_ppo_ray.train(args)


def call(folder: Path, *arguments: str) -> list[dict[str, float]]:
    """Seconds and counts of the steps that a process notes in `folder`. Raises RuntimeError with its last words."""
    folder.mkdir()
    environment = {**os.environ, "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    steps = []
    for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if "time/step" in row:  # row 0 is the policy as it came
            parts = {part: row.get(f"time/{part}", 0.0) for part in PARTS}
            parts["rest"], parts["step"] = row["time/step"] - sum(parts.values()), row["time/step"]
            steps.append({**parts, **{name: row.get(f"{group}/{name}", 0.0) for name, group in COUNTS.items()}})
    return steps


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows[WARM:]) for name in rows[0]}


def on_cpu(steps: int, small: bool) -> dict[str, Any]:
    steps += WARM
    bindings = TINY if small else []
    model = config.load(["base.gin"], bindings).model.prepare()
    more = f"PretrainedModel.path = '{model}'", f"train.steps = {steps}", f"ModularChains.count = {32 * steps}"
    given = [part for binding in (*bindings, *ON_CPU, *more) for part in ("--set", binding)]
    with tempfile.TemporaryDirectory(prefix="openrlhf-overhead-") as temporary:
        runs = {"OpenRLHF": call(plain := Path(temporary) / "plain", __file__, "--plain", str(plain), *given)}
        for name, gin in (("on-policy", "baselines/on_policy.gin"), ("replay", "base.gin")):
            program = (f"{ROOT}/scripts/train.py", "--gin", gin, "--gin", LAYOUT, "--out", f"{temporary}/{name}")
            runs[f"ours, {name}"] = call(Path(temporary) / name, *program, *given)
    columns = {name: medians(rows) for name, rows in runs.items()}
    step = columns["OpenRLHF"]["step"]
    print(f"milliseconds, medians of {steps - WARM} steps, and times OpenRLHF's step")
    print(f"{'':18}" + "".join(f"{name:>24}" for name in columns))
    for part in (*PARTS, "rest", "step"):
        print(f"{part:18}" + "".join(f"{c[part] * 1000:15.1f}{c[part] / step:9.3f}" for c in columns.values()))
    for count in COUNTS:
        print(f"{count:18}" + "".join(f"{c[count]:15.2f}{'':9}" for c in columns.values()))
    return {"medians": columns, "steps": runs}


STORED_QUESTIONS, STORED, MEAN_LENGTH, SIGMA, MAX_LENGTH, PROMPT_TOKENS = 20_000, 4, 2000, 0.7, 8192, 300
GOAL, OWN = 0.01, ("plan", "score", "assemble", "store")
# docs/cluster.md estimates 210 GPU-hours on H100 for 700 steps on 8 GPUs: 210 / 700 / 8 · 3600 s. On A100, with 550
# hours, a step has 354 s: the easier goal. Parameters, peak, share and generated tokens a second are from there too.
STEP_SECONDS, STEP_GPUS, PARAMETERS, PEAK, SHARE, GENERATED = 135.0, 8, 7.62e9, 989e12, 0.3, 4000
RIGHT, WRONG = Grade("correct", 1.0), Grade("wrong", 0.0)


class Graded(Verifier):
    """Responses come with their grades."""

    def grade_groups(self, groups: Any, decode: Any, earlier: Any = ()) -> list[RolloutGroup]:
        return list(groups)


class MadeUp:
    """Stands in the engine's place: random tokens, log-probs, scores and grades."""

    prompts = SimpleNamespace(introduce=lambda questions, asked: {}, fingerprint=lambda: "benchmark")
    whole_batches, generates_beside, decode, model_path = True, False, None, "in no folder"

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

    def score(self, candidates: Any) -> dict[Question, list[Measured]]:
        self.scored = sum(PROMPT_TOKENS + len(t) for stored in candidates.values() for t in stored)
        made_up = lambda: Measured(self.logprobs[0, :1], self.rng.random())
        return {question: [made_up() for _ in stored] for question, stored in candidates.items()}

    def rollout(self, plan: Plan, k: int) -> list[RolloutGroup]:
        one = lambda: Rollout(self.tokens(), "stop", (RIGHT, WRONG)[self.rng.integers(2)])
        of = [*((question, k) for question in plan.fresh), *((question, k - 1) for question in plan.replayed)]
        return [RolloutGroup(question, tuple(one() for _ in range(n)), n < k) for question, n in of]

    def update(self, batch: MixedBatch, loss: Any) -> UpdateStats:
        flat = batch.flat_rows()
        policy = [self.measure(row.token_ids) for row in flat]
        behaviour = [r.trajectory.behaviour_logprobs if r.trajectory else p for r, p in zip(flat, policy, strict=True)]
        rows = [ForwardRow(range(PROMPT_TOKENS), row.token_ids) for row in flat]
        began = time.perf_counter()
        if self.as_experience:
            self.as_experience(batch, rows, behaviour)
        taken = time.perf_counter() - began if self.as_experience else 0.0
        return UpdateStats(policy, behaviour, self.rng.random(len(flat)).tolist(), {"time/experience": taken})


def paper(steps: int, step_seconds: float, small: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    bindings = [*PAPER, "ModularChains.count = 1000"] if small else PAPER
    x, as_experience = config.load(["base.gin", LAYOUT], bindings), None
    if importlib.util.find_spec("openrlhf"):
        launch.prepare(x.openrlhf)
        from exgrpo_orlhf.engines.openrlhf.experience_maker import as_experience
    b, k, engine = x.settings.questions_per_step, x.settings.group_size, MadeUp(as_experience)
    with tempfile.TemporaryDirectory(prefix="openrlhf-overhead-") as folder:
        run = prepare(replace(x, verifier=Graded()), lambda checkpoint: engine, Path(folder), "", {})
        for i, question in enumerate(x.questions.load()[: 500 if small else STORED_QUESTIONS]):
            seen = k - i % 2  # rollouts: fresh K, replayed K − 1; else the few that are replayed first would come again
            run.buffer.record(question.id, Fraction(1 + i // 2 % (seen - 1), seen), 0)
            stored = [engine.tokens() for _ in range(STORED)]
            run.buffer.store([(question.id, Trajectory(ids, engine.measure(ids), 1.0, 0)) for ids in stored])
        rows = []
        for _ in range(WARM + steps):
            row = {name.removeprefix("time/"): value for name, value in run.step().items() if "time/" in name}
            row["metrics"] = row["step"] - sum(row[lap] for lap in (*OWN, "rollout", "grade", "update"))
            rows.append({**row, "own": sum(row[part] for part in OWN), "scored_tokens": engine.scored})
        run.tracker.close("FINISHED")
    median = medians(rows)
    scoring = median["scored_tokens"] * 2 * PARAMETERS / (STEP_GPUS * PEAK * SHARE)
    spared = float(x.mixer.rho * b)
    saved = spared * MEAN_LENGTH / (STEP_GPUS * GENERATED)
    share = median["own"] / step_seconds
    print(f"milliseconds, medians of {steps} steps; {run.buffer.n_tokens / 1e6:.0f} M tokens stored")
    for part in (*OWN, "experience", "metrics"):
        print(f"{part:12}{median[part] * 1000:10.1f}" if median[part] else f"{part:12}  OpenRLHF is not installed")
    print(
        f"estimated for {STEP_GPUS} GPUs: scoring {median['scored_tokens']:,.0f} tokens · 2 · {PARAMETERS:g} FLOP at "
        f"{SHARE:.0%} of {PEAK:g} FLOP/s takes {scoring:.1f} s, {scoring / step_seconds:.1%} of a step of "
        f"{step_seconds:g} s; {spared:g} of {b * k} responses less to generate save {saved:.1f} s"
    )
    return {"medians": median, "scoring": scoring, "saved": saved, "share": share, "steps": rows}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--paper", action="store_true")
    parser.add_argument("--steps", type=int, default=20, help="counted steps of each (default 20)")
    parser.add_argument("--step-seconds", type=float, default=STEP_SECONDS, help="of a 7B step (default: 8 H100)")
    for internal in ("--plain", "--set"):  # what --cpu starts
        parser.add_argument(internal, action="append", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plain:
        run_plain(Path(arguments.plain[0]), arguments.set)
        return 0
    neither = not (arguments.cpu or arguments.paper)
    can = not torch.cuda.is_available() and importlib.util.find_spec("openrlhf") is not None
    if arguments.cpu and not can:
        parser.error("--cpu needs the OpenRLHF stack (make openrlhf-cpu) on a machine without CUDA")
    steps = 1 if arguments.small else arguments.steps
    figures: dict[str, Any] = {"met": True}
    summary = "the runs on the CPU have no goal"
    if arguments.cpu or (neither and can):
        figures["cpu"] = on_cpu(steps, arguments.small)
    if arguments.paper or neither:
        figures["paper"] = paper(steps, arguments.step_seconds, arguments.small)
        own, share = figures["paper"]["medians"]["own"], figures["paper"]["share"]
        figures["met"] = arguments.small or share < GOAL
        summary = f"{' + '.join(OWN)} take {own * 1000:.1f} ms, {share:.3%} of a step (goal {GOAL:.0%})"
    return finish(arguments, figures, summary)


if __name__ == "__main__":
    sys.exit(main())
