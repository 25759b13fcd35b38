"""What the driver hands to the trainer, which is an actor of Ray: the training loop and what it needs to start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...experiment import Experiment, Outcome
from ...settings import OpenRLHF
from ...stopping import Stop
from ..engine import Engine


class Going(Protocol):
    """A training loop that is ready to start."""

    def go(self, stop: Stop) -> Outcome: ...


# training.TrainingRun: from experiment, maker of the engine, run folder, tracking URI and tags. It is an argument,
# because this engine cannot import what lies above it.
Loop = Callable[[Experiment, Callable[[Path | None], Engine], Path, str, Mapping[str, str]], Going]


@dataclass(frozen=True, repr=False)
class Job:
    """settings: the experiment's, of this engine"""

    experiment: Experiment
    settings: OpenRLHF
    loop: Loop
    run: Path
    tracking_uri: str
    tags: Mapping[str, str]
