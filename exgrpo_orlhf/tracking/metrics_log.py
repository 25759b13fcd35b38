"""The record of a run's metrics: `metrics.jsonl` in its folder, one line per step."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from ..checkpoints import identities, note_identity
from ..io.json_lines import StepLog
from ..io.metric_names import check_name

STEP_METRIC = "train/step"  # the tracker's own metric
START_METRIC = "supervised/step"  # the same for the curve of a supervised start, which has steps of its own
SET_ASIDE_METRIC = "train/set_aside_from"  # a point at step s and time t: what is at s or later and before t is void
ARRIVED = "metrics.arrived"  # in a run's folder: address and experiment of the MLflow that has all of the finished run
METRICS_PER_CALL = 1000  # the most metrics that an MLflow server takes in one call, all or none


class MetricsLog(StepLog):
    """`metrics.jsonl`: one JSON object a line, {"step": n, "time": seconds since 1970, metrics…}, steps increasing."""

    ROW = "a row of metrics"

    def __init__(self, path: Path, identity: str | None = None) -> None:
        """identity: of an earlier log that this one replaces, so that the same MLflow run continues"""
        self._given_identity = self._identity = identity
        super().__init__(path)

    def _key(self, row: Any) -> Any:
        if type(row["time"]) is not float:
            raise ValueError("its 'time' is not seconds since 1970")
        return super()._key(row)

    @property
    def identity(self) -> str:
        """A random name kept beside the log (`metrics.id`).

        A tracker finds the MLflow run of this log by it, even if no checkpoint has stored the run's id; a checkpoint
        names it as the run that it belongs to. A log without rows gets a new identity, unless it was made with one.
        """
        names = identities(self.path.parent)
        if names and (self.keys or names[0] == self._identity):
            return names[0]
        self._identity = self._identity or uuid.uuid4().hex
        note_identity(self.path.parent, self._identity)
        return self._identity

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one step's row and hands it to the operating system.

        Raises ValueError for a step that is not above the last one, a name that MLflow would refuse, a value that is no
        finite number, or an incomplete last line.
        """
        row: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        for name, value in metrics.items():
            check_name(name)
            if name in ("step", "time", STEP_METRIC, START_METRIC, SET_ASIDE_METRIC):
                raise ValueError(f"the metric name {name!r} is reserved: every row has it already")
            # Means over empty sets are 0 by definition, so a NaN is an error of the code that computed it.
            if not isinstance(value, Real) or not math.isfinite(value):
                raise ValueError(f"metric {name!r} of step {step} is {value!r}; metrics are finite numbers")
            row[name] = int(value) if isinstance(value, Integral) else float(value)
        self.add(row)

    def cut_back(self, step: int) -> int:
        changes = self._torn or step < self.last_step
        dropped = super().cut_back(step)
        if changes and not self.keys:
            self._identity = self._given_identity  # it begins again, and so does its MLflow run
        return dropped
