"""What a run needs to continue exactly: written under another name, put on the disk, then renamed.

checkpoint-<step>/            Hugging Face files: `from_pretrained` opens it, so do vLLM and the evaluation
checkpoint-<step>/trainer/    state.json, and of the local engine optimizer.pt
checkpoint-<step>/_actor/     of the OpenRLHF engine: DeepSpeed's state
checkpoint-<step>/replay/     the buffer (replay/snapshot.py)
best                          a link to the checkpoint with the highest train.best_metric
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .files import locked, sync

FORMAT = 2
BEST = "best"
log = logging.getLogger(__name__)
_NAME = re.compile(r"checkpoint-(\d+)")


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or does not fit this run."""


class RunFolderError(RuntimeError):
    """The run's folder is in use, or holds a run that was not asked to be resumed."""


@contextmanager
def claim(run: Path, resume: bool) -> Iterator[None]:
    """Hold the run's folder against a second process, and against overwriting an earlier run.

    Raises RunFolderError.
    """
    refuse_earlier(run, resume)
    run.mkdir(parents=True, exist_ok=True)
    try:
        with locked(run / ".lock", wait=False):
            yield
    except BlockingIOError:
        raise RunFolderError(f"another process is at work in {run}") from None


def refuse_earlier(run: Path, resume: bool) -> None:
    """Raises RunFolderError if the folder holds a run that is not to be resumed."""
    if not resume and ((run / "metrics.jsonl").exists() or find(run)):
        raise RunFolderError(
            f"{run} holds a run already: continue it with --resume, or name another with --name or --out"
        )


def find(run: Path) -> dict[int, Path]:
    """The complete checkpoints of a run by step, oldest first. An unfinished one never bears such a name."""
    found = {int(match[1]): path for path in run.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def save(run: Path, step: int, write: Callable[[Path], None], keep: int) -> Path:
    """Make checkpoint-<step> by having `write` fill a folder; then remove all but the `keep` newest and the best.

    Raises CheckpointError if it cannot be written (a full disk, say): what was there before is as it was.
    """
    final = run / f"checkpoint-{step}"
    partial = run / f"{final.name}.partial"
    remove_partial(run)
    try:
        partial.mkdir(parents=True)
        write(partial)
        for path in (*partial.rglob("*"), partial):
            sync(path)
        os.rename(partial, final)
        sync(run)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        last, free = max(find(run), default=None), shutil.disk_usage(run).free / 2**20 if run.exists() else 0
        raise CheckpointError(
            f"{final} could not be written ({type(error).__name__}: {error}); {free:.0f} MiB are free there. "
            + ("No checkpoint exists yet" if last is None else f"checkpoint-{last} is untouched")
            + ". Mend that (make room, if the disk is full) and start again with --resume"
        ) from error
    best = (run / BEST).resolve()
    for old in [path for path in list(find(run).values())[:-keep] if path.resolve() != best]:
        # Renamed first: a removal that is cut short must not leave half a checkpoint under a checkpoint's name.
        try:
            shutil.rmtree(old.rename(old.with_name(f"{old.name}.partial")))
        except OSError as error:  # the new checkpoint is safe; an old one too many is no reason to stop
            log.warning("%s could not be removed: %s", old, error)
    return final


def mark_best(run: Path, step: int) -> None:
    """Let the link `best` point to checkpoint-<step>, at no moment to nothing."""
    fresh = run / f"{BEST}.new"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(f"checkpoint-{step}")
    os.replace(fresh, run / BEST)


def remove_partial(run: Path) -> None:
    """Remove what a killed save or removal left behind."""
    for path in run.glob("checkpoint-*.partial"):
        shutil.rmtree(path)


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """The trainer's own state, as JSON, into a checkpoint that is being written."""
    path = folder / "trainer" / "state.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"format": FORMAT, **state}, indent=1) + "\n", encoding="utf-8")


def read_state(folder: Path, identity: dict[str, str]) -> dict[str, Any]:
    """The state in a checkpoint.

    identity: the bindings that must be the same for a run to be continued
    Raises CheckpointError if the state is unreadable, or of a run with other bindings, naming each difference.
    """
    path = folder / "trainer" / "state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); is {folder} a checkpoint of this trainer?") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: format {state.get('format')!r} cannot be read here, only {FORMAT}; begin the run again under "
            "another --name"
        )
    before = state["identity"]
    if before != identity:
        changed = [
            f"{name}: {before.get(name, 'not bound')} in the checkpoint, {identity.get(name, 'not bound')} now"
            for name in sorted({*before, *identity})
            if before.get(name) != identity.get(name)
        ]
        raise CheckpointError(
            f"{folder} was made with another configuration:\n  " + "\n  ".join(changed) + "\n"
            "Resume with the same gin files and bindings, or start a new run under another --name"
        )
    return state


def name_end_tokens(checkpoint: Path, end: Sequence[int]) -> None:
    """Have the checkpoint's generation config name these too: whoever serves it ends a response where training did."""
    file = checkpoint / "generation_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    named = config.get("eos_token_id")
    known = {token for token in (named if isinstance(named, list) else [named]) if token is not None}
    if not known >= {*end}:
        config["eos_token_id"] = sorted(known | {*end})
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
