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
with a dimension less, or with a NaN, for each of its tensors (detected: refused in one line).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from command_line import TINY, finish, make_parser
from kills import count_calls, different, kill_at_call
from safetensors.torch import load_file, save_file

from exgrpo_orlhf import checkpoints, config
from exgrpo_orlhf.checkpoints import UnusableCheckpoint, manifest
from exgrpo_orlhf.evaluation.results_table import aligned
from exgrpo_orlhf.files import write
from exgrpo_orlhf.models.pretrained import PretrainedModel
from exgrpo_orlhf.models.tiny_models import ChainModel
from exgrpo_orlhf.paths import PROJECT
from exgrpo_orlhf.training.run import train

STEPS = 8
SMALL_SEED = 1
HEADING = "## The latest campaign\n"
BINDINGS = [
    *TINY,
    "ModularChains.count = 24",
    "validation/ModularChains.count = 10",
    "validation/ModularChains.operands = (3, 4)",
    "MAX_RESPONSE_TOKENS = 24",
    f"train.steps = {STEPS}",
    "train.questions_per_step = 8",
    "train.group_size = 4",
    "train.eval_every = 4",
    "train.save_every = 2",
    "Optimizer.learning_rate = 1e-3",
    "ReplayMixer.start_at_accuracy = None",
    "Tracking.enabled = False",
]
VARIANTS = {
    "replay": [],
    "no replay yet": ["ReplayMixer.start_at_accuracy = 0.95", "ReplayMixer.collect_before_start = True"],
    "limits and two optimiser steps": [
        "ReplayBuffer.per_question = 2",
        "ReplayBuffer.max_age = 3",
        "RetirementPolicy.returns_after = 3",
        "Optimizer.steps_per_batch = 2",
        "train.keep = 1",
        "train.best_metric = 'eval/greedy_accuracy'",
    ],
    "one step ahead": ["train.generate_ahead = True", "MixedPolicyLoss.max_fresh_weight = 2.0"],
}
CALLS = {"at a sync": ("fsync",), "at a rename": ("rename", "replace")}
KILLS = ("at a uniform moment", *CALLS)
CACHED: dict[str, Any] = {"operands": (3, 4), "steps": 2, "width": 32, "layers": 2}
DAMAGE = ("flip", "truncation", "emptying", "deletion", "swap")
FOLDERS = ("another name", "another's replay/", "another run", "edited counters")


@dataclass
class Count:
    """tried: kills or damages; detected: None where there is nothing to detect"""

    tried: int = 0
    detected: int | None = 0
    silent: int = 0
    lost: int = 0


