"""What the benchmarks share: --json and --small, the end, the folder of real questions, a tiny model."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

DATA = Path(os.environ.get("EXGRPO_TEST_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
# Instead of gin/toy.gin's: a model that is warmed up in seconds, and questions that it can answer.
TINY = [
    "ChainModel.operands = (3, 4)",
    "ChainModel.width = 32",
    "ChainModel.layers = 2",
    "ChainModel.steps = 300",
    "ModularChains.operands = (3, 4)",
]


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    small = "a size that takes seconds on a CPU and shows that the script runs: goals of time and memory do not count"
    parser.add_argument("--small", action="store_true", help=small)
    return parser


def finish(arguments: argparse.Namespace, figures: dict[str, Any], summary: str) -> int:
    """Print the summary, write the figures, return the exit status: 1 where figures["met"] is false."""
    met = "met (goals of time and memory do not count at the small size)" if arguments.small else "met"
    print(f"{met if figures['met'] else 'MISSED'}: {summary}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"small": arguments.small, **figures}, indent=1) + "\n", encoding="utf-8")
    return 0 if figures["met"] else 1
