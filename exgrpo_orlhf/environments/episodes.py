"""Episodes of an environment, each in a process of its own that can be killed, with a wall-clock limit for each answer.

One process (`worker.py`) loads the user's file, and forks for each episode. An episode has a socket, for messages of a
few bytes, and a memory file, for the states and the results: so a write here never waits for an episode that hangs,
whatever the size of the states. One request is under way at a time, so both use the same part of the file.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import select
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from ..rewards.pool.processes import Owned, start_worker

_START_TIMEOUT = 180.0  # seconds that the user's file may take to load, on a busy machine
_END_TIMEOUT = 5.0  # seconds for the end of all episodes
CONTENT = struct.calcsize("d")  # where states and results lie in the file, behind the time at which its process began
_FILES = 2**16  # file descriptors: an episode takes two here and two in the process that forks


class NoEnvironment(ValueError):
    """The environment's file cannot be used."""


class EpisodeFailed(Exception):
    """An episode that has no further reply; its process has been killed.

    verdict: 'timeout' or 'error'
    reason: what went wrong, in one line
    """

    def __init__(self, verdict: Literal["timeout", "error"], reason: str) -> None:
        super().__init__(verdict, reason)
        self.verdict, self.reason = verdict, reason

    def __str__(self) -> str:
        return self.reason


class Reply(NamedTuple):
    """The environment's answer to a reset or a step.

    observation: of a reset the observation, of a step its environment_feedback
    reward: of this step
    score: OpenRLHF's `scores`, where the step returned it
    logs: names and numbers to be logged (OpenRLHF's extra_logs)
    """

    observation: str
    done: bool = False
    reward: float = 0.0
    score: float | None = None
    logs: tuple[tuple[str, float], ...] = ()


