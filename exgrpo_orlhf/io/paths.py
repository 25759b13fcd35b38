"""Where the project's own files are, and where commands write what no option places elsewhere.

In a checkout both are its root. An installed package carries gin/, evals/ and scripts/ in its folder project/ (setup.py
puts them there) and writes to the current directory.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
_INSTALLED = _PACKAGE / "project"

CHECKOUT: Path | None = None if _INSTALLED.is_dir() else _PACKAGE.parent
PROJECT: Path = CHECKOUT or _INSTALLED  # of gin/, evals/ and scripts/
WORKPLACE: Path = CHECKOUT or Path.cwd()  # of runs/, results/, datasets/ and mlflow.db


def run_name(run: Path) -> str:
    """The name of a run's folder; with its variant's in a study, whose folders are <variant>/seed<k>."""
    run = run.absolute()
    return f"{run.parent.name}/{run.name}" if re.fullmatch("seed[0-9]+", run.name) else run.name


def cache(chosen: str | Path | None) -> Path:
    """The directory of models that are made or converted once: `chosen`, $EXGRPO_CACHE, or ~/.cache/exgrpo_orlhf."""
    return Path(chosen or os.environ.get("EXGRPO_CACHE") or Path.home() / ".cache" / "exgrpo_orlhf").expanduser()
