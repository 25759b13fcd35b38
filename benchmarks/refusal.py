#!/usr/bin/env python
"""How much processor time passes until a mistake is refused, before torch, transformers and MLflow are imported.

    python benchmarks/refusal.py

Each mistake is given to scripts/train.py in a process of its own, five times (--small: once). Goal: 2 s of processor
time, user and system, in the median.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from command_line import finish, make_parser

TRAIN = Path(__file__).resolve().parent.parent / "scripts" / "train.py"
GOAL = 2.0  # seconds
MISTAKES = {
    "a line that is not gin": ["--gin", "{folder}/mine.yaml"],
    "an unknown name": ["--gin", "toy.gin", "--set", "ReplayMixer.roh=0.5"],
    "a value out of its range": ["--gin", "toy.gin", "--set", "ReplayMixer.rho=1.5"],
    "a file of questions that is not there": [
        *("--gin", "toy.gin", "--set", "Work.questions=@QuestionFile()"),
        *("--set", "QuestionFile.path='/nowhere.parquet'"),
    ],
    "a metric that is not measured": ["--gin", "toy.gin", "--set", "train.best_metric='eval/acuracy'"],
}


def main() -> int:
    parser = make_parser(__doc__)
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mine.yaml").write_text("train:\n  steps: 10\n")
        for name, words in MISTAKES.items():
            command = [sys.executable, str(TRAIN), *(word.format(folder=folder) for word in words), "--out", folder]
            figures[name] = statistics.median(seconds(command) for _ in range(1 if arguments.small else 5))
            print(f"{name}: {figures[name]:.2f} s", flush=True)
    slowest = max(figures.values())
    met = slowest <= GOAL or arguments.small
    return finish(arguments, {**figures, "met": met}, f"at most {slowest:.2f} s of processor time (goal {GOAL:g})")


def seconds(command: list[str]) -> float:
    """Processor time of a command that is refused with one line."""
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True)
    after = os.times()
    if done.returncode != 2 or len(done.stderr.strip().splitlines()) != 1:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return after.children_user + after.children_system - before.children_user - before.children_system


if __name__ == "__main__":
    sys.exit(main())
