"""What the driver hands to the trainer, which is an actor of Ray: the training loop and what it needs to start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...experiment import Experiment, Outcome
from ...records import Question
from ...settings import OpenRLHF
from ...stopping import Stop
from ..engine import Engine


class Loop(Protocol):
    """`training.preparation.prepare_and_run`. It is an argument, because this engine cannot import what lies above
    it."""

    def __call__(
        self,
        experiment: Experiment,
        make_engine: Callable[[Path | None], Engine],
        folder: Path,
        tracking_uri: str,
        tags: Mapping[str, str],
        stop: Stop,
        questions: tuple[list[Question], list[Question]] | None = None,
    ) -> Outcome: ...


@dataclass(frozen=True, repr=False)
class Job:
    """settings: the experiment's, of this engine"""

    experiment: Experiment
    settings: OpenRLHF
    loop: Loop
    run: Path
    tracking_uri: str
    tags: Mapping[str, str]
