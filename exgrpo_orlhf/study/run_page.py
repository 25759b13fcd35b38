"""The page of a run's experience: charts, and every question with its life; made afterwards or while the run trains."""

from __future__ import annotations

import base64
import gzip
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .. import checkpoints
from ..io import tokenizer_file
from ..io.files import write
from ..io.paths import run_name
from ..questions.special_tokens import decoder
from ..records import Question
from ..replay import ReplayBuffer, RetirementPolicy, snapshot
from ..show.page import page as filled
from ..tracking.listener import ListenedRun
from . import buffer_charts
from .history import KINDS, History, forgotten_by_step, read

log = logging.getLogger(__name__)

SHARE = 0.01  # of a run's time, at most, goes into its page


class RunPage:
    """`explore.html` of a run that trains: written to its folder and sent to MLflow, again and again.

    Only where the run is tracked; elsewhere scripts/explore.py makes the page. It never stops training.
    """

    def __init__(self, run: ListenedRun) -> None:
        self._run = run
        self._made, self._cost = time.monotonic(), 1.0  # when, and the seconds that it took; a guess before the first

    def saved(self, buffer: ReplayBuffer, step: int) -> None:
        """Make the page anew, unless that would take more than `SHARE` of the time since it was made."""
        if SHARE * (time.monotonic() - self._made) > self._cost:
            self.ended(buffer, step)

    def ended(self, buffer: ReplayBuffer, step: int) -> None:
        """Make the page. Before the first step there is nothing to show."""
        run, began = self._run, time.monotonic()
        if not (step and run.tracker.enabled):
            return
        path = run.folder / "explore.html"
        try:
            write(path, page(read(run.folder, buffer, step, run.questions, run.decode), run_name(run.folder)))
            run.tracker.artifact(path)
        except (OSError, ValueError, RuntimeError) as error:
            log.warning("%s could not be made: %s", path, error)
        self._made = time.monotonic()
        self._cost = self._made - began


def explore(run: Path, questions: Sequence[Question], notes: Sequence[str] = ()) -> str:
    """The page as HTML, from the log and the newest checkpoint.

    questions: the run's, as far as they are known; of others only logged rollouts have a prompt
    notes: plain texts for the head of the page
    Raises ValueError without a log or for a corrupt one, SnapshotError for a damaged buffer.
    """
    saved = checkpoints.find(run)
    if not saved:
        missing = "The run has no checkpoint yet: what is stored is not shown."
        history = read(run, ReplayBuffer(RetirementPolicy()), None, questions, str)
        return page(history, run_name(run.resolve()), [*notes, missing])
    step, folder = max(saved.items())
    history = read(run, snapshot.read(folder / "replay"), step, questions, decoder(tokenizer_file.load(folder)))
    return page(history, run_name(run.resolve()), notes)


def page(history: History, name: str, notes: Sequence[str] = ()) -> str:
    """The whole page. name: of the run; notes: what the reader should know of it, plain texts"""
    return filled(
        "explore.html",
        script="explore.js",
        data=packed(history),
        title=f"Experience of {name}",
        notes=notes,
        history=history,
        charts=buffer_charts,
        kinds=Counter(KINDS[kind] for kind in history.events["kind"]),
        forgotten=forgotten_by_step(history)[-1],
    )


def packed(history: History) -> str:
    """The page's data, as JSON in gzip in base64."""
    replays = ("age", "of", "place", "entropy", "log_weight", "sound")
    columns = ("ids", "prompts", "answers", "measured", "accuracy", "retired", "stored", "distinct", "logged", "texts")
    data = {
        "steps": [history.steps[0], history.step],
        "kinds": KINDS,
        "bufferStep": history.buffer_step,
        "checked": any(history.events["checked"]),
        "events": {name: values for name, values in history.events.items() if name != "checked"},
        "replays": {name: history.replays[name] for name in replays},
        **{name: getattr(history, name) for name in columns},
    }
    text = json.dumps(data, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(text, 6, mtime=0)).decode("ascii")
