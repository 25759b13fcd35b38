"""What a run keeps beside what it writes anew, under the first free name: checkpoint-4.set-aside, then …set-aside-2.

checkpoint-<step>.set-aside   newer than the checkpoint that --resume-from names
metrics.set-aside.jsonl       the rows after that checkpoint's step; so for the other logs
metrics.before-restart.jsonl  of a run that began again without a checkpoint; so for the other logs and evaluation/
best.set-aside                what stood in the place of the link `best`
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from ..io.files import sync, write
from ..io.json_lines import StepLog
from .folder import BEST, LOGS, find, remove
from .identity import identities

log = logging.getLogger(__name__)


def set_newer_aside(run: Path, step: int, logs: Iterable[StepLog]) -> None:
    """Let checkpoint-<step> be the newest: those after it are renamed, and rows of the logs after that step, which are
    about to be dropped, are written into files of their own."""
    newer = [path for saved, path in find(run).items() if saved > step]
    for of_run in logs if newer else ():
        if rows := of_run.tail(step):
            aside = _free(of_run.path, "set-aside")
            write(aside, rows)
            text = "%s: its %d rows after step %d are dropped, and kept as %s"
            log.warning(text, of_run.path, rows.count(b"\n"), step, aside.name)
    for path in reversed(newer):  # after a kill in between the newest that is left is of the same attempt
        aside = path.rename(_free(path, "set-aside"))
        log.warning("%s is newer than checkpoint-%d: it is renamed to %s", path, step, aside.name)


def mark_best(run: Path, step: int) -> None:
    """Let the link `best` point to checkpoint-<step>, at no moment to nothing. What is no link, such as the folder that
    a copy makes of it, is kept as best.set-aside."""
    fresh, best = run / f"{BEST}.new", run / BEST
    try:
        remove(fresh)
        fresh.symlink_to(f"checkpoint-{step}")
        _set_best_aside(best)
        os.replace(fresh, best)
        sync(run)
    except OSError as error:  # a file system without links, say: the checkpoint is safe, and its state names the best
        log.warning("%s could not be made a link to checkpoint-%d: %s", best, step, error)


def unmark_best(run: Path) -> None:
    """Remove the link `best`. What is no link is kept as in `mark_best`."""
    best = run / BEST
    _set_best_aside(best)
    best.unlink(missing_ok=True)


def _set_best_aside(best: Path) -> None:
    if best.exists() and not best.is_symlink():
        aside = best.rename(_free(best, "set-aside"))
        kind = "folder" if aside.is_dir() else "file"
        log.warning("%s is a %s and no link: it is renamed to %s", best, kind, aside.name)


def set_aside(run: Path, config_text: str) -> str | None:
    """A run begins again in a folder without a checkpoint: what was logged there before is kept beside.

    Returns the identity of the earlier log if the configuration is still the same: then the steps are the same too, and
    go on in the same MLflow run, which may have been made before the first row was written.
    """
    for path in (run / name for name in (*LOGS, "evaluation")):  # each by itself: a kill may come between any two
        if path.is_dir() or (path.exists() and path.stat().st_size):
            kept = path.rename(_free(path, "before-restart"))
            log.warning(
                "%s has no checkpoint: the run begins again, its earlier %s is kept as %s", run, path.name, kept.name
            )
    same = (run / "config.gin").exists() and (run / "config.gin").read_text(encoding="utf-8") == config_text
    return next(iter(identities(run)), None) if same else None


def _free(path: Path, label: str) -> Path:
    """The first name of metrics.<label>.jsonl, metrics.<label>-2.jsonl, … that nothing has."""
    names = (f"{path.stem}.{label}{f'-{i}' if i > 1 else ''}{path.suffix}" for i in count(1))
    return next(other for name in names if not os.path.lexists(other := path.with_name(name)))
