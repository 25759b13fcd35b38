"""What is printed while a run trains with OpenRLHF: our own messages on the terminal, all else in files of the run.

OpenRLHF, Ray, DeepSpeed and vLLM print dozens of lines in each step, from many processes. The terminal gets the
messages of this package: of the driver, and of the trainer, which is an actor of Ray and marks its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO

from ray._private.ray_logging import global_worker_stdstream_dispatcher as ray_lines

from ...io.terminal import FORMAT, TIME_FORMAT

MARK = "[exgrpo] "  # begins each line of our own messages in the output of an actor
_OURS = "exgrpo_orlhf"
_PRINTED_BY_RAY = "ray_print_logs"  # Ray's own handler, which prints the lines of all actors
_LARGEST = 20_000_000  # bytes of a file before it is renamed to <name>.1, which replaces an older one
_LAST_LINES = 10


class _Marked(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        mark = MARK if record.name.startswith(_OURS) else ""
        return "\n".join(mark + line for line in super().format(record).split("\n"))


def mark_messages() -> None:
    """In an actor: write messages to its output, our own with a mark on each line."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Marked(FORMAT, TIME_FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class Output:
    """The lines of actors: in <folder>/<actor>-<node>-<process id>.log, and our own messages on the terminal too."""

    def __init__(self, folder: Path, terminal: TextIO) -> None:
        self.folder, self._terminal = folder, terminal
        self._files: dict[str, RotatingFileHandler] = {}
        self._lock = threading.Lock()

    def take_lines(self) -> None:
        """From Ray, once it is connected; it would print them."""
        ray_lines.remove_handler(_PRINTED_BY_RAY)
        ray_lines.add_handler(_OURS, self._take)

    def last_lines(self, pid: int, count: int) -> list[str]:
        """Of what an actor has printed, on whatever node."""
        files = sorted(self.folder.glob(f"*-{pid}.log"), key=lambda file: file.stat().st_mtime)
        return [line for file in files for line in file.read_text(errors="replace").splitlines()][-count:]

    def close(self) -> None:
        ray_lines.remove_handler(_OURS)
        with self._lock:
            for handler in self._files.values():
                handler.close()

    def _take(self, data: Mapping[str, Any]) -> None:
        """Some lines of one process. data: as Ray's log monitor sends them; at first an actor has no name"""
        if data["pid"] == "autoscaler":  # a status of 30 lines every few seconds
            return
        name = f"{data.get('actor_name') or data.get('task_name') or 'worker'}-{data.get('ip')}-{data['pid']}.log"
        with self._lock:
            if name not in self._files:
                self._files[name] = RotatingFileHandler(self.folder / name, "a", _LARGEST, 1, "utf-8")
            for line in data["lines"]:
                self._files[name].emit(logging.makeLogRecord({"msg": line}))
                if line.startswith(MARK):
                    print(line.removeprefix(MARK), file=self._terminal)


@contextlib.contextmanager
def output_in(folder: Path) -> Iterator[Output]:
    """Within this context the file descriptors 1 and 2 are <folder>/driver.log, and our messages go to the terminal. If
    it ends by an error, the end of driver.log is shown."""
    folder.mkdir(parents=True, exist_ok=True)
    _flush()
    before, driver, root = (os.dup(1), os.dup(2)), folder / "driver.log", logging.getLogger()
    handlers = root.handlers[:]
    with (
        os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="replace") as terminal,
        driver.open("ab") as file,
        contextlib.closing(Output(folder, terminal)) as output,
    ):
        begin = file.tell()
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        root.handlers[:] = [logging.StreamHandler(terminal), logging.StreamHandler(sys.stderr)]
        root.handlers[0].addFilter(lambda record: record.name.startswith((_OURS, "__main__")))
        for handler in root.handlers:
            handler.setFormatter(logging.Formatter(FORMAT, TIME_FORMAT))
        logging.getLogger(__name__).info("the output of OpenRLHF, Ray and vLLM goes to %s", folder)
        try:
            yield output
        except Exception:
            _flush()
            lines = driver.read_bytes()[begin:].decode(errors="replace").splitlines()[-_LAST_LINES:]
            print(
                f"--- last lines of {driver}; what the actors printed lies beside it:", *lines, sep="\n", file=terminal
            )
            raise
        finally:
            _flush()
            for number, descriptor in enumerate(before, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            root.handlers[:] = handlers


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