@dataclass
class Campaign:
    """model: cached; straight: by variant an undisturbed run, its seconds, and how often it called what CALLS names"""

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
            files = ["base.gin", "engines/openrlhf_cpu.gin"] if variant == "openrlhf" else ["base.gin"]
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

    def say(self, what: str, outcome: str, run: Path) -> None:
        log = run.with_suffix(".log")
        print(f"{outcome.upper()}: trial {self.trials}, {what}\n{log.read_text() if log.exists() else ''}", flush=True)

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
            found = max(checkpoints.find(run), default=0)
            if status not in (0, -signal.SIGKILL) or found < newest:
                count.lost += 1
                self.say(what, "lost", run)
                return
            newest = found
            if status == 0:
                break
        if self.trained(run, variant):
            count.lost += 1
            self.say(what, "lost", run)
        elif wrong := different(run, straight, STEPS):
            count.silent += 1
            self.say(f"{what}: {wrong} differs", "silent", run)
        remove(run)

    # -- damage -------------------------------------------------------------------------------------------------------

    def damages(self, variant: str, original: Path) -> Iterator[tuple[str, str]]:
        """(how, which file or folder) for each file of the newest checkpoint of a run; of one that generates ahead, for
        those that others do not have."""
        newest = original / f"checkpoint-{max(checkpoints.find(original))}"
        for path in sorted((newest / "ahead" if variant == "one step ahead" else newest).rglob("*")):
            if path.is_file():
                yield from ((how, path.relative_to(newest).as_posix()) for how in DAMAGE)
        if variant == "replay":
            yield from (("folders", what) for what in FOLDERS)

    def damage(self, variant: str, original: Path, how: str, name: str, *, go_on: bool) -> None:
        """Damage a copy of a finished run and resume it. go_on: then from the older checkpoint, to the end"""
        self.trials += 1
        engine = "openrlhf" if variant == "openrlhf" else "local"
        run, count = self.folder / f"run{self.trials}", self.counts.setdefault(f"{engine}: {how}", Count())
        shutil.copytree(original, run, symlinks=True)
        older, newest = [*checkpoints.find(run).values()][-2:]
        named = self.do_damage(run, older, newest, how, name)
        count.tried += 1
        status, log = self.trained(run, variant), run.with_suffix(".log")
        lines = log.read_text().strip().splitlines()
        if status == 0:
            count.silent += 1
            self.say(f"{how} of {name}", "silent", run)
        elif status == 2 and lines and str(named) in lines[-1]:
            count.detected = (count.detected or 0) + 1
            resume = partial(self.trained, run, variant, resume_from=older.name)
            if go_on and (resume() or different(run, self.straight[variant][0], STEPS)):
                count.lost += 1
                self.say(f"{how} of {name}, then from {older.name}", "lost", run)
        else:
            count.lost += 1
            self.say(f"{how} of {name}", "lost", run)
        remove(run)

    # -- models -------------------------------------------------------------------------------------------------------

    def judge(self, kind: str, what: str, wrong: Callable[[], str | None]) -> None:
        """Count one damage. wrong: None where it was detected, else what went wrong: silent where it is ''"""
        self.trials += 1
        count = self.counts.setdefault(kind, Count())
        count.tried += 1
        if (problem := wrong()) is None:
            count.detected = (count.detected or 0) + 1
            return
        count.silent += problem == ""
        count.lost += problem != ""
        print(f"{'LOST' if problem else 'SILENT'}: trial {self.trials}, {kind}, {what}\n{problem}", flush=True)

    def models(self) -> None:
        """Damage to a cached model, to the base model of an adapter, and models that are not whole."""
        made = ChainModel(**CACHED, cache=str(self.folder / "cache")).prepare()
        names = sorted(path.name for path in made.iterdir())
        base, run = self.folder / "base", self.folder / "lora"
        shutil.copytree(made, base, ignore=shutil.ignore_patterns(manifest.NAME))
        VARIANTS["lora"] = ["Work.model = @PretrainedModel()", f"PretrainedModel.path = {str(base)!r}", "LoRA.rank = 2"]
        if self.trained(run, "lora"):
            raise RuntimeError(run.with_suffix(".log").read_text())
        for how in DAMAGE:
            for name in names:
                self.judge(f"cached model: {how}", name, partial(self.cached, made, how, name))
            for name in ("model.safetensors", "config.json"):
                self.judge(f"base of an adapter: {how}", name, partial(self.adapted, base, run, how, name))
        del VARIANTS["lora"]
        tensors = load_file(base / "model.safetensors")
        changes: dict[str, Callable[[str], dict[str, torch.Tensor]]] = {
            "a tensor missing": lambda name: {},
            "another name": lambda name: {f"x.{name}": tensors[name]},
            "a dimension less": lambda name: {name: tensors[name][:-1].clone()},
            "a NaN": lambda name: {name: torch.where(tensors[name] == tensors[name].max(), torch.nan, tensors[name])},
        }
        for what, change in changes.items():
            for name in tensors:
                changed = {other: one for other, one in tensors.items() if other != name} | change(name)
                save_file(changed, base / "model.safetensors", metadata={"format": "pt"})
                self.judge(f"incomplete model: {what}", name, partial(refused_model, base))

    def cached(self, made: Path, how: str, name: str) -> str | None:
        folder = self.folder / "damaged" / made.name
        shutil.copytree(made, folder)
        self.do_damage(self.folder, self.folder / "none", folder, how, name)
        with Heard(logging.getLogger("exgrpo_orlhf.cache")) as heard:
            ChainModel(**CACHED, cache=str(folder.parent)).prepare()
        same = all((folder / path.name).read_bytes() == path.read_bytes() for path in made.iterdir())
        shutil.rmtree(folder.parent)
        if not heard.lines:
            return ""
        return None if same and str(folder / name) in heard.lines[0] else f"{heard.lines}, made as it was: {same}"

    def adapted(self, base: Path, run: Path, how: str, name: str) -> str | None:
        data = (base / name).read_bytes()
        self.do_damage(self.folder, self.folder / "none", base, how, name)
        status, log = self.trained(run, "lora"), run.with_suffix(".log").read_text().strip()
        (base / name).write_bytes(data)
        if status == 0:
            return ""
        last = log.rpartition("\n")[2]
        return None if status == 2 and (str(base) in last or "the base model has changed" in last) else log

    def do_damage(self, run: Path, older: Path, newest: Path, how: str, name: str) -> Path:
        """Returns what the message must name."""
        rng, path = self.rng, newest / name
        if how == "folders":
            if name == "another name":
                return shutil.copytree(newest, run / "checkpoint-99")
            if name == "another's replay/":
                shutil.copytree(older / "replay", newest / "replay", dirs_exist_ok=True)
                return newest / "replay"
            if name == "another run":
                other = self.straight["no replay yet"][0] / newest.name
                shutil.rmtree(newest)
                return shutil.copytree(other, newest)
            path = newest / "trainer" / "state.json"
            state = json.loads(path.read_text())
            state["generated_tokens"] += rng.choice((-1, 1))
            path.write_text(json.dumps(state, indent=1) + "\n")
            return path
        data = path.read_bytes()
        if how == "flip":
            at = rng.randrange(len(data))
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        elif how == "truncation":
            os.truncate(path, rng.randrange(len(data)))
        elif how == "emptying":
            os.truncate(path, 0)
        elif how == "deletion":
            path.unlink()
        else:  # the same file of the older checkpoint; where that is equal, another file of this one
            same = older / name
            others = [file for file in newest.rglob("*") if file.is_file() and file.read_bytes() != data]
            swapped = same if same.is_file() and same.read_bytes() != data else rng.choice(sorted(others))
            shutil.copy(swapped, path)
        return path


