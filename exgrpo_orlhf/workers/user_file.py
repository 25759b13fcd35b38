"""A user's file, a reward function or an environment: read where it is bound, and loaded in a server."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType


class UserFileError(ValueError):
    """What is wrong with a user's file, or with what its code did or returned. The message names the file."""


class BadResult(Exception):
    """What a user's code returned is no result of it; the message says what is expected."""


def read_source(file: Path) -> str:
    """The content of a user's file, each byte a character, as JSON can hold it; '' where it cannot be read, which
    loading it reports."""
    with suppress(OSError):
        return file.read_bytes().decode("latin-1")
    return ""


def source_hash(source: str) -> str:
    """The SHA-256 of the file that `read_source` has read."""
    return hashlib.sha256(source.encode("latin-1")).hexdigest()


def load_file(file: Path, prefix: str, source: str | None = None) -> ModuleType:
    """The module of a user's file, under a name with this prefix. Modules beside the file can be imported from it, as
    from a script; they are those that are there now.

    source: what is run, as `read_source` has read it before, whatever the file holds now; None or '' for that
    Raises UserFileError, with the line where the file raises.
    """
    if not (source or file.is_file()):
        raise UserFileError(f"there is no file {str(file)!r}")
    if file.suffix != ".py":
        raise UserFileError(f"{file}: the file must end in .py")
    spec = importlib.util.spec_from_file_location(f"{prefix}_{file.stem}", file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look it up there
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    with placing_errors(file):
        content = source.encode("latin-1") if source else file.read_bytes()
        exec(compile(content, str(file), "exec", dont_inherit=True), vars(module))
    return module


@contextmanager
def placing_errors(file: Path) -> Iterator[None]:
    """What the code of a user's file raises becomes a UserFileError with the line; MemoryError stays."""
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:  # SystemExit and asyncio's CancelledError too
        raise UserFileError(placed(error, file)) from error


def placed(error: BaseException, file: Path) -> str:
    """The error with the last line of the user's file that led to it."""
    if isinstance(error, BadResult):
        return f"{file.name}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    line = next((f", line {frame.lineno}" for frame in frames[::-1] if frame.filename == str(file)), "")
    return f"{file.name}{line}: {type(error).__name__}: {error}"
