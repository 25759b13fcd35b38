"""What a run needs to continue exactly: written under another name, put on the disk, then renamed.

checkpoint-<step>/            Hugging Face files: `from_pretrained` opens it, so do vLLM and the evaluation
checkpoint-<step>/manifest.json   size and SHA-256 of every file, the step and the run (manifest.py)
checkpoint-<step>/trainer/    state.json, and of the local engine optimizer.pt and frozen copies
checkpoint-<step>/_actor/     of the OpenRLHF engine: DeepSpeed's state
checkpoint-<step>/replay/     the buffer (replay/snapshot.py)
checkpoint-<step>/adapter/    with LoRA: the adapter alone (engines/lora.py); the weights at the root are merged
checkpoint-<step>/ahead/      with train.generate_ahead: the next step's batch (training/ahead.py)
best                          a link to the checkpoint with the best train.best_metric
"""

from __future__ import annotations

import ast
import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..io.files import Files, locked, sync
from ..settings import LocalEngine
from . import manifest
from .identity import IDENTITY, identities

BEST = "best"
STATE = "trainer/state.json"
LOGS = ("decisions.jsonl", "rollouts.jsonl", "metrics.jsonl")
OF_PYTHON = ("questions.jsonl", "validation.jsonl", "reward.py")  # what a run from Python began with
BEFORE_A_RUN = {"run.log", "failed.json", "logs", "supervised.jsonl", *OF_PYTHON}  # what a killed start may leave
RANKS = ("actor.num_nodes", "actor.num_gpus_per_node", "ref.num_nodes", "ref.num_gpus_per_node")
log = logging.getLogger(__name__)
_NAME = re.compile(r"checkpoint-(\d+)")


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or does not fit this run."""


class UnusableCheckpoint(CheckpointError):
    """A checkpoint that a run cannot be resumed from: it is damaged, or of another run or configuration."""


class RunFolderError(RuntimeError):
    """The run's folder is in use, or holds a run that was not asked to be resumed."""


@contextmanager
def claim(run: Path, resume: bool) -> Iterator[None]:
    """Hold the run's folder against a second process, and against overwriting an earlier run.

    Raises RunFolderError.
    """
    refuse_earlier(run, resume)
    if not run.is_dir():
        try:
            run.mkdir(parents=True)
        except OSError as error:  # the disk is full, or something has changed since
            raise RunFolderError(f"--out {run}: the run's folder cannot be made ({error.strerror})") from None
        sync(run.parent)
    try:
        with locked(run / ".lock", wait=False):
            yield
    except BlockingIOError:
        raise RunFolderError(f"another process is at work in {run}") from None


def in_use(run: Path) -> bool:
    """Whether a process trains in this folder (`claim`), or may: one that cannot be written is somebody else's."""
    try:
        with locked(run / ".lock", wait=False):
            return False
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return True


def refuse_earlier(run: Path, resume: bool) -> None:
    """Raises RunFolderError if the folder cannot be made, or holds a run that is not to be resumed."""
    ancestor = next(path for path in (run.absolute(), *run.absolute().parents) if path.exists())
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK | os.X_OK):
        why = f"no permission to write in {ancestor}" if ancestor.is_dir() else f"{ancestor} is not a folder"
        raise RunFolderError(f"--out {run}: the run's folder cannot be made or written ({why})")
    if not resume and ((run / "metrics.jsonl").exists() or find(run)):
        raise RunFolderError(
            f"{run} holds a run already: continue it with --resume, or name another with --name or --out"
        )


def refuse_other(run: Path) -> None:
    """Raises RunFolderError for a folder with files of anything but a run, which a run would mix with its own."""
    names = sorted(path.name for path in run.glob("[!.]*"))
    if {*names} <= BEFORE_A_RUN or (run / IDENTITY).exists() or (run / LOGS[-1]).exists() or find(run):
        return
    below = [path.parent for depth in ("", "*/", "*/*/") for path in run.glob(f"*/{depth}{IDENTITY}")]
    runs = ", ".join(sorted(str(folder.relative_to(run)) for folder in below)[:6])
    raise RunFolderError(
        f"{run} is not empty and holds no run ({f'the runs below it: {runs}' if runs else f'it has {names[0]}'}): name "
        "the folder of a run, or a new one, by --name or --out"
    )


