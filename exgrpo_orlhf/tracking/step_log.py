"""A file of JSON objects, one line per step, that is cut back when a run is resumed."""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..files import sync, write

log = logging.getLogger(__name__)


class StepLog:
    """One JSON object a line, {"step": n, …}, steps increasing.

    A process that is killed while writing leaves an incomplete last line; `cut_back` removes it. Opening a log with a
    corrupt line anywhere else raises ValueError with file and line.
    """

    ROW = "a row with a"  # what a line is called in the message about a corrupt one

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._steps: list[int] = []
        self._ends = [0]  # byte offsets: the i-th step's line lies between the i-th and the next
        self._torn = False
        if self.path.exists():
            self._scan()

    def _scan(self) -> None:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):  # bytes: only "\n" ends a line
                if not line.endswith(b"\n"):
                    self._torn = True
                    return
                try:
                    row = json.loads(line)
                    step = row["step"]
                    sound = type(step) is int and step > self.last_step and self._is_sound(row)
                except (ValueError, TypeError, KeyError):
                    sound = False
                if not sound:
                    raise ValueError(
                        f"{self.path}, line {number}: not {self.ROW} 'step' above "
                        f"{self.last_step}: {line[:120]!r}; fix or remove this line"
                    )
                self._steps.append(step)
                self._ends.append(self._ends[-1] + len(line))

    def _is_sound(self, row: dict[str, Any]) -> bool:
        """Whether a row has what each of this log has."""
        return True

    @property
    def last_step(self) -> int:
        """The last complete row's step, −1 for an empty log."""
        return self._steps[-1] if self._steps else -1

    def write_row(self, row: Mapping[str, Any], *, compact: bool = False) -> None:
        """Write one step's row and hand it to the operating system.

        row: JSON values, "step" among them; compact: without spaces
        Raises ValueError for a step that is not above the last one, or after an incomplete last line, and OSError if
        not all of it could be written.
        """
        if type(row["step"]) is not int or row["step"] <= self.last_step:
            raise ValueError(
                f"{self.path}: step {row['step']!r} after step {self.last_step}; steps are increasing integers"
            )
        if self._torn:
            raise ValueError(f"{self.path} ends in an incomplete line; call cut_back with the checkpoint's step first")
        line = json.dumps(row, separators=(",", ":") if compact else None).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            if file.tell() != self._ends[-1]:
                raise ValueError(f"{self.path} was changed by another program; two runs in one folder?")
            self._torn = True  # until the whole line is there
            if file.write(line) != len(line):
                raise OSError(f"{self.path}: only part of step {row['step']} could be written; is the disk full?")
        self._torn = False
        self._ends.append(self._ends[-1] + len(line))
        self._steps.append(row["step"])

    def sync(self) -> None:
        """Put the rows on the disk, so that they survive a power failure."""
        if self.path.exists():
            sync(self.path)

    def cut_back(self, step: int) -> int:
        """Drops the rows after `step` and an incomplete last line, atomically.

        For resuming from a checkpoint of that step, before anything else reads the log. Returns the number of complete
        rows dropped.
        """
        keep = bisect_right(self._steps, step)
        dropped = len(self._steps) - keep
        if dropped or self._torn:
            write(self.path, self.path.read_bytes()[: self._ends[keep]])
            del self._steps[keep:], self._ends[keep + 1 :]
            self._torn = False
        return dropped

    def warn_if_missing(self, steps: Iterable[int]) -> None:
        """Log a warning if some of these steps, which were written, have no row."""
        if missing := sorted({*steps} - {*self._steps}):
            shown = ", ".join(map(str, missing[:5])) + (", …" if missing[5:] else "")
            text = "%s: %d rows are missing (steps %s): the file was changed or deleted. What reads it lacks them"
            log.warning(text, self.path, len(missing), shown)

    def rows(self, after: int = -1) -> Iterator[dict[str, Any]]:
        """The complete rows of the steps above `after`, in order. Another thread may append meanwhile."""
        first = bisect_right(self._steps, after)
        if first == len(self._steps):
            return
        with self.path.open("rb") as file:
            file.seek(self._ends[first])
            for line in file:
                if line.endswith(b"\n"):
                    yield json.loads(line)
