"""A run to train, with the loop that trains it as a value: an engine cannot import what lies above it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..experiment import Experiment, Outcome
from ..records import Question
from ..stopping import Stop
from .engine import Engine

MakeEngine = Callable[[Path | None], Engine]  # with the weights of a checkpoint if there is one
Loop = Callable[["Job", MakeEngine, Stop], Outcome]  # `training.preparation.prepare_and_run`


@dataclass(frozen=True, repr=False)
class Job:
    """What the OpenRLHF driver hands to the trainer, which is an actor of Ray, and what a local run is made of.

    run: its folder; questions: of training and of validation, where they were loaded already
    """

    experiment: Experiment
    run: Path
    tracking_uri: str
    tags: Mapping[str, str]
    loop: Loop
    questions: tuple[list[Question], list[Question]] | None = None