class Episode:
    """One episode. `EpisodeProcesses.begin` makes it; `close` it, or its process lives as long as this object."""

    def __init__(self, timeout: float) -> None:
        self._timeout, self._sent = timeout, 0.0
        self._socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._file = open(os.memfd_create("episode"), "r+b", buffering=0)  # noqa: SIM115  (as long as the episode)

    def hand_over(self, control: socket.socket) -> None:
        """Give the other end to the process that forks. Raises OSError if that is gone."""
        with self._theirs:
            socket.send_fds(control, [b"x"], [self._theirs.fileno(), self._file.fileno()])

    def step(self, states: Mapping[str, Any]) -> None:
        """Ask for the next step, or for the reset at first, without waiting for it. A process that is dead is reported
        by `reply`. states: pickled"""
        pickled = pickle.dumps(dict(states))
        if self.fileno() < 0:
            return  # closed, which `reply` says
        self._file.seek(CONTENT)
        self._file.write(pickled)
        self._sent = time.monotonic()
        with suppress(OSError):
            self._socket.send(b"%d" % len(pickled))

    def fileno(self) -> int:
        """Readable when the reply is there or the process is dead; -1 once closed."""
        return self._socket.fileno()

    def ready(self) -> bool:
        """Whether `reply` would return or raise at once."""
        return self.fileno() < 0 or self._left() <= 0 or self._readable(0)

    def reply(self) -> Reply:
        """Wait for the reply to the last request, up to `timeout` seconds after it; of a reset, after its process has
        begun. Raises EpisodeFailed."""
        if self.fileno() < 0:
            raise EpisodeFailed("error", "the episode is closed")
        while not self._readable(min(1.0, self._left())):
            # Polled again, because this thread itself may have been kept from running until after the deadline.
            if self._left() <= 0 and not self._readable(0):
                self.close()
                raise EpisodeFailed("timeout", f"no answer within {self._timeout:g} s (Environment.timeout)")
        try:
            try:
                message = self._socket.recv(256)
            except ConnectionError:  # it ended with a request unread: how is told by the next message
                message = self._socket.recv(256)
            if message.isdigit():
                result = json.loads(os.pread(self._file.fileno(), int(message), CONTENT))
                if "reason" not in result:
                    logs = tuple((str(name), float(value)) for name, value in result.pop("logs", ()))
                    return Reply(**result, logs=logs)
                reason = str(result["reason"])
            else:
                reason = message.decode() or "its process ended"
        except (OSError, ValueError, TypeError, OverflowError) as error:  # what the user's code wrote there, say
            reason = f"its reply cannot be read: {type(error).__name__}"
        self.close()
        raise EpisodeFailed("error", reason)

    def close(self) -> None:
        """Kill its process group, within milliseconds and without waiting for its end. May be called again."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a close alone does nothing while a fork of ours has the socket
        self._socket.close()
        self._file.close()

    def _left(self) -> float:
        """Seconds until the deadline. Forks come one by one: with hundreds of episodes the last one begins late."""
        [begun] = struct.unpack("d", os.pread(self._file.fileno(), CONTENT, 0))
        return max(begun or self._sent + _START_TIMEOUT, self._sent) + self._timeout - time.monotonic()

    def _readable(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return bool(poll.poll(max(0.0, 1000 * seconds)))


class EpisodeProcesses:
    """The process that has loaded an environment's file, and the episodes that it forks.

    path: of the file
    timeout: seconds for a reset or a step
    memory: MiB for each episode, beyond what the loaded file takes
    """

    def __init__(self, path: str, timeout: float, memory: int) -> None:
        self.path, self.timeout, self.memory = path, timeout, memory
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def begin(self, states: Mapping[str, Any]) -> Episode:
        """A new episode, whose reset(states) is asked for, without waiting for it. From any thread.

        states: with a "seed", an int. Its process seeds random, numpy and torch with it
        Raises NoEnvironment if the file cannot be loaded, which the first call waits for.
        """
        with self._lock:
            if self._control is None or self._process is None or self._process.poll() is not None:
                self._end()  # it was killed from outside
                self._start()
            assert self._control is not None
            episode = Episode(self.timeout)
            episode.step(states)
            with suppress(OSError):  # killed just now: the episode's reply says so
                episode.hand_over(self._control)
        return episode

    def check(self) -> None:
        """Load the file, and end the process again. Raises NoEnvironment."""
        try:
            with self._lock:
                self._start()
        finally:
            self.close()

    def close(self) -> None:
        """Kill all episodes, with what they left behind."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, control, self._process, self._control = self._process, self._control, None, None
        if control:
            control.close()
        if process:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_TIMEOUT)
            process.kill()
            process.wait()

    def _start(self) -> None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        soft = _FILES if most == resource.RLIM_INFINITY else min(_FILES, most)
        if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        started: Future[subprocess.Popen[bytes]] = Future()
        # In a thread that lives as long: Linux ties "killed with its parent" to the parent's thread.
        target = lambda: _run(self.path, self.memory, theirs, started)
        threading.Thread(target=target, name="environment", daemon=True).start()
        self._process = started.result()
        self._control.settimeout(_START_TIMEOUT)
        try:
            message = self._control.recv(4096).decode() or "its process ended while it was loaded"
        except OSError:
            message = f"it was not loaded within {_START_TIMEOUT:g} s"
            self._process.kill()
        if message != "ready":
            self._control.close()
            self._control = None
            raise NoEnvironment(f"Environment.path = {self.path!r} cannot be used: {message}")


def _run(path: str, memory: int, theirs: socket.socket, started: Future[subprocess.Popen[bytes]]) -> None:
    fixed = {"PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0"}  # a seed also repeats the order of a set of texts
    try:
        with theirs:
            arguments = [path, str(memory)]
            process = start_worker("exgrpo_orlhf.environments.worker", arguments, [theirs.fileno()], fixed)
    except BaseException as error:
        started.set_exception(error)
        return
    started.set_result(process)
    process.wait()


episode_processes = Owned(EpisodeProcesses.close)
close_episodes = episode_processes.close
