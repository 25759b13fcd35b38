"""The end of a program by a signal: Ctrl-C, SIGTERM, and SIGHUP, which a closed terminal sends."""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import sys
import termios
import threading
from typing import Any, Protocol, TextIO

log = logging.getLogger(__name__)


class Stop(Protocol):
    @property
    def signal(self) -> signal.Signals | None:
        """The signal that asked the run to end, or None."""


class StopRequest:
    """Ctrl-C, SIGTERM and SIGHUP end the run after the current step, with a checkpoint. A second one ends it at once,
    but not a second SIGHUP: one closed terminal sends several. Where SIGHUP is ignored (nohup), it stays so. Signals
    come to the main thread alone: what another one runs, such as a server's, they do not end."""

    def __init__(self, what_follows: str = "a step under way is finished and saved, then the run ends") -> None:
        """what_follows: as the user is told"""
        self.signal: signal.Signals | None = None
        self._what_follows = what_follows

    def __enter__(self) -> StopRequest:
        is_main = threading.current_thread() is threading.main_thread()
        taken = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if is_main else ()
        self._before = {number: signal.getsignal(number) for number in taken}
        if self._before.get(signal.SIGHUP) == signal.SIG_IGN:
            del self._before[signal.SIGHUP]
        self.take_signals()
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = map(_writable_when_closed, self._streams)
        return self

    def take_signals(self) -> None:
        """Once more after a library that takes them for itself."""
        for number in self._before:
            signal.signal(number, self._request)

    def __exit__(self, *_: object) -> None:
        sys.stdout, sys.stderr = self._streams
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, _: object) -> None:
        repeated, self.signal = self.signal == number, signal.Signals(number)
        if number == signal.SIGHUP:
            _leave_closed_terminal()
            if not repeated:
                log.warning("SIGHUP: %s", self._what_follows)
            return
        log.warning("%s: %s; once more ends it now", self.signal.name, self._what_follows)
        before = self._before[self.signal]
        if before == signal.SIG_IGN:  # a process of the background has Ctrl-C ignored; "now" was promised all the same
            before = signal.default_int_handler if self.signal == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, before)


def described(status: int) -> str:
    """How a process has ended. status: its exit status, or minus the number of the signal that killed it"""
    if status >= 0:
        return f"exit status {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-status, f'signal {-status}')}"


class _Terminal(io.FileIO):
    """A write that finds the terminal closed fails before Python has run SIGHUP's handler. It goes to /dev/null."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            _leave_closed_terminal()
            return super().write(data)


def _writable_when_closed(stream: TextIO) -> TextIO:
    """The same stream, which a closed terminal does not turn into an error."""
    if not stream.isatty():
        return stream
    raw = _Terminal(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True)


def _leave_closed_terminal() -> None:
    """Redirect what is open on a closed terminal to /dev/null: writing to it is an error, which would end the run."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                os.dup2(null, descriptor, inheritable=os.get_inheritable(descriptor))
    os.close(null)
