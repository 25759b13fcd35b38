"""Workers: processes that answer calls, one after another, with a limit of time for each and a limit of memory.

A limit cannot be enforced inside the caller's process: alarms work in the main thread only, and one `999999999!` holds
the interpreter lock for hours. So a server, a process of its own (`forking.py`), loads what answers calls once (sympy
takes a second, a user's file what it likes) and then only forks: a worker is there within milliseconds, and no call is
answered in a process that a killed call has left with a lock, a thread or a half-grown heap. There is no signal handler
or semaphore in the caller: it works the same from any thread, asyncio.to_thread, a Ray task and an actor.

A worker has a socket, for messages of a few bytes, and a memory file, for calls and results: so a write never waits for
a process that hangs, whatever its size. What happens:
    a call beyond its time, a worker that is closed: the server kills it, with all that it has started
    a worker that dies, or exceeds its memory: the server says how on its socket
    a server that dies: the kernel kills its workers, and the next worker that is asked for starts another server
    a caller that dies, by SIGKILL too: the kernel tells the server, which kills its workers and ends
    Ctrl-C: it goes to the caller alone, since a server has a session of its own
    a caller that forks: the fork has no servers and starts others, since it has no threads of theirs
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import resource
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

START_TIMEOUT = 180.0  # seconds that loading may take, and a worker until it takes up a call, on a busy machine
_END_TIMEOUT = 5.0  # seconds for the end of all workers
CONTENT = struct.calcsize("d")  # where calls and results lie in the file, behind the time at which a call was taken up
_FILES = 2**16  # file descriptors: a worker takes two here and two in the server
_ROOT = Path(__file__).resolve().parents[2]
Owner = TypeVar("Owner")


class NotLoaded(ValueError):
    """What answers calls cannot be loaded, or its server is closed."""


class CallFailed(Exception):
    """A call without a result; its worker has been killed.

    verdict: 'timeout' or 'error'
    reason: what went wrong, in one line
    lost: whether the worker ended through no fault that is known of the call: it may have been killed from outside
    """

    def __init__(self, verdict: Literal["timeout", "error"], reason: str, lost: bool = False) -> None:
        super().__init__(verdict, reason, lost)
        self.verdict, self.reason, self.lost = verdict, reason, lost

    def __str__(self) -> str:
        return self.reason


class Worker:
    """A process that answers calls. `ForkServer.worker` makes it; `close` it, or it lives as long as this object."""

    def __init__(self, control: socket.socket, owner: str) -> None:
        self._owner, self._sent, self._at = owner, 0.0, CONTENT
        self._socket, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with other_end:
            self._file = open(os.memfd_create("call"), "r+b", buffering=0)  # noqa: SIM115  (as long as the worker)
            socket.send_fds(control, [b"x"], [other_end.fileno(), self._file.fileno()])

    def call(self, *pickled: bytes) -> None:
        """Ask for the answers to calls, which it answers one after another, without waiting for them. A process that is
        dead is reported by `reply`."""
        if self.fileno() < 0:
            return  # closed, which `reply` says
        content = pickle.dumps(pickled)
        self._file.seek(CONTENT)
        self._file.write(content)
        self._at = CONTENT + len(content)  # of the next reply
        self._sent = time.monotonic()
        with suppress(OSError):
            self._socket.send(b"%d" % len(content))

    def fileno(self) -> int:
        """Readable when the reply is there or the process is dead; -1 once closed."""
        return self._socket.fileno()

    def ready(self, timeout: float) -> bool:
        """Whether `reply` would return or raise at once."""
        return self.fileno() < 0 or self._left(timeout) <= 0 or self._readable(0)

    def reply(self, timeout: float) -> Any:
        """Wait for the result of the next call, up to `timeout` seconds after it was taken up. Raises CallFailed, and
        then the calls behind it are dropped."""
        if self.fileno() < 0:
            raise CallFailed("error", "its process is closed")
        while not self._readable(min(1.0, self._left(timeout))):
            # Polled again, because this thread itself may have been kept from running until after the deadline.
            if self._left(timeout) <= 0 and not self._readable(0):
                self.close()
                raise CallFailed("timeout", f"no answer within {timeout:g} s ({self._owner}.timeout)")
        reason, lost = "its process ended", True
        try:
            try:
                message = self._socket.recv(256)
            except ConnectionError:  # it ended with a call unread: how is told by the next message
                message = self._socket.recv(256)
            if message.isdigit():
                result, reason = pickle.loads(os.pread(self._file.fileno(), int(message), self._at))
                self._at += int(message)
                if not reason:
                    return result
                lost = False
            elif message:
                reason = message.decode()
                lost = reason.endswith("killed by SIGKILL")
        except Exception as error:  # what the user's code wrote there, say
            if not isinstance(error, ConnectionError):
                reason, lost = f"its reply cannot be read: {type(error).__name__}", False
        self.close()
        raise CallFailed("error", str(reason), lost)

    def close(self) -> None:
        """Kill its process group, within milliseconds and without waiting for its end. May be called again."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a close alone does nothing while a fork of ours has the socket
        self._socket.close()
        self._file.close()

    def _left(self, timeout: float) -> float:
        """Seconds until the deadline. Forks come one by one: with hundreds of workers the last one begins late."""
        [begun] = struct.unpack("d", os.pread(self._file.fileno(), CONTENT, 0))
        start = begun if begun >= self._sent else self._sent + START_TIMEOUT
        return float(start + timeout - time.monotonic())

    def _readable(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return bool(poll.poll(max(0.0, 1000 * seconds)))


def replies(workers: Sequence[Worker], timeout: float) -> list[Any]:
    """Of each as `Worker.reply` returns it, or the CallFailed that it raises."""
    results: list[Any] = []
    for worker in workers:
        try:
            results.append(worker.reply(timeout))
        except CallFailed as error:
            results.append(error)
    return results


class ForkServer:
    """The process that has loaded what answers calls, and the workers that it forks.

    load: 'module:function', which is called there with the settings, and returns what is said of it here (`info`) and
        the function that answers a call. Each worker has a copy of it
    settings: JSON; 'memory' in MiB among it, for each worker, beyond what was loaded
    binding: what messages name, such as "Environment.path = 'game.py'"; the limits are of the same class
    """

    def __init__(self, load: str, settings: Mapping[str, Any], binding: str) -> None:
        self._binding, self._owner = binding, binding.partition(".")[0]
        self._load, self._settings = load, json.dumps(settings).encode()
        self.info = ""
        self.failed: NotLoaded | None = None  # why there are no more workers
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None  # once it is loaded
        self._was_loaded = False  # by this process or an earlier one

    def worker(self) -> Worker:
        """A new worker. From any thread.

        Raises NotLoaded, for which the first call waits, and CallFailed if no process or descriptor is left.
        """
        with self._lock:
            try:
                try:
                    return Worker(self._control or self._start(), self._owner)
                except ConnectionError:  # it was killed from outside
                    self._end()
                    return Worker(self._start(), self._owner)
            except OSError as error:
                raise CallFailed("error", f"no process could be started: {error}", lost=True) from error

    def try_loading(self) -> str:
        """Load, and end the process again. Returns `info`. Raises NotLoaded."""
        try:
            with self._lock:
                self._start()
            return self.info
        finally:
            self.close()

    def close(self) -> None:
        """Kill all workers, with what they left behind. There are no others."""
        self.failed = self.failed or NotLoaded(f"{self._binding}: its processes were closed")
        if self._control is None and (process := self._process):
            process.kill()  # whoever waits for it has the lock
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, control, self._process, self._control = self._process, self._control, None, None
        if control:
            with suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)
            control.close()
        if process:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_TIMEOUT if control else 0)
            process.kill()
            process.wait()

    def _start(self) -> socket.socket:
        if self.failed:
            raise self.failed
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        soft = _FILES if most == resource.RLIM_INFINITY else min(_FILES, most)
        if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
        control, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        started: Future[subprocess.Popen[bytes]] = Future()
        # In a thread that lives as long: Linux ties "killed with its parent" to the parent's thread.
        threading.Thread(target=self._run, args=(other_end, started), name="fork server", daemon=True).start()
        self._process = started.result()
        if self.failed:  # closed meanwhile, when there was nothing to kill
            self._process.kill()
        control.settimeout(START_TIMEOUT)
        try:
            message = control.recv(4096)
            unusable = bool(message)
            self.info, reason = json.loads(message or '["", "its process ended while it was loaded"]')
        except TimeoutError:
            unusable, reason = False, f"it was not loaded within {START_TIMEOUT:g} s"
        if not reason:
            self._control, self._was_loaded = control, True
            return control
        control.close()
        self._end()
        if self._was_loaded and not unusable:
            raise CallFailed("error", reason, lost=True)
        self.failed = self.failed or NotLoaded(f"{self._binding} cannot be used: {reason}")
        raise self.failed

    def _run(self, other_end: socket.socket, started: Future[subprocess.Popen[bytes]]) -> None:
        paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(_ROOT)]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        fixed = {"PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0"}  # a seed also repeats the order of a set of texts
        command = [sys.executable, "-P", "-c", "from exgrpo_orlhf.workers.forking import main; main()"]
        try:
            with other_end, open(os.memfd_create("settings"), "r+b") as settings:
                settings.write(self._settings)
                settings.seek(0)
                process = subprocess.Popen(
                    [*command, self._load, self._owner, str(os.getpid()), str(other_end.fileno())],
                    stdin=settings,  # an argument is bounded, and a user's file is among them
                    stdout=2,  # what a user's file prints
                    pass_fds=[other_end.fileno()],
                    start_new_session=True,  # Ctrl-C goes to the caller alone
                    env={**os.environ, **threads, **fixed, "PYTHONPATH": os.pathsep.join(paths)},
                )
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        process.wait()


_kept: dict[Any, Any] = {}  # this process's servers and pools of workers
_one_at_a_time = threading.RLock()


def kept(key: Any, make: Callable[[], Owner]) -> Owner:
    """The server or pool that this process has under a key; made at its first use, and again when it has `failed`."""
    with _one_at_a_time:
        if key not in _kept or _kept[key].failed:
            _kept[key] = make()
        owner: Owner = _kept[key]
        return owner


def close_workers() -> None:
    """End every server and pool of this process. Their next use starts others."""
    while _kept:
        _kept.popitem()[1].close()


def _forget() -> None:
    """In a fork of this process: the workers belong to its parent."""
    global _one_at_a_time
    _one_at_a_time = threading.RLock()
    _kept.clear()


atexit.register(close_workers)
os.register_at_fork(after_in_child=_forget)
