"""The line in the terminal that says where a run is, and how long it takes."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Iterable, Mapping

log = logging.getLogger(__name__)
_SCORE = re.compile(r"eval/greedy_accuracy|eval/validation/avg_at_\d+")  # the first wins


def score_name(metrics: Iterable[str]) -> str | None:
    """The metric that is the score of an evaluation, by Evaluation.temperature; None in a step without one."""
    return min(filter(_SCORE.fullmatch, metrics), default=None)


def evaluations_left(step: int, steps: int, every: int | None) -> int:
    """How many evaluations follow step `step`: one in every `every` steps, and one at the end."""
    return 0 if every is None or step >= steps else -(-steps // every) - step // every


def duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes} min" if minutes < 100 else f"{seconds / 3600:.1f} h"


class Progress:
    """A line every few seconds: where the run is, how it does, when it ends."""

    def __init__(self, name: str, step: int, steps: int, eval_every: int | None, evaluation: float) -> None:
        """step: the last one so far; evaluation: seconds that the last evaluation took, 0 if there was none"""
        self.name, self.steps, self.every, self.evaluation = name, steps, eval_every, evaluation
        self.last = time.perf_counter()
        self.took: deque[float] = deque(maxlen=50)  # seconds of the last steps, with checkpoints, without evaluations
        self.shown = 0.0

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.perf_counter()
        self.evaluation = metrics.get("time/evaluation", self.evaluation)
        self.took.append(now - self.last - metrics.get("time/evaluation", 0.0))
        self.last = now
        score = ""
        if name := score_name(metrics):
            label = "greedy accuracy" if "greedy" in name else f"validation {name.rpartition('/')[2]}"
            score = f"  {label} {metrics[name]:.3f}"
        if now - self.shown < 5 and step < self.steps and not score:
            return
        self.shown = now
        seconds = sum(self.took) / len(self.took) * (self.steps - step)
        seconds += evaluations_left(step, self.steps, self.every) * self.evaluation
        log.info(
            "%s: step %d/%d  reward %.3f  replayed %.0f %%  stored %d  retired %d%s  %.2f s/step  %d:%02d left",
            self.name,
            step,
            self.steps,
            metrics["reward/mean"],
            100 * metrics.get("replay/actual_share", 0),
            metrics.get("replay/trajectories", 0),
            metrics.get("replay/retired", 0),
            score,
            metrics["time/step"],
            *divmod(round(seconds), 60),
        )
