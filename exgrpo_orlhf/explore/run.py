"""The page of a run's folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .. import checkpoints
from ..records import Question
from ..replay import ReplayBuffer, RetirementPolicy, snapshot
from .history import read
from .page import page


def explore(run: Path, questions: Sequence[Question], notes: Sequence[str] = ()) -> str:
    """The page as HTML, from the log and the newest checkpoint.

    questions: the run's, as far as they are known; of others only logged rollouts have a prompt
    notes: plain texts for the head of the page
    Raises NoHistory, ValueError for a corrupt log, SnapshotError for a damaged buffer.
    """
    found = checkpoints.find(run)
    if not found:
        missing = "The run has no checkpoint yet: what is stored is not shown."
        return page(read(run, None, None, questions, _no_text), run.resolve().name, [*notes, missing])
    step, folder = max(found.items())
    buffer = ReplayBuffer(RetirementPolicy())
    snapshot.load(folder / "replay", buffer, snapshot.fingerprint(folder / "replay"))
    return page(read(run, buffer, step, questions, _decoder(folder)), run.resolve().name, notes)


def _no_text(ids: npt.NDArray[np.int32]) -> str:
    return ""


def _decoder(checkpoint: Path) -> Callable[[npt.NDArray[np.int32]], str]:
    from transformers import AutoTokenizer  # seconds

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return lambda ids: str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))
