"""What surrounds a run: its folder, its end by a signal, its clock, its line in the terminal."""

from __future__ import annotations

import fcntl
import logging
import re
import signal
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from .checkpoints import find

log = logging.getLogger(__name__)
Item = TypeVar("Item")


class RunFolderError(RuntimeError):
    """The run's folder is in use, or holds a run that was not asked to be resumed."""


@contextmanager
def claim(run: Path, resume: bool) -> Iterator[None]:
    """Hold the run's folder against a second process, and against overwriting an earlier run."""
    if not resume and ((run / "metrics.jsonl").exists() or find(run)):
        raise RunFolderError(
            f"{run} holds a run already: continue it with --resume, or name another with --name or --out"
        )
    run.mkdir(parents=True, exist_ok=True)
    with (run / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(f"another process is at work in {run}") from None
        yield


class Stop(Protocol):
    """signal: what asked the run to end, None as long as nothing did"""

    signal: signal.Signals | None


class StopRequest:
    """Ctrl-C and SIGTERM end the run after the current step, with a checkpoint. A second one ends it at once."""

    def __init__(self, what_follows: str = "this step is finished and saved, then the run ends") -> None:
        """what_follows: as the user is told"""
        self.signal: signal.Signals | None = None
        self._what_follows = what_follows

    def __enter__(self) -> StopRequest:
        self._before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
        self.take_signals()
        return self

    def take_signals(self) -> None:
        """Once more after a library that takes them for itself."""
        for number in self._before:
            signal.signal(number, self._request)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, _: object) -> None:
        self.signal = signal.Signals(number)
        log.warning("%s: %s; once more ends it now", self.signal.name, self._what_follows)
        before = self._before[self.signal]
        if before == signal.SIG_IGN:  # a process of the background has Ctrl-C ignored; "now" was promised all the same
            before = signal.default_int_handler if self.signal == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, before)


class Clock:
    """Seconds of each part of a step."""

    def __init__(self) -> None:
        self.begin = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self.last
        self.last = now

    def lap_after(self, name: str, items: Iterable[Item]) -> Generator[Item, None, None]:
        """The same items; the lap ends when there are no more."""
        yield from items
        self.lap(name)

    def times(self) -> dict[str, float]:
        return {
            **{f"time/{name}": seconds for name, seconds in self.laps.items()},
            "time/step": time.perf_counter() - self.begin,
        }


def validation_accuracy(metrics: Mapping[str, float]) -> tuple[str, float] | None:
    """What an evaluation calls its score, and the score; None in a step without one."""
    if "eval/greedy_accuracy" in metrics:
        return "greedy accuracy", metrics["eval/greedy_accuracy"]
    sampled = (name for name in metrics if re.fullmatch(r"eval/validation/avg_at_\d+", name))
    return next((("validation " + name.rpartition("/")[2], metrics[name]) for name in sampled), None)


class Progress:
    """A line every few seconds: where the run is, how it does, when it ends."""

    def __init__(self, name: str, step: int, steps: int) -> None:
        self.name, self.first, self.steps = name, step, steps
        self.began = time.perf_counter()
        self.shown = 0.0

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.perf_counter()
        accuracy = validation_accuracy(metrics)
        if now - self.shown < 5 and step < self.steps and accuracy is None:
            return
        self.shown = now
        left = (now - self.began) / (step - self.first) * (self.steps - step)
        log.info(
            "%s: step %d/%d  reward %.3f  replayed %.0f %%  stored %d  retired %d%s  %.2f s/step  %d:%02d left",
            self.name,
            step,
            self.steps,
            metrics["reward/mean"],
            100 * metrics["replay/actual_share"],
            metrics["replay/trajectories"],
            metrics["replay/retired"],
            "" if accuracy is None else f"  {accuracy[0]} {accuracy[1]:.3f}",
            metrics["time/step"],
            *divmod(round(left), 60),
        )
