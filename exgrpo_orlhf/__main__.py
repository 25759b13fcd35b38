"""The project's scripts as commands: `exgrpo-train --gin quickstart.gin`, or `python -m exgrpo_orlhf train --gin …`."""

from __future__ import annotations

import runpy
import sys
from functools import partial

from .io.paths import PROJECT

SCRIPTS = {
    "train": "scripts/train.py",
    "bench": "evals/run_bench.py",
    "ablate": "scripts/ablate.py",
    "compare": "scripts/compare.py",
    "explore": "scripts/explore.py",
    "measure": "scripts/measure.py",
    "doctor": "scripts/doctor.py",
    "grade": "scripts/grade.py",
    "prepare-data": "scripts/prepare_data.py",
    "extend-positions": "scripts/extend_positions.py",
    "chat-template": "scripts/chat_template.py",
    "publish": "scripts/publish.py",
    "quickstart": "scripts/quickstart.py",
}


def run(command: str) -> None:
    """Run a script's main() with the arguments of this process, and end the process with its exit status."""
    sys.exit(runpy.run_path(str(PROJECT / SCRIPTS[command]))["main"]())


train, bench, ablate, compare, explore, measure, doctor, grade, *_others = (partial(run, name) for name in SCRIPTS)
prepare_data, extend_positions, chat_template, publish, quickstart = _others


def main() -> None:
    """`python -m exgrpo_orlhf COMMAND …`"""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command not in SCRIPTS:
        sys.exit(f"usage: python -m exgrpo_orlhf COMMAND …, where COMMAND is one of {', '.join(SCRIPTS)}")
    sys.argv = [f"exgrpo-{command}", *sys.argv[2:]]
    run(command)


if __name__ == "__main__":
    main()
