"""Which run a folder is of: `metrics.id` holds a random name, the folder, and the names of runs it was copied from."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

from ..io.files import write

IDENTITY = "metrics.id"
log = logging.getLogger(__name__)


def identities(run: Path) -> list[str]:
    """The lines of `metrics.id`; none before a run has begun."""
    path = run / IDENTITY
    return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if path.exists() else []


def original_of(run: Path) -> Path | None:
    """The folder that this one is a copy of, if that is still there, or is somebody else's; else the run has moved."""
    name, folder, *_ = [*identities(run), "", ""]
    try:
        is_other = folder and identities(Path(folder))[:1] == [name] and not run.samefile(folder)
    except PermissionError:
        is_other = True
    return Path(folder) if is_other else None


def identify(run: Path) -> str | None:
    """The run's identity, None before it has begun. A copy gets one of its own: else both would go on in one run of
    MLflow. The folder is noted beside it, which may have moved."""
    name, *origins = [line for i, line in enumerate(identities(run)) if i != 1] or [""]
    if original := original_of(run):
        log.warning("%s is a copy of %s, and goes on in a run of its own in MLflow", run, original)
        name, origins = uuid.uuid4().hex, [name, *origins]
    if name:
        note_identity(run, name, *origins)
    return name or None


def note_identity(run: Path, name: str, *origins: str) -> None:
    """Write `metrics.id`. origins: identities of the runs that this one was copied from"""
    write(run / IDENTITY, "\n".join([name, str(run.resolve()), *origins]).encode(errors="surrogateescape") + b"\n")
