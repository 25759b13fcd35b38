#!/usr/bin/env python
"""Kills and damage at random moments and places, against whole runs.

    python benchmarks/campaign.py                          # 30 minutes, another seed each time
    python benchmarks/campaign.py --minutes 5 --seed 7

Goal: nothing silent, nothing lost.

Kills: a run is killed by SIGKILL up to three times, at a uniform moment, at a call that puts a file on the disk, or at
a rename, just before it or just after it. It is resumed each time, and its end is compared with that of an undisturbed
run: weights, optimiser, replay buffer, trainer's state, metrics and log of decisions. Silent: another end. Lost: it
could not be resumed, or a complete checkpoint was gone.

Damage: every file of a checkpoint gets a flipped bit, is truncated, emptied, deleted, or replaced by another
checkpoint's; folders are renamed, mixed and taken from another run. Detected: the resumed run ends at once with a line
that names the file. Silent: it goes on. Lost: it ends in another way, or does not go on from the older checkpoint to
the end of the undisturbed run. Where OpenRLHF is installed, the files of its checkpoint too (not at the small size, nor
with --local).

Models: the same damage to each file of a model in the cache (detected: it is named, and made again as it was), and of
the base model of a run with LoRA that is resumed; and a model that lacks a tensor, or holds one under another name,
with a dimension less, or with a NaN, for each of its tensors; adapters likewise (detected: refused in one line).

Questions: a file with a row that lacks a field, holds none, or contradicts another one, one that is cut, and one with a
byte order mark (detected: refused with a line that names the file, or read as it was). Tokenizers whose class, model
type and tokenizer.json are drawn (detected: 50 random texts are encoded and decoded as by that file, or transformers
refuses it too).
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from command_line import TINY, finish, make_parser
from damage import FILES, FOLDERS, Outcome, Problem, damage_file, damage_folder, model_trials
from kills import count_calls, first_difference, kill_at_call
from question_damage import question_trials
from tokenizer_damage import tokenizer_trials

from exgrpo_orlhf import checkpoints, config
from exgrpo_orlhf.checkpoints import UnusableCheckpoint
from exgrpo_orlhf.io.paths import PROJECT
from exgrpo_orlhf.show.tables import aligned
from exgrpo_orlhf.training.run import train

STEPS = 8
SMALL_SEED = 1
BINDINGS = [
    *TINY,
    *("ModularChains.count = 24", "validation/ModularChains.count = 10", "validation/ModularChains.operands = (3, 4)"),
    *("MAX_RESPONSE_TOKENS = 24", f"train.steps = {STEPS}", "train.questions_per_step = 8", "train.group_size = 4"),
    *("train.eval_every = 4", "train.save_every = 2", "Optimizer.learning_rate = 1e-3"),
    *("ReplayMixer.start_at_accuracy = None", "Tracking.enabled = False"),
]
AHEAD = "episodes, one step ahead"
VARIANTS = {
    "replay": [],
    "no replay yet": ["ReplayMixer.start_at_accuracy = 0.95"],
    "limits and two optimiser steps": [
        *("ReplayBuffer.per_question = 2", "ReplayBuffer.max_age = 3", "RetirementPolicy.revisits_every = 3"),
        *("Optimizer.steps_per_batch = 2", "train.keep = 1", "train.best_metric = 'eval/greedy_accuracy'"),
    ],
    AHEAD: [
        *("train.generate_ahead = True", "MixedPolicyLoss.max_fresh_weight = 2.0"),
        f"Environment.path = {str(Path(__file__).with_name('slipping_calculator.py'))!r}",
        *("Environment.stop = ('=',)", "Environment.timeout = 120.0"),
    ],
}
CALLS = {"at a sync": ("fsync",), "at a rename": ("rename", "replace")}
KILLS = ("at a uniform moment", *CALLS)


@dataclass
class Count:
    """tried: kills or damages; detected: None where there is nothing to detect"""

    tried: int = 0
    detected: int | None = 0
    silent: int = 0
    lost: int = 0


@dataclass
class Campaign:
    """straight: by variant an undisturbed run, its seconds, and how often it called what CALLS names"""

    folder: Path
    rng: random.Random
    straight: dict[str, tuple[Path, float, dict[str, int]]] = field(default_factory=dict)
    counts: dict[str, Count] = field(default_factory=dict)
    trials: int = 0

    # -- processes ----------------------------------------------------------------------------------------------------

    def start(self, run: Path, variant: str, prepare: Callable[[], None] = lambda: None, **how: Any) -> int:
        """Train in a fork of this process, which has imported everything. Its output goes to <run>.log."""
        sys.stdout.flush()
        if pid := os.fork():
            return pid
        status = 1
        try:
            with run.with_suffix(".log").open("wb") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            prepare()
            files = ["toy.gin", "engines/openrlhf_cpu.gin"] if variant == "openrlhf" else ["toy.gin"]
            experiment = config.load(files, [*BINDINGS, *VARIANTS.get(variant, [])])
            train(experiment, run, tracking_uri="unused", tags={}, **{"resume": True, **how})
            status = 0
        except (UnusableCheckpoint, ValueError) as error:
            print(error, flush=True)
            status = 2
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)

    def trained(self, run: Path, variant: str, **how: Any) -> int:
        return waited(self.start(run, variant, **how))

    def begin(self) -> None:
        """The undisturbed runs."""
        for late in ("training", "engines.local"):  # what a run imports late, so that no fork spends its time on it
            importlib.import_module(f"exgrpo_orlhf.{late}")
        for number, variant in enumerate(VARIANTS):
            run = self.folder / f"straight{number}"
            calls: dict[str, int] = {}
            for attempt in (0, 1):  # the first one may warm the model up
                shutil.rmtree(run, ignore_errors=True)
                began = time.monotonic()
                counted = self.folder / "calls.json"
                if self.trained(run, variant, prepare=partial(count_calls, counted, CALLS)):
                    raise RuntimeError(run.with_suffix(".log").read_text())
                calls, seconds = json.loads(counted.read_text()), time.monotonic() - began
                if attempt == 0 and number > 0:
                    break
            self.straight[variant] = run, seconds, calls

    def judge(self, kind: str, what: str, trial: Callable[[], Problem | None]) -> None:
        """Count one damage. trial: None where it was detected"""
        self.trials += 1
        count = self.counts.setdefault(kind, Count())
        count.tried += 1
        if problem := trial():
            self.report(count, f"{kind}, {what}", *problem)
        else:
            count.detected = (count.detected or 0) + 1

    def report(self, count: Count, what: str, outcome: Outcome, log: str) -> None:
        setattr(count, outcome, getattr(count, outcome) + 1)
        print(f"{outcome.upper()}: trial {self.trials}, {what}\n{log}", flush=True)

    # -- kills --------------------------------------------------------------------------------------------------------

    def kill(self, kind: str) -> None:
        """Kill a run up to three times, let it end, compare."""
        self.trials += 1
        rng, variant = self.rng, self.rng.choice([*VARIANTS])
        straight, seconds, calls = self.straight[variant]
        run, count = self.folder / f"run{self.trials}", self.counts.setdefault(f"killed {kind}", Count(detected=None))
        newest, what = 0, f"killed {kind}, {variant}"
        for _ in range(rng.randint(1, 3)):
            number, after, pause = rng.randint(1, calls.get(kind, 1)), rng.random() < 0.5, rng.uniform(0, seconds)
            prepare = partial(kill_at_call, CALLS[kind], number, after) if kind in CALLS else lambda: None
            process = self.start(run, variant, prepare)
            if kind not in CALLS:
                time.sleep(pause)
                os.kill(process, signal.SIGKILL)
            status = waited(process)
            what += f", at call {number} ({'after' if after else 'before'} it)" if kind in CALLS else f", {pause:.3f} s"
            count.tried += status == -signal.SIGKILL
            last = max(checkpoints.find(run), default=0)
            if status not in (0, -signal.SIGKILL) or last < newest:
                self.report(count, what, "lost", run.with_suffix(".log").read_text())
                return
            newest = last
            if status == 0:
                break
        if self.trained(run, variant):
            self.report(count, what, "lost", run.with_suffix(".log").read_text())
        elif difference := first_difference(run, straight, STEPS):
            self.report(count, f"{what}: {difference} differs", "silent", run.with_suffix(".log").read_text())
        remove(run)

    # -- damage -------------------------------------------------------------------------------------------------------

    def damages(self, variant: str, original: Path, small: bool) -> Iterator[tuple[str, str]]:
        """(how, which file or folder) for each file of the newest checkpoint of a run; of one that generates ahead, for
        those that others do not have. small: one kind of damage to a file instead of all"""
        newest = original / f"checkpoint-{max(checkpoints.find(original))}"
        files = [path for path in (newest / "ahead" if variant == AHEAD else newest).rglob("*") if path.is_file()]
        for i, path in enumerate(sorted(files)):
            kinds = [[*FILES][i % len(FILES)]] if small else FILES
            yield from ((how, path.relative_to(newest).as_posix()) for how in kinds)
        if variant == "replay":
            yield from (("folders", what) for what in FOLDERS)

    def damaged(self, variant: str, original: Path, how: str, name: str, *, go_on: bool) -> Problem | None:
        """Damage a copy of a finished run and resume it. go_on: then from the older checkpoint, to the end"""
        run = self.folder / f"run{self.trials}"
        shutil.copytree(original, run, symlinks=True)
        older, newest = [*checkpoints.find(run).values()][-2:]
        if how == "folders":
            named = damage_folder(self.rng, newest, older, name, self.straight["no replay yet"][0])
        else:
            named = damage_file(self.rng, newest, older, how, name)
        status, log = self.trained(run, variant), run.with_suffix(".log").read_text()
        problem: Problem | None = None
        if status != 2 or str(named) not in log.strip().rpartition("\n")[2]:
            problem = "lost" if status else "silent", log
        elif go_on and (
            self.trained(run, variant, resume_from=older.name)
            or first_difference(run, self.straight[variant][0], STEPS)
        ):
            problem = "lost", f"then from {older.name}\n{run.with_suffix('.log').read_text()}"
        remove(run)
        return problem

    # -- models -------------------------------------------------------------------------------------------------------

    def models(self, small: bool) -> None:
        """Damage to a cached model, to the base model of an adapter, and models that are not whole."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:  # of each round
            base = f"PretrainedModel.path = {str(Path(folder, 'base'))!r}"
            VARIANTS["lora"] = ["Work.model = @PretrainedModel()", base, "LoRA.rank = 2"]
            train = lambda run: self.trained(run, "lora")
            for kind, what, trial in model_trials(Path(folder), self.rng, train, small):
                self.judge(kind, what, trial)
        del VARIANTS["lora"]

    def inputs(self, tokenizers: int) -> None:
        """Damage to files of questions, and tokenizers."""
        trials = question_trials(self.folder, self.rng), tokenizer_trials(self.folder, self.rng, tokenizers)
        for kind, what, trial in itertools.chain(*trials):
            self.judge(kind, what, trial)

    def show(self) -> None:
        """The table of docs/dev/reliability.md."""
        rows = [
            (name, str(c.tried), "–" if c.detected is None else str(c.detected), str(c.silent), str(c.lost))
            for name, c in sorted(self.counts.items())
        ]
        print("\n".join(aligned([("", "tried", "detected", "silent", "lost"), *rows], 1)), flush=True)


