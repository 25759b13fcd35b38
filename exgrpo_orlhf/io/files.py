"""Writing files whole or not at all, putting them on the disk, locking: the one place that does it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..checks import ConfigError

THREADS = 8  # files that are hashed at a time


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within this context an OSError without a path, as a full disk gives one, gets this path."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path in the same folder to write to. At the end of the block that file is synced and takes the name `path`.

    If the block raises, `path` stays as it was and the new file is removed. A second writer of `path` waits.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".unfinished-{path.name}")
    with naming(path):
        lock = _locked_file(partial)
    try:
        with naming(path):
            yield partial
        sync(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough where a child was forked meanwhile
        os.close(lock)


def _locked_file(path: Path) -> int:
    """The descriptor of the file of this name, made if there is none and locked: what was opened may be renamed or
    removed by the writer that is waited for."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(lock), path.stat()):
                return lock
        except FileNotFoundError:
            pass
        os.close(lock)


def read_text(path: Path, binding: str = "") -> str:
    """A text in UTF-8, with or without a byte order mark. Raises ConfigError for other bytes. binding: of the path"""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        named = f" ({binding})" if binding else ""
        raise ConfigError(f"{path}, line {line}: not UTF-8{named}; save the file as UTF-8") from error


def write(path: Path, content: str | bytes) -> None:
    """Write a whole file; into a pipe or a device, and behind a link, which both stay. What goes to /dev/stdout,
    /dev/fd/3 and the like stands behind what has been written there, also where that is a file.

    Text is UTF-8; half a surrogate pair, which a model may write, becomes an XML reference.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8", errors="xmlcharrefreplace")
    if (descriptor := _descriptor(path)) is not None:
        sys.stdout.flush()
        with naming(path), os.fdopen(os.dup(descriptor), "wb") as file:  # opened by its name it would begin at 0
            file.write(data)
        return
    if path.exists() and not path.is_file():
        with naming(path):
            path.write_bytes(data)
        return
    with replacing(path.resolve()) as partial:
        partial.write_bytes(data)


def _descriptor(path: Path) -> int | None:
    """The open file of this process that a path names, or a link to one."""
    for _ in range(40):  # links, as many as Linux follows
        if match := re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)", os.path.abspath(path)):
            return int(match[1])
        if not path.is_symlink():
            return None
        path = path.parent / os.readlink(path)
    return None


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Write a whole JSON file, in ASCII."""
    write(path, json.dumps(value, indent=indent) + "\n")


def sync(path: Path) -> None:
    """Put a file, or a folder's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Entry(NamedTuple):
    """What a file was written as."""

    bytes: int
    sha256: str


Files = dict[str, Entry]  # by path inside a folder, such as 'trainer/state.json'


def record(folder: Path, paths: Iterable[Path]) -> Files:
    """Put finished files of a folder on the disk, and hash them, several at a time."""

    def entry(path: Path) -> Entry:
        sync(path)
        return Entry(path.stat().st_size, sha256(path))

    paths = list(paths)
    with ThreadPoolExecutor(THREADS) as threads:
        names = [path.relative_to(folder).as_posix() for path in paths]
        return dict(zip(names, threads.map(entry, paths), strict=True))


def sha256(path: Path) -> str:
    """The file's SHA-256 in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum(entries: dict[str, Any]) -> str:
    """The SHA-256 of what a file says, for a file that holds it beside its entries."""
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock file against other processes; it is released at the end of the block, or when the process dies.

    Raises BlockingIOError if another process holds it and `wait` is False.
    """
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
