#!/usr/bin/env python
"""Examine a machine or a cluster before a long run: does this layout of OpenRLHF train correctly here?

    python scripts/doctor.py --gin gin/engines/openrlhf_8gpu.gin
    python scripts/doctor.py --gin gin/paper/qwen2_5_math_7b.gin --out /shared/runs
    python scripts/doctor.py --gin gin/engines/openrlhf_8gpu.gin --only gradient

Takes --gin and --set as train.py does. The layout runs as it is, on a small random model of the bound architecture and
with questions made here. Prints a line for each check, with its figures, and what to do if it failed. Exit status: 0 if
all checks passed, 1 if one failed, 2 for a configuration that cannot be used. docs/cluster.md describes each check.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from pathlib import Path
from typing import TextIO

from exgrpo_orlhf.io import terminal
from exgrpo_orlhf.io.paths import WORKPLACE

ENVIRONMENT = dict(os.environ)  # before any library changes it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gin", action="append", required=True, metavar="FILE", help="gin file, as for train.py; base.gin is implied"
    )
    parser.add_argument("--set", action="append", default=[], metavar="BINDING", help="one more binding")
    parser.add_argument(
        "--out", type=Path, help="where runs will go (default: runs/ of the project); all nodes must see it"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="CHECK", help="make this check only; may be repeated"
    )
    parser.add_argument("--log", type=Path, help="output of OpenRLHF, Ray and vLLM (default: doctor.log in --out)")
    arguments = parser.parse_args()
    terminal.messages(logging.WARNING)
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")

    import transformers

    from exgrpo_orlhf.selftest.finding import Finding

    try:
        from exgrpo_orlhf.selftest.examination import CHECKS, examine
    except ModuleNotFoundError as error:
        print(f"error: {error}; the doctor examines OpenRLHF's layouts: pip install -e '.[openrlhf]'", file=sys.stderr)
        return 2
    if unknown := [name for name in arguments.only if name not in CHECKS]:
        parser.error(f"--only {unknown[0]}: there is no such check; the checks are {', '.join(CHECKS)}")
    transformers.utils.logging.disable_progress_bar()
    begin = time.monotonic()

    folder = arguments.out or WORKPLACE / "runs"
    log = arguments.log or folder / "doctor.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    screen = _apart(log)

    def report(finding: Finding) -> None:
        print(f"{time.monotonic() - begin:4.0f} s  {finding}", file=screen, flush=True)

    try:
        healthy = examine(arguments.gin, arguments.set, folder, arguments.only, report, ENVIRONMENT)
    except (OSError, ValueError) as error:  # ConfigError among them
        print(f"error: {error}", file=screen)
        return 2
    except BaseException as error:  # its traceback goes to the log
        print(f"error: {type(error).__name__}: {error}; see {log}", file=screen)
        raise
    print("all checks passed" if healthy else f"not all checks passed; the actors' output is in {log}", file=screen)
    return 0 if healthy else 1


def _apart(log: Path) -> TextIO:
    """Redirects the output of this process, and what Ray prints for its actors, to a file. Returns the
    terminal, as a file.
    """
    screen = os.fdopen(os.dup(1), "w", encoding="utf-8")
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    sys.stdout.flush()
    for number in (1, 2):
        os.dup2(file, number)
    return screen


if __name__ == "__main__":
    sys.exit(main())