def waited(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def remove(run: Path) -> None:
    shutil.rmtree(run, ignore_errors=True)
    run.with_suffix(".log").unlink(missing_ok=True)


def openrlhf_run(folder: Path) -> Path:
    """A run of three steps with OpenRLHF, in a process of its own."""
    run = folder / "openrlhf"
    command = [sys.executable, PROJECT / "scripts" / "train.py", "--out", run]
    command += ["--gin", "toy.gin", "--gin", "engines/openrlhf_cpu.gin"]
    for binding in [*BINDINGS, "train.steps = 3", "train.save_every = 1", "train.eval_every = None"]:
        command += ["--set", binding]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return run


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default 30)")
    seeds = "of what is random (default: another one each time; printed)"
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help=seeds)
    parser.add_argument("--local", action="store_true", help="leave OpenRLHF out, also where it is installed")
    arguments = parser.parse_args()
    seed = SMALL_SEED if arguments.small else arguments.seed
    print(f"seed {seed}", flush=True)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="peft")  # of each adapter that lacks a tensor
    end = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as temporary:
        campaign = Campaign(Path(temporary), random.Random(seed))
        campaign.begin()
        local = [(variant, campaign.straight[variant][0]) for variant in ("replay", AHEAD)]
        originals = [*local]
        if importlib.util.find_spec("openrlhf") and not (arguments.small or arguments.local):
            originals.append(("openrlhf", openrlhf_run(campaign.folder)))
        rounds = 0
        try:
            while rounds < (2 if arguments.small else 1) or (time.monotonic() < end and not arguments.small):
                for variant, original in originals if rounds == 0 else local:
                    for how, name in campaign.damages(variant, original, arguments.small):
                        # The way on is the same whatever the damage was: one in ten is enough.
                        go_on = variant != "openrlhf" and campaign.trials % 10 == 0
                        trial = partial(campaign.damaged, variant, original, how, name, go_on=go_on)
                        campaign.judge(f"{'openrlhf' if variant == 'openrlhf' else 'local'}: {how}", name, trial)
                campaign.models(arguments.small)
                campaign.inputs(5 if arguments.small else 30)
                for _ in range(1 if arguments.small else 10):
                    for kind in KILLS:
                        campaign.kill(kind)
                rounds += 1
        finally:  # after Ctrl-C too
            campaign.show()
    counts = {name: vars(c) for name, c in campaign.counts.items()}
    tried, silent, lost = (sum(count[name] for count in counts.values()) for name in ("tried", "silent", "lost"))
    figures = {"seed": seed, "counts": counts, "met": silent == lost == 0}
    return finish(arguments, figures, f"{tried} kills and damages, {silent} silent, {lost} lost (goal 0 and 0)")


if __name__ == "__main__":
    sys.exit(main())
