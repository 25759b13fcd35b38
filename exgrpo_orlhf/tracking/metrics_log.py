"""The record of a run's metrics: `metrics.jsonl` in its folder, one line per step."""

from __future__ import annotations

import json
import math
import posixpath
import re
import time
import uuid
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from ..files import sync, write

STEP_METRIC = "train/step"  # the tracker's own metric
START_METRIC = "supervised/step"  # the same for the curve of a supervised start, which has steps of its own
METRICS_PER_CALL = 1000  # the most metrics that an MLflow server takes in one call, all or none


def check_name(name: str) -> None:
    """Raises ValueError for a metric, param or tag name that MLflow would refuse, before training and not after it."""
    if re.fullmatch(r"[A-Za-z0-9_\-./ ]{1,250}", name) and name == posixpath.normpath(name) and name[0] not in "/.":
        return
    better = re.sub(r"[^A-Za-z0-9_\-./ ]", "_", name.replace("@", "_at_"))
    better = posixpath.normpath("/" + better).strip("/.")[:250]
    raise ValueError(
        f"{name!r} cannot name a metric, param or tag: a name has at most 250 letters, digits, '_', '-', '.', '/' and "
        f"spaces, and is a plain relative path; write {better or 'a name'!r}"
    )


class MetricsLog:
    """`metrics.jsonl`: one JSON object a line, {"step": n, "time": seconds since 1970, metrics…}, steps increasing.

    A process that is killed while writing leaves an incomplete last line; `cut_back` removes it. Opening a log with a
    corrupt line anywhere else raises ValueError with file and line.
    """

    def __init__(self, path: Path, identity: str | None = None) -> None:
        """identity: of an earlier log that this one replaces, so that the same MLflow run continues"""
        self.path = Path(path)
        self._given_identity = self._identity = identity
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
                    sound = type(step) is int and type(row["time"]) is float and step > self.last_step
                except (ValueError, TypeError, KeyError):
                    sound = False
                if not sound:
                    raise ValueError(
                        f"{self.path}, line {number}: not a row of metrics with 'time' and a 'step' above "
                        f"{self.last_step}: {line[:120]!r}; mend or remove this line"
                    )
                self._steps.append(step)
                self._ends.append(self._ends[-1] + len(line))

    @property
    def last_step(self) -> int:
        """The last complete row's step, −1 for an empty log."""
        return self._steps[-1] if self._steps else -1

    @property
    def identity(self) -> str:
        """A random name kept beside the log (`metrics.id`).

        A tracker finds the MLflow run of this log by it, even if no checkpoint has stored the run's id; a checkpoint
        names it as the run that it belongs to. A log without rows gets a new identity, unless it was made with one.
        """
        path = self.path.with_suffix(".id")
        if self._steps and path.exists():
            return path.read_text(encoding="ascii").strip()
        self._identity = self._identity or uuid.uuid4().hex
        write(path, self._identity + "\n")
        return self._identity

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one step's row and hands it to the operating system.

        Raises ValueError for a step that is not above the last one, a name that MLflow would refuse, a value that is no
        finite number, more metrics than one MLflow call takes, or an incomplete last line.
        """
        if type(step) is not int or step <= self.last_step:
            raise ValueError(f"{self.path}: step {step!r} after step {self.last_step}; steps are increasing integers")
        if len(metrics) >= METRICS_PER_CALL:
            raise ValueError(f"{len(metrics)} metrics in step {step}; MLflow takes {METRICS_PER_CALL - 1} at once")
        if self._torn:
            raise ValueError(f"{self.path} ends in an incomplete line; call cut_back with the checkpoint's step first")
        row: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        for name, value in metrics.items():
            check_name(name)
            if name in ("step", "time", STEP_METRIC, START_METRIC):
                raise ValueError(f"the metric name {name!r} is reserved: every row has it already")
            # Means over empty sets are 0 by definition, so a NaN is an error of the code that computed it.
            if not isinstance(value, Real) or not math.isfinite(value):
                raise ValueError(f"metric {name!r} of step {step} is {value!r}; metrics are finite numbers")
            row[name] = int(value) if isinstance(value, Integral) else float(value)
        line = json.dumps(row).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            if file.tell() != self._ends[-1]:
                raise ValueError(f"{self.path} was changed by another program; two runs in one folder?")
            self._torn = True  # until the whole line is there
            if file.write(line) != len(line):
                raise OSError(f"{self.path}: only part of step {step} could be written; is the disk full?")
        self._torn = False
        self._ends.append(self._ends[-1] + len(line))
        self._steps.append(step)

    def sync(self) -> None:
        """Put the rows on the disk, so that they survive a power failure."""
        if self.path.exists():
            sync(self.path)

    def cut_back(self, step: int) -> int:
        """Drops the rows after `step` and an incomplete last line, atomically.

        For resuming from a checkpoint of that step, before a tracker reads the log. Returns the number of complete rows
        dropped.
        """
        keep = bisect_right(self._steps, step)
        dropped = len(self._steps) - keep
        if dropped or self._torn:
            write(self.path, self.path.read_bytes()[: self._ends[keep]])
            del self._steps[keep:], self._ends[keep + 1 :]
            if not self._steps:
                self._identity = self._given_identity  # it begins again, and so does its MLflow run
            self._torn = False
        return dropped

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
