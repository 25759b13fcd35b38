"""Who is told that a run has saved a checkpoint and that it has ended: pages and pictures, none of which stops it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..io.entry_points import loaded
from ..records import Question
from ..replay import ReplayBuffer
from .metrics_log import MetricsLog
from .tracker import MlflowTracker


@dataclass(frozen=True)
class ListenedRun:
    """What a listener gets to know. folder: of the run; decode: token ids → text"""

    folder: Path
    metrics: MetricsLog
    tracker: MlflowTracker
    questions: Sequence[Question]
    decode: Callable[[npt.NDArray[np.int32]], str]


class Listener(Protocol):
    """Made with a `ListenedRun`. Its own failures are logged, not raised: the run is saved."""

    def saved(self, buffer: ReplayBuffer, step: int) -> None:
        """A checkpoint of this step has been written."""

    def ended(self, buffer: ReplayBuffer, step: int) -> None:
        """The last step, or the last before a signal, is done and saved."""


def listeners(run: ListenedRun) -> list[Listener]:
    """Of this and of other distributions: the entry points of the group `exgrpo_orlhf.listeners`, by name."""
    points = sorted(entry_points(group="exgrpo_orlhf.listeners"), key=lambda point: point.name)
    return [loaded(point)(run) for point in points]
