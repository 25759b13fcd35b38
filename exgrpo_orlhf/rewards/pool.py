"""A pool of grading processes that can be killed, with a wall-clock limit for each answer.

In-process limits cannot hold: alarms work in the main thread alone, and one `999999999!` keeps the interpreter lock for
longer than anyone waits. So answers are graded in processes of their own (`worker.py`), over plain pipes, without a
signal handler, a semaphore or anything else of multiprocessing in the caller: it works the same from the main thread,
any other, asyncio.to_thread, a Ray task and an actor. Each worker has a thread here that feeds it and watches the
clock; the thread also starts it, since Linux ties "killed with its parent" to the parent's thread.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import pickle
import select
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import SIGUSR1, SIGUSR2
from typing import Any

from .answer import Answer, Graded
from .worker import KILLED

log = logging.getLogger(__name__)

_START = 180.0  # seconds a worker may take to import what it needs, on a machine that has much else to do
_CHUNK = 8  # answers sent at a time: the pipes cost little beside grading, and few wait behind one that hangs
_TRIES = 3  # workers that may break down on the same chunk before its first answer is given up
_ROOT = Path(__file__).resolve().parents[2]


class GradingError(ValueError):
    """Grading cannot go on: the grader cannot be loaded, the pool is closed, or too many answers have failed."""


class _Broken(Exception):
    """The worker process itself is of no more use."""


class Grading:
    """Answers on their way through a pool, handed over in one call or in several; their verdicts as they come in."""

    def __init__(self, pool: Pool) -> None:
        self.results: list[Graded | None] = []  # by the order in which the answers were sent
        self.killed: set[int] = set()  # answers whose process was killed from outside, once
        self.error: GradingError | None = None
        self._pool, self._left, self._change = pool, 0, threading.Condition()

    def send(self, answers: Sequence[Answer]) -> None:
        """To be graded from now on. Raises GradingError if that cannot be, or if grading has failed already."""
        if self.error:
            raise self.error
        first = len(self.results)
        jobs = [(self, first + i, pickle.dumps(answer)) for i, answer in enumerate(answers)]
        with self._change:
            self.results += [None] * len(jobs)
            self._left += len(jobs)
        self._pool.take_in(jobs)

    def wait(self) -> list[Graded]:
        """The verdicts of all that was sent, in that order. Blocks. Raises GradingError."""
        with self._change:
            self._change.wait_for(lambda: self.error is not None or not self._left)
        if self.error:
            raise self.error
        return [graded for graded in self.results if graded is not None]

    def put(self, index: int, graded: Graded) -> None:
        with self._change:
            self.results[index] = graded
            self._left -= 1
            self._change.notify_all()

    def fail(self, error: GradingError) -> None:
        """The answers that no worker has taken yet are not graded any more."""
        with self._change:
            self.error = error
            self._change.notify_all()


Job = tuple[Grading, int, bytes]  # the answer is pickled by the caller: what cannot be is the caller's error


class Pool:
    """settings: what `worker.load` takes, JSON; 'memory' in MiB among it
    timeout: seconds of wall clock for each answer
    workers: processes; each starts when there is first something to do for it
    """

    def __init__(self, settings: Mapping[str, Any], timeout: float, workers: int) -> None:
        self.settings, self.timeout, self.workers = dict(settings), timeout, workers
        self._waiting: deque[list[Job]] = deque()
        self._change = threading.Condition()
        self._slots: list[_Slot] = []
        self._idle = 0
        self._closed = False

    def grade(self, answers: Sequence[Answer]) -> list[Graded]:
        """Verdicts in the order of the answers. Blocks; may be called from several threads. Raises GradingError."""
        grading = Grading(self)
        grading.send(answers)
        return grading.wait()

    def take_in(self, jobs: list[Job]) -> None:
        """Raises GradingError if the pool is closed."""
        size = max(1, min(_CHUNK, len(jobs) // (4 * self.workers)))
        chunks = [jobs[i : i + size] for i in range(0, len(jobs), size)]
        with self._change:
            if self._closed:
                raise GradingError("the pool of grading processes is closed")
            self._waiting.extend(chunks)
            for _ in range(min(len(self._waiting) - self._idle, self.workers - len(self._slots))):
                slot = _Slot(self)
                self._slots.append(slot)
                slot.thread.start()
            self._change.notify_all()

    def close(self) -> None:
        """Kill the workers. What still waits for a verdict gets GradingError."""
        with self._change:
            self._closed = True
            jobs = [job for chunk in self._waiting for job in chunk]
            self._waiting.clear()
            self._change.notify_all()
        for grading, _, _ in jobs:
            grading.fail(GradingError("the pool of grading processes was closed"))
        for slot in self._slots:
            slot.stop()
        for slot in self._slots:
            slot.thread.join(timeout=5)

    def take(self) -> list[Job] | None:
        """The next chunk; None when the pool has closed. Jobs of a call that has failed already are left out."""
        with self._change:
            while True:
                while not self._waiting and not self._closed:
                    self._idle += 1
                    self._change.wait()
                    self._idle -= 1
                if self._closed:
                    return None
                chunk = [job for job in self._waiting.popleft() if job[0].error is None]
                if chunk:
                    return chunk

    def put_back(self, chunk: list[Job]) -> None:
        """To be graded next, by whoever is free."""
        with self._change:
            if chunk and not self._closed:
                self._waiting.appendleft(chunk)
                self._change.notify()
                return
        for grading, _, _ in chunk:
            grading.fail(GradingError("the pool of grading processes was closed"))


class _Slot:
    """One worker process and the thread that feeds it."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.thread = threading.Thread(target=self._run, name="grading", daemon=True)
        self.process: subprocess.Popen[bytes] | None = None
        self.tried = 0  # workers that broke down on the chunk at hand
        self.lock = threading.Lock()

    def _run(self) -> None:
        while chunk := self.pool.take():
            try:
                self._grade(chunk)
                self.tried = 0
            except GradingError as error:
                for grading in {id(job[0]): job[0] for job in chunk}.values():
                    grading.fail(error)
            except Exception as error:  # whatever else: a caller must never wait for a verdict that cannot come
                self._broken(chunk, error)
        self._end()

    def stop(self) -> None:
        """From any thread: kill the worker. The slot's own thread cleans up."""
        with self.lock:
            if self.process is not None:
                self.process.kill()  # the fork that grades, and what that has started, die with it

    def _end(self) -> None:
        self.stop()
        with self.lock:
            process, self.process = self.process, None
        if process is not None:
            process.wait()
            process.stdin.close()
            process.stdout.close()

    def _broken(self, chunk: list[Job], error: Exception) -> None:
        """A worker that dies as such (killed from outside, out of memory): a new one, and the chunk again."""
        self._end()
        left = [job for job in chunk if job[0].results[job[1]] is None]
        self.tried += 1
        if left and self.tried >= _TRIES:
            self.tried = 0
            grading, index, _ = left.pop(0)
            grading.put(index, Graded("error", None, reason=f"the grading process broke down {_TRIES} times: {error}"))
        if not self.pool._closed:
            log.warning("a grading process broke down (%s) and is replaced", error)
        self.pool.put_back(left)

    def _grade(self, chunk: list[Job]) -> None:
        """Grade up to the first answer that costs the worker its life; the others go back."""
        process = self._ready_worker()
        body = pickle.dumps([pickled for _, _, pickled in chunk])
        reply = self._send(process, struct.pack("!I", len(body)) + body) or self._receive(process, _START)
        current = 0
        while reply is not None and reply[0] != "died":
            if reply[0] == "grade":
                grading, index, _ = chunk[current]
                grading.put(index, Graded(*reply[1:]))
                current += 1
                if current == len(chunk):
                    return
            elif reply[0] != "begun":
                raise _Broken(f"unexpected reply {reply[0]!r}")
            reply = self._receive(process, self.pool.timeout)
        grading, index, _ = chunk[current]
        graded = None
        if reply is None:
            process.send_signal(SIGUSR1)
            while (late := self._receive(process, _START)) and late[0] != "died":
                pass  # it answered in that very moment: too late
            if late is None:
                raise _Broken("it does not end")
            graded = Graded("timeout", None, reason=f"not graded within {self.pool.timeout:g} s (Verifier.timeout)")
        elif reply[1] == KILLED and index not in grading.killed:
            grading.killed.add(index)  # by the kernel or a person, for all one knows: the answer has another try
        else:
            graded = Graded("error", None, reason=f"grading it ended the process: {reply[1]}")
        process.send_signal(SIGUSR2)
        ready = self._receive(process, _START)
        if ready != ("ready",):
            self._end()
        if graded is not None:
            grading.put(index, graded)
            current += 1
        self.pool.put_back(chunk[current:])

    def _ready_worker(self) -> subprocess.Popen[bytes]:
        """The worker, ready to read. Its fork may have died between two chunks: then there is another."""
        with self.lock:
            process = self.process
        if process is None:
            process = self._start()
            reply = self._receive(process, _START)
            if reply is not None and reply[0] == "unusable":
                raise GradingError(f"Verifier.kind = {self.pool.settings['kind']!r} cannot be used: {reply[1]}")
            if reply != ("ready",):
                raise _Broken("it did not start")
        elif self._readable(process, 0):
            reply = self._receive(process, 0)
            if reply is None or reply[0] != "died":
                raise _Broken("it spoke unasked")
            process.send_signal(SIGUSR2)
            if self._receive(process, _START) != ("ready",):
                raise _Broken("it did not start again")
        return process

    def _start(self) -> subprocess.Popen[bytes]:
        paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(_ROOT)]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        command = "from exgrpo_orlhf.rewards.worker import main; main()"
        with self.lock:
            if self.pool._closed:
                raise GradingError("the pool of grading processes was closed")
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", command, json.dumps(self.pool.settings), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C is the caller's
                env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)},
            )
            os.set_blocking(self.process.stdin.fileno(), False)
            return self.process

    def _send(self, process: subprocess.Popen[bytes], data: bytes) -> tuple[Any, ...] | None:
        """Write all of it. Returns what the worker said meanwhile, if it could not be written to the end."""
        view, end = memoryview(data), time.monotonic() + _START
        poller = select.poll()
        poller.register(process.stdin, select.POLLOUT)
        poller.register(process.stdout, select.POLLIN)
        while view:
            ready = dict(poller.poll(max(0.0, end - time.monotonic()) * 1000))
            if not ready:
                raise _Broken("it does not read")
            if process.stdout.fileno() in ready:
                return self._receive(process, 0)
            view = view[os.write(process.stdin.fileno(), view) :]
        return None

    def _receive(self, process: subprocess.Popen[bytes], timeout: float) -> tuple[Any, ...] | None:
        """The next reply, or None if there is none within so many seconds."""
        if not self._readable(process, timeout):
            return None
        fd = process.stdout.fileno()
        head = os.read(fd, 4)
        if len(head) < 4:
            raise _Broken("it is gone")
        return pickle.loads(os.read(fd, struct.unpack("!I", head)[0]))

    def _readable(self, process: subprocess.Popen[bytes], timeout: float) -> bool:
        poller = select.poll()  # select.select has a limit of 1,024 open files
        poller.register(process.stdout, select.POLLIN)
        # Twice: this thread itself may have been kept from running all that time.
        return bool(poller.poll(timeout * 1000) or poller.poll(0))


_pools: dict[str, Pool] = {}
_pools_lock = threading.Lock()


def pool(settings: Mapping[str, Any], timeout: float, workers: int) -> Pool:
    """The pool of this process for these settings, made at its first use. workers: 0 for as many as there are cores."""
    workers = workers or len(os.sched_getaffinity(0))
    key = json.dumps([settings, timeout, workers], sort_keys=True)
    with _pools_lock:
        if key not in _pools:
            _pools[key] = Pool(settings, timeout, workers)
        return _pools[key]


def close_pools() -> None:
    """Kill every worker of this process. The next grading starts new ones."""
    with _pools_lock:
        pools = list(_pools.values())
        _pools.clear()
    for each in pools:
        each.close()


def _forget() -> None:
    """After a fork: the threads are not there, and the workers are the other process's."""
    global _pools_lock
    _pools_lock = threading.Lock()
    _pools.clear()


atexit.register(close_pools)
os.register_at_fork(after_in_child=_forget)
