"""What is printed while a run trains with OpenRLHF: our own messages on the terminal, all else in files of the run.

OpenRLHF, Ray, DeepSpeed and vLLM print dozens of lines in each step, from many processes. The terminal gets the
messages of this package: of the driver, and of the trainer, which is an actor of Ray and marks its own.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import Any

from ray._private.ray_logging import global_worker_stdstream_dispatcher as ray_lines

from ...terminal import FORMAT, TIME_FORMAT

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
    """Within this context the file descriptors 1 and 2 are <folder>/driver.log, our messages go to the terminal, and
    the actors' lines to <folder>/<actor>-<process id>.log. If it ends by an error, the end of driver.log is shown."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._driver = folder / "driver.log"
        self._files: dict[tuple[str, str], RotatingFileHandler] = {}
        self._early: defaultdict[tuple[str, str], list[str]] = defaultdict(list)  # of actors without a name as yet
        self._lock = threading.Lock()

    def __enter__(self) -> Output:
        self.folder.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        self._kept = os.dup(1), os.dup(2)
        self._terminal = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="replace")
        file = os.open(self._driver, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._begin = os.fstat(file).st_size
        for number in (1, 2):
            os.dup2(file, number)
        os.close(file)
        self._root = logging.getLogger()
        self._before = list(self._root.handlers)
        ours = logging.StreamHandler(self._terminal)
        ours.addFilter(lambda record: record.name.startswith((_OURS, "__main__")))
        handlers: list[logging.Handler] = [ours, logging.StreamHandler(sys.stderr)]
        for handler in handlers:
            handler.setFormatter(logging.Formatter(FORMAT, TIME_FORMAT))
        self._root.handlers[:] = handlers
        logging.getLogger(__name__).info("the output of OpenRLHF, Ray and vLLM goes to %s", self.folder)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        ray_lines.remove_handler(_OURS)
        with self._lock:
            for key, lines in self._early.items():
                self._write(key, "worker", lines)
            for handler in self._files.values():
                handler.close()
        sys.stdout.flush()
        sys.stderr.flush()
        for number, kept in enumerate(self._kept, 1):
            os.dup2(kept, number)
            os.close(kept)
        self._root.handlers[:] = self._before
        if isinstance(error, Exception):
            self._show_end()
        self._terminal.close()

    def take_lines(self) -> None:
        """From Ray, once it is connected; it would print them."""
        ray_lines.remove_handler(_PRINTED_BY_RAY)
        ray_lines.add_handler(_OURS, self._take)

    def last_lines(self, pid: int, count: int) -> list[str]:
        """Of what an actor has printed, on whatever node."""
        with self._lock:
            files = [Path(handler.baseFilename) for (_, of), handler in self._files.items() if of == str(pid)]
            early = [line for (_, of), lines in self._early.items() if of == str(pid) for line in lines]
        written = [line for file in files for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
        return [*written, *early][-count:]

    def _take(self, data: Mapping[str, Any]) -> None:
        """Some lines of one process. data: as Ray's log monitor sends them"""
        if data["pid"] == "autoscaler":  # a status of 30 lines every few seconds
            return
        actor, key = data.get("actor_name") or data.get("task_name"), (str(data.get("ip")), str(data["pid"]))
        shown = [line.removeprefix(MARK) for line in data["lines"] if line.startswith(MARK)]
        with self._lock:
            if not actor and key[1].isdigit() and key not in self._files:
                self._early[key] += data["lines"]
            else:
                self._write(key, actor or "ray", [*self._early.pop(key, []), *data["lines"]])
            for line in shown:
                print(line, file=self._terminal)

    def _write(self, key: tuple[str, str], name: str, lines: list[str]) -> None:
        if key not in self._files:
            path = self.folder / (f"{name}-{key[1]}.log" if key[1].isdigit() else f"{key[1] or name}.log")
            if any(Path(other.baseFilename) == path for other in self._files.values()):
                path = path.with_name(f"{name}-{key[0]}-{key[1]}.log")  # the same process id on another node
            self._files[key] = RotatingFileHandler(path, maxBytes=_LARGEST, backupCount=1, encoding="utf-8", delay=True)
        for line in lines:
            self._files[key].emit(logging.makeLogRecord({"msg": line}))

    def _show_end(self) -> None:
        with self._driver.open("rb") as file:
            file.seek(self._begin)
            lines = file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
        print(f"--- last lines of {self._driver}; what the actors printed lies beside it:", file=self._terminal)
        for line in lines:
            print(line, file=self._terminal)
