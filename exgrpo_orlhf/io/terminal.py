"""What the programs of this package share: their messages, and the files and numbers that they are given."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from functools import cache
from pathlib import Path

from .redaction import without_password

log = logging.getLogger(__name__)
FORMAT, TIME_FORMAT = "%(asctime)s %(message)s", "%H:%M:%S"  # of a message


class _WithoutPasswords(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return without_password(super().format(record))


def messages(level: int = logging.INFO) -> None:
    """Write messages to standard error, with the time, and leave out those of libraries that no user can act on."""
    handler = logging.StreamHandler()
    handler.setFormatter(_WithoutPasswords(FORMAT, TIME_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
    package, script = Path(__file__).resolve().parent.parent, Path(sys.argv[0]).resolve()
    checkout = script.parent.parent / package.name  # of a script in scripts/ or evals/ of a checkout
    if checkout.is_dir() and checkout != package:
        logging.warning("%s imports %s, not the package of its own checkout: pip install -e there", script, package)
    for noisy in ("httpx", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # its first start prints every table it creates
    warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)  # torch's own import of it
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())


@cache
def warn_once(reason: str) -> None:
    """Log what was left out, once in a process."""
    log.warning("left out: %s", reason)


def output_file(text: str) -> Path:
    """A file that a command is to write, as argparse's `type`, so that a wrong name is refused before the work.

    Raises argparse.ArgumentTypeError.
    """
    path = Path(text)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    why = ""
    if path.is_dir():
        why = "it is a folder; give the name of a file"
    elif not folder.is_dir():
        why = f"{folder} is not a folder"
    elif path.exists() and not os.access(path, os.W_OK):
        why = "no permission to write it"
    elif not path.exists() or path.is_file():  # which is replaced, so that it is never half written
        beside = path.resolve().parent if path.exists() else folder
        why = "" if os.access(beside, os.W_OK) else f"no permission to write in {beside}"
    if why:
        raise argparse.ArgumentTypeError(f"{path} cannot be written: {why}")
    return path


def positive(text: str) -> int:
    """A whole number from 1, as argparse's `type`. Raises argparse.ArgumentTypeError."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)
