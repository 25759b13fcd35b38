"""The page of a run's folder, made afterwards or while the run trains."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .. import checkpoints
from ..files import write
from ..records import Question
from ..replay import ReplayBuffer, RetirementPolicy, snapshot
from ..tracking.tracker import MlflowTracker
from .explorer_page import page
from .history import read

log = logging.getLogger(__name__)

SHARE = 0.01  # of a run's time, at most, goes into its page


class RunPage:
    """`explore.html` of a run that trains: written to its folder and sent to MLflow, again and again.

    Only where the run is tracked; elsewhere scripts/explore.py makes the page. It never stops training.
    """

    def __init__(
        self,
        run: Path,
        tracker: MlflowTracker,
        questions: Sequence[Question],
        decode: Callable[[npt.NDArray[np.int32]], str],
    ) -> None:
        self._run, self._tracker, self._questions, self._decode = run, tracker, questions, decode
        self._made, self._cost = time.monotonic(), 1.0  # when, and the seconds that it took; a guess before the first

    def refresh(self, buffer: ReplayBuffer, step: int, *, last: bool = False) -> None:
        """Make the page anew, unless that would take more than `SHARE` of the time since it was made. last: make it.
        Before the first step there is nothing to show."""
        began = time.monotonic()
        if not (step and self._tracker.enabled) or not (last or SHARE * (began - self._made) > self._cost):
            return
        try:
            history = read(self._run, buffer, step, self._questions, self._decode)
            write(self._run / "explore.html", page(history, self._run.name))
            self._tracker.artifact(self._run / "explore.html")
        except (OSError, ValueError, RuntimeError) as error:
            log.warning("%s could not be made: %s", self._run / "explore.html", error)
        self._made = time.monotonic()
        self._cost = self._made - began


def explore(run: Path, questions: Sequence[Question], notes: Sequence[str] = ()) -> str:
    """The page as HTML, from the log and the newest checkpoint.

    questions: the run's, as far as they are known; of others only logged rollouts have a prompt
    notes: plain texts for the head of the page
    Raises NoHistory, ValueError for a corrupt log, SnapshotError for a damaged buffer.
    """
    saved = checkpoints.find(run)
    if not saved:
        missing = "The run has no checkpoint yet: what is stored is not shown."
        return page(read(run, None, None, questions, lambda ids: ""), run.resolve().name, [*notes, missing])
    step, folder = max(saved.items())
    buffer = ReplayBuffer(RetirementPolicy())
    snapshot.load(folder / "replay", buffer, snapshot.fingerprint(folder / "replay"))
    return page(read(run, buffer, step, questions, _decoder(folder)), run.resolve().name, notes)


def _decoder(checkpoint: Path) -> Callable[[npt.NDArray[np.int32]], str]:
    from transformers import AutoTokenizer  # seconds

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    return lambda ids: str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))
