"""The end of a program by a signal: Ctrl-C and SIGTERM."""

from __future__ import annotations

import logging
import signal
from typing import Protocol

log = logging.getLogger(__name__)


class Stop(Protocol):
    @property
    def signal(self) -> signal.Signals | None:
        """The signal that asked the run to end, or None."""


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
