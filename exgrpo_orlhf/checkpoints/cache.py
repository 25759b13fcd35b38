"""Models that are made once: each is a folder with a manifest, with which it is compared before every use."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from ..io.files import locked, sync
from . import manifest

log = logging.getLogger(__name__)
_LOCK = ".lock"  # in an unfinished folder: held by the process that fills it; beside it: while one begins


class CacheError(OSError):
    """The cache cannot be written or read. The message names the folder, and the free space or the file."""


def has(folder: Path) -> bool:
    """Whether a folder is there as it was made. A damaged one is removed with a warning: it is to be made again.
    Raises CacheError, and removes nothing, where a file cannot be read."""
    if not folder.is_dir():
        return False
    try:
        manifest.verify(folder)
    except manifest.UnreadableFile as error:
        raise CacheError(f"{error}; try again, or remove {folder}, which is then made again") from error
    except manifest.ManifestError as error:
        log.warning("%s; it is made again", error)
        aside = tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unfinished-")
        with aside, suppress(FileNotFoundError):  # another process has found the same
            folder.rename(Path(aside.name) / folder.name)
        return False
    return True


@contextmanager
def making(folder: Path) -> Iterator[Path]:
    """An empty folder to save a model in. At the end of the block it gets a manifest, is synced and takes the name
    `folder`, unless another process was first.

    If the block raises, nothing is left of it. What a kill leaves is removed when the next folder is made beside it.
    Raises CacheError.
    """
    with explained(folder), ExitStack() as stack:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.parent / _LOCK):  # else a folder could be removed before its process holds the folder's lock
            for leftover in folder.parent.glob(".unfinished-*/"):
                with suppress(OSError), locked(leftover / _LOCK, wait=False):  # or another process fills it
                    shutil.rmtree(leftover)
            temporary = tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unfinished-")
            unfinished = Path(stack.enter_context(temporary)) / folder.name
            stack.enter_context(locked(unfinished.with_name(_LOCK)))
        unfinished.mkdir()
        yield unfinished
        manifest.seal(unfinished, None, folder.name, {})
        try:
            unfinished.rename(folder)
            sync(folder.parent)
        except OSError:
            if not folder.is_dir():
                raise


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Raises CacheError where the block cannot write the folder of the cache."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # the last two of torch and safetensors, on a full disk
        parent = next(path for path in folder.absolute().parents if path.exists())
        raise CacheError(
            f"{folder} could not be written ({' '.join(str(error).split())[:200]}); {parent} has "
            f"{shutil.disk_usage(parent).free / 2**20:,.0f} MiB free: make room, or name another cache by EXGRPO_CACHE"
        ) from error