def find(run: Path) -> dict[int, Path]:
    """The complete checkpoints of a run by step, oldest first. An unfinished one never bears such a name."""
    paths = {int(match[1]): path for path in run.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(paths.items()))


def remove(path: Path) -> None:
    """Remove a folder, or what stands in its place: of a link not what it leads to. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def save(
    run: Path, step: int, identity: str, write: Callable[[Path], Files], keep: int, best_step: int | None = None
) -> Path:
    """Make checkpoint-<step>; then remove all but the `keep` newest, that of `best_step` and the one that is marked as
    the best, which some file systems cannot do.

    identity: the run's
    write: fills a folder, and returns the hashes of the files that it has hashed already
    Raises CheckpointError if it cannot be written (a full disk, say): what was there before is as it was.
    """
    final = run / f"checkpoint-{step}"
    partial = run / f"{final.name}.partial"
    try:
        remove_partial(run)
        partial.mkdir(parents=True)
        manifest.seal(partial, step, identity, write(partial))
        os.rename(partial, final)
        sync(run)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        last, free = max(find(run), default=None), shutil.disk_usage(run).free / 2**20 if run.exists() else 0
        raise CheckpointError(
            f"{final} could not be written ({type(error).__name__}: {error}); {free:.0f} MiB are free there. "
            + ("No checkpoint exists yet" if last is None else f"checkpoint-{last} is untouched")
            + ". Fix that (make room, if the disk is full) and start again with --resume"
        ) from error
    best = (run / BEST).resolve()
    for old in [path for at, path in list(find(run).items())[:-keep] if at != best_step and path.resolve() != best]:
        # Renamed first: a removal that is cut short must not leave half a checkpoint under a checkpoint's name.
        try:
            remove(old.rename(old.with_name(f"{old.name}.partial")))
        except OSError as error:  # the new checkpoint is safe; an old one too many is no reason to stop
            log.warning("%s could not be removed: %s", old, error)
    return final


def to_resume(
    run: Path,
    identity: dict[str, str],
    defaults: Mapping[str, str] | None = None,
    *,
    name: str | None,
    contents: bool,
    base: str | None,
) -> Path | None:
    """The checkpoint to continue from, as `verified` finds it. Nothing is changed.

    base: the hash of the base model's files, where the run needs them again
    Raises UnusableCheckpoint also for one of another base model.
    """
    if (verdict := verified(run, identity, defaults, name=name, contents=contents)) is None:
        return None
    checkpoint, state = verdict
    if state.get("base") not in (None, base):
        raise UnusableCheckpoint(
            f"{checkpoint}: the base model has changed since (its files' hash is {base}, it was {state['base']}): bind "
            f"the model that the run began with, or {_begin_anew(checkpoint)}"
        )
    return checkpoint


def verified(
    run: Path, identity: dict[str, str], defaults: Mapping[str, str] | None = None, *, name: str | None, contents: bool
) -> tuple[Path, dict[str, Any]] | None:
    """A checkpoint, compared with its manifest, and its state; None if there is none and none was named.

    identity, defaults: as `read_state` has them
    name: None for the newest, or that of an older one
    contents: whether files are hashed too, or only looked for and their sizes compared (train.verify_checkpoint)
    Raises UnusableCheckpoint for one that is damaged, or of another run or configuration. No other is taken instead.
    """
    paths = {path.name: path for path in find(run).values()}
    name = name or next(reversed(paths), None)
    if name is None:
        return None
    if name not in paths:
        raise UnusableCheckpoint(
            f"--resume-from {name}: {run} has no such checkpoint; it has {', '.join(paths) or 'none at all'}"
        )
    *older, newest = list(paths.values())[: list(paths).index(name) + 1]
    try:
        _verify(newest, contents)
    except manifest.ManifestError as error:
        complete = next((path for path in reversed(older) if _is_complete(path)), None)
        raise UnusableCheckpoint(
            f"{error}; "
            + (
                "no older checkpoint is complete: begin the run again under another --name"
                if complete is None
                else f"continue from the next older complete checkpoint with --resume-from {complete.name} instead of "
                "--resume"
            )
        ) from error
    return newest, read_state(newest, identity, defaults)


def _verify(checkpoint: Path, contents: bool) -> None:
    """Raises ManifestError."""
    saved = manifest.verify(checkpoint, contents)
    names = identities(checkpoint.parent)
    if names and saved.run not in names:
        raise manifest.ManifestError(
            f"{checkpoint} is of another run: its {manifest.NAME} names {saved.run}, {checkpoint.parent / IDENTITY} "
            f"names {names[0]}"
        )


def _is_complete(checkpoint: Path) -> bool:
    """As far as that can be said without reading all of it."""
    try:
        _verify(checkpoint, contents=False)
    except manifest.ManifestError:
        return False
    return True


def remove_partial(run: Path) -> None:
    """Remove what a killed save or removal left behind. What cannot be removed stays, and the log names it."""
    for path in run.glob("checkpoint-*.partial"):
        try:
            remove(path)
        except OSError as error:
            log.warning("%s could not be removed: %s", path, error)


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """The trainer's own state, as JSON, into a checkpoint that is being written."""
    path = folder / STATE
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def read_state(folder: Path, identity: dict[str, str], defaults: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The state in a checkpoint.

    identity: the bindings that must be the same for a run to be continued
    defaults: of all settings. One that the checkpoint's version did not have must have its default, and is named
    Raises UnusableCheckpoint if the state is damaged, or of a run with other bindings, naming each difference.
    """
    path = folder / STATE
    try:
        manifest.verify_file(folder, STATE)
    except manifest.ManifestError as error:
        raise UnusableCheckpoint(str(error)) from error
    state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    before, identity = _comparable(state["identity"]), _comparable(identity)
    changed, new = [], []
    for name in sorted(name for name in {*before, *identity} if before.get(name) != identity.get(name)):
        default = (defaults or {}).get(name.rpartition("/")[2])
        advice = f"; a run from before this setting goes on with {name} = {default}" if default else ""
        if defaults and name not in identity and default is None:
            advice = "; only the version that made the checkpoint has this setting"
        if name not in before and identity[name] == default:
            new.append(f"{name} = {default}")
        else:
            changed.append(
                f"{name}: {before.get(name, 'not bound')} in the checkpoint, {identity.get(name, 'not bound')} now"
                + (advice if name not in before or name not in identity else "")
            )
    if changed:
        raise UnusableCheckpoint(
            f"{folder} was made with another configuration:\n  " + "\n  ".join(changed) + "\n"
            f"Resume with the same gin files and bindings, or {_begin_anew(folder)}"
        )
    if new:
        log.warning("%s is from before these settings, which have their defaults now: %s", folder, ", ".join(new))
    return state


def _begin_anew(checkpoint: Path) -> str:
    """How to go on with other settings, for a refusal."""
    return f"begin a new run with its weights, under another --name: --from {checkpoint} (--with-buffer for its buffer)"


def _comparable(identity: dict[str, str]) -> dict[str, str]:
    """Without what may change: where a question file lies, whose questions are compared when they are loaded, the
    flags that say on how many GPUs OpenRLHF trains (openrlhf/universal.py), and what an older version did not let
    change."""
    free = {"QuestionFile.path", *(f"LocalEngine.{name}" for name in LocalEngine.MAY_CHANGE)}
    identity = {name: value for name, value in identity.items() if name.rpartition("/")[2] not in free}
    flags = ast.literal_eval(identity.get("OpenRLHF.flags", "{}"))
    kept = {flag: value for flag, value in flags.items() if flag not in RANKS}
    return {**identity, "OpenRLHF.flags": repr(kept)} if flags else identity


def name_end_tokens(checkpoint: Path, end: Sequence[int]) -> None:
    """Have the checkpoint's generation config name these too: whoever serves it ends a response where training did."""
    file = checkpoint / "generation_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    named = config.get("eos_token_id")
    tokens = {token for token in (named if isinstance(named, list) else [named]) if token is not None}
    if not tokens >= {*end}:
        config["eos_token_id"] = sorted(tokens | {*end})
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
