#!/usr/bin/env python
"""Make a page of a run's experience: what was replayed, what is stored, and what became of each question.

    python scripts/explore.py runs/x                      # writes runs/x/explore.html
    python scripts/explore.py runs/x --html page.html

The page is one file that needs no network. It is made of the run's decisions.jsonl and rollouts.jsonl, and of the
replay buffer and the tokenizer of its newest checkpoint. No model is loaded; the run may still be training. One that
was killed is marked as killed in MLflow, which calls it running.
Exit status: 0, or 2 if there is nothing to show.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from exgrpo_orlhf.io import terminal
from exgrpo_orlhf.io.files import write
from exgrpo_orlhf.io.paths import WORKPLACE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder, such as runs/x")
    parser.add_argument("--html", type=terminal.output_file, metavar="FILE", help="the page (default RUN/explore.html)")
    arguments = parser.parse_args()
    terminal.messages()
    from exgrpo_orlhf import config
    from exgrpo_orlhf.study.run_page import explore
    from exgrpo_orlhf.tracking.client import mark_killed

    try:
        out = arguments.html or terminal.output_file(str(arguments.run / "explore.html"))
    except argparse.ArgumentTypeError as error:
        print(f"error: {error}; name another file by --html", file=sys.stderr)
        return 2
    notes, questions = [], []
    try:
        experiment = config.load([arguments.run / "config.gin"])
        mark_killed(experiment.tracking, f"sqlite:///{WORKPLACE / 'mlflow.db'}", [arguments.run])
        questions = experiment.questions.load()
    except (ValueError, OSError, ImportError) as error:
        notes = [f"The run's questions could not be loaded; only logged rollouts have a prompt ({error})"]
    try:
        write(out, explore(arguments.run, questions, notes))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