def refused_model(folder: Path) -> str | None:
    try:
        PretrainedModel(str(folder)).prepare()
    except ValueError as error:
        return str(error) if "\n" in str(error) else None
    return ""


class Heard(logging.Handler):
    """The lines that a logger writes within the context."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self.logger, self.lines = logger, []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Heard:
        self.logger.addHandler(self)
        self.logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self)
        self.logger.propagate = True


def waited(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def remove(run: Path) -> None:
    shutil.rmtree(run, ignore_errors=True)
    run.with_suffix(".log").unlink(missing_ok=True)


def openrlhf_run(folder: Path) -> Path:
    """A run of three steps with OpenRLHF, in a process of its own."""
    run = folder / "openrlhf"
    command = [sys.executable, PROJECT / "scripts" / "train.py", "--out", run]
    command += ["--gin", "base.gin", "--gin", "engines/openrlhf_cpu.gin"]
    for binding in [*BINDINGS, "train.steps = 3", "train.save_every = 1", "train.eval_every = None"]:
        command += ["--set", binding]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return run


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default 30)")
    parser.add_argument("--seed", type=int, help="of what is random (default: another one each time; printed)")
    parser.add_argument("--local", action="store_true", help="leave OpenRLHF out, also where it is installed")
    parser.add_argument("--page", type=Path, metavar="FILE", help=f"write the table below {HEADING.strip()!r} there")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.randrange(10**6)
    seed = SMALL_SEED if arguments.small else seed
    print(f"seed {seed}", flush=True)
    torch.set_num_threads(1)
    end = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as temporary:
        campaign = Campaign(Path(temporary), random.Random(seed))
        campaign.begin()
        local = [(variant, campaign.straight[variant][0]) for variant in ("replay", "one step ahead")]
        originals = [*local]
        if importlib.util.find_spec("openrlhf") and not (arguments.small or arguments.local):
            originals.append(("openrlhf", openrlhf_run(campaign.folder)))
        rounds = 0
        while rounds == 0 or (time.monotonic() < end and not arguments.small):
            for variant, original in originals if rounds == 0 else local:
                for how, name in campaign.damages(variant, original):
                    # The way on is the same whatever the damage was: one in ten is enough.
                    go_on = variant != "openrlhf" and campaign.trials % 10 == 0
                    campaign.damage(variant, original, how, name, go_on=go_on)
            campaign.models()
            for _ in range(1 if arguments.small else 10):
                for kind in KILLS:
                    campaign.kill(kind)
            rounds += 1
    header = ("", "tried", "detected", "silent", "lost")
    rows = [
        (name, str(c.tried), "–" if c.detected is None else str(c.detected), str(c.silent), str(c.lost))
        for name, c in sorted(campaign.counts.items())
    ]
    print("\n".join(aligned([header, *rows], 1)))
    silent, lost = (sum(getattr(c, name) for c in campaign.counts.values()) for name in ("silent", "lost"))
    tried = sum(c.tried for c in campaign.counts.values())
    if arguments.page:
        size = "--small" if arguments.small else f"--minutes {arguments.minutes:g} --seed {seed}"
        write_page(arguments.page, [header, *rows], f"python benchmarks/campaign.py {size}")
    figures = {
        "seed": seed,
        "counts": {name: vars(c) for name, c in campaign.counts.items()},
        "met": silent == lost == 0,
    }
    return finish(arguments, figures, f"{tried} kills and damages, {silent} silent, {lost} lost (goal 0 and 0)")


def write_page(page: Path, rows: list[tuple[str, ...]], command: str) -> None:
    """Put the table in the place of the one under the page's last heading."""
    above, heading, _ = page.read_text(encoding="utf-8").partition(HEADING)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---|" + "---:|" * (len(rows[0]) - 1))
    write(page, above + heading + f"\n`{command}`:\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
