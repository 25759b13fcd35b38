"""A pool of grading processes that can be killed, with a wall-clock limit for each answer.

A limit cannot be enforced inside the caller's process: alarms work in the main thread only, and one `999999999!` holds
the interpreter lock for hours. So answers are graded in separate processes (`worker.py`) over plain pipes, without a
signal handler, a semaphore or anything else of multiprocessing in the caller: it works the same from the main thread,
any other thread, asyncio.to_thread, a Ray task and an actor. Each worker has a thread here that feeds it and watches
the clock; the thread also starts it, since Linux ties "killed with its parent" to the parent's thread.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import pickle
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from signal import SIGUSR1, SIGUSR2
from typing import Any

from ..answer import Answer, Graded
from .process import START_TIMEOUT, Broken, GradingProcess
from .worker import KILLED

log = logging.getLogger(__name__)

_CHUNK = 8  # answers sent at a time: the pipes cost little beside grading, and few answers wait behind one that hangs
_TRIES = 3  # workers that may break down on the same chunk before its first answer is given up


class GradingError(ValueError):
    """Grading cannot go on: the grader cannot be loaded, the pool is closed, or too many answers have failed."""


class Grading:
    """Answers that are sent to a pool, in one call or in several, and their verdicts as they arrive."""

    def __init__(self, pool: Pool) -> None:
        self.results: list[Graded | None] = []  # in the order in which the answers were sent
        self.killed: set[int] = set()  # answers whose process was killed from outside, once
        self.error: GradingError | None = None
        self._pool, self._left, self._change = pool, 0, threading.Condition()

    def send(self, answers: Sequence[Answer]) -> None:
        """Start grading these answers. Raises GradingError if the pool is closed or grading has failed already."""
        if self.error:
            raise self.error
        first = len(self.results)
        jobs = [(self, first + i, pickle.dumps(answer)) for i, answer in enumerate(answers)]
        with self._change:
            self.results += [None] * len(jobs)
            self._left += len(jobs)
        self._pool.take_in(jobs)

    def wait(self) -> list[Graded]:
        """The verdicts of all answers sent, in that order. Blocks. Raises GradingError."""
        with self._change:
            self._change.wait_for(lambda: self.error is not None or not self._left)
        if self.error:
            raise self.error
        return [graded for graded in self.results if graded is not None]

    def put(self, index: int, graded: Graded) -> None:
        """Record a verdict. index: of the answer, in the order of sending."""
        with self._change:
            self.results[index] = graded
            self._left -= 1
            self._change.notify_all()

    def fail(self, error: GradingError) -> None:
        """Give up: answers that no worker has taken yet are not graded, and `wait` raises the error."""
        with self._change:
            self.error = error
            self._change.notify_all()


Job = tuple[Grading, int, bytes]  # the answer is pickled by the caller, who gets the error if that fails


class Pool:
    """Worker processes that share one queue of answers.

    settings: what `worker.load` takes, JSON; 'memory' in MiB among it
    timeout: seconds of wall clock for each answer
    workers: processes; each starts when there is first something to do for it
    """

    def __init__(self, settings: Mapping[str, Any], timeout: float, workers: int) -> None:
        self.settings, self.timeout, self.workers = dict(settings), timeout, workers
        self.closed = False
        self._waiting: deque[list[Job]] = deque()
        self._change = threading.Condition()
        self._slots: list[_Slot] = []
        self._idle = 0

    def grade(self, answers: Sequence[Answer]) -> list[Graded]:
        """Verdicts in the order of the answers. Blocks; may be called from several threads. Raises GradingError."""
        grading = Grading(self)
        grading.send(answers)
        return grading.wait()

    def take_in(self, jobs: list[Job]) -> None:
        """Queue jobs in chunks, and start workers for them. Raises GradingError if the pool is closed."""
        size = max(1, min(_CHUNK, len(jobs) // (4 * self.workers)))
        chunks = [jobs[i : i + size] for i in range(0, len(jobs), size)]
        with self._change:
            if self.closed:
                raise GradingError("the pool of grading processes is closed")
            self._waiting.extend(chunks)
            for _ in range(min(len(self._waiting) - self._idle, self.workers - len(self._slots))):
                slot = _Slot(self)
                self._slots.append(slot)
                slot.thread.start()
            self._change.notify_all()

    def close(self) -> None:
        """Kill the workers. Answers that still wait for a verdict get GradingError."""
        with self._change:
            self.closed = True
            jobs = [job for chunk in self._waiting for job in chunk]
            self._waiting.clear()
            self._change.notify_all()
        _fail_closed(jobs)
        for slot in self._slots:
            slot.stop()
        for slot in self._slots:
            slot.thread.join(timeout=5)

    def take(self) -> list[Job] | None:
        """The next chunk; None when the pool has closed. Jobs of a call that has failed already are left out."""
        with self._change:
            while True:
                while not self._waiting and not self.closed:
                    self._idle += 1
                    self._change.wait()
                    self._idle -= 1
                if self.closed:
                    return None
                chunk = [job for job in self._waiting.popleft() if job[0].error is None]
                if chunk:
                    return chunk

    def put_back(self, chunk: list[Job]) -> None:
        """Put jobs at the head of the queue, for the next free worker."""
        with self._change:
            if chunk and not self.closed:
                self._waiting.appendleft(chunk)
                self._change.notify()
                return
        _fail_closed(chunk)


def _fail_closed(jobs: Sequence[Job]) -> None:
    for grading, _, _ in jobs:
        grading.fail(GradingError("the pool of grading processes was closed"))


class _Slot:
    """One worker process and the thread that feeds it."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.thread = threading.Thread(target=self._run, name="grading", daemon=True)
        self.process: GradingProcess | None = None
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
            except Exception as error:  # anything else: a caller must never wait for a verdict that cannot come
                self._replace(chunk, error)
        self._end()

    def stop(self) -> None:
        """Kill the worker, from any thread. The slot's own thread cleans up."""
        with self.lock:
            if self.process is not None:
                self.process.kill()

    def _end(self) -> None:
        self.stop()
        with self.lock:
            process, self.process = self.process, None
        if process is not None:
            process.close()

    def _replace(self, chunk: list[Job], error: Exception) -> None:
        """After a worker broke down (killed from outside, out of memory): a new worker, and the chunk again."""
        self._end()
        left = [job for job in chunk if job[0].results[job[1]] is None]
        self.tried += 1
        if left and self.tried >= _TRIES:
            self.tried = 0
            grading, index, _ = left.pop(0)
            grading.put(index, Graded("error", None, reason=f"the grading process broke down {_TRIES} times: {error}"))
        if not self.pool.closed:
            log.warning("a grading process broke down (%s) and is replaced", error)
        self.pool.put_back(left)

    def _grade(self, chunk: list[Job]) -> None:
        """Grade up to the first answer that ends the fork that grades it; the others go back to the queue."""
        process = self._ready_process()
        reply = process.send(pickle.dumps([pickled for _, _, pickled in chunk])) or process.receive(START_TIMEOUT)
        current = 0
        while reply is not None and reply[0] != "died":
            if reply[0] == "grade":
                grading, index, _ = chunk[current]
                grading.put(index, Graded(*reply[1:]))
                current += 1
                if current == len(chunk):
                    return
            elif reply[0] != "begun":
                raise Broken(f"unexpected reply {reply[0]!r}")
            reply = process.receive(self.pool.timeout)
        grading, index, _ = chunk[current]
        graded = None
        if reply is None:
            process.signal(SIGUSR1)
            while (late := process.receive(START_TIMEOUT)) and late[0] != "died":
                pass  # a reply that arrives after the limit does not count
            if late is None:
                raise Broken("it does not end")
            graded = Graded("timeout", None, reason=f"not graded within {self.pool.timeout:g} s (Verifier.timeout)")
        elif reply[1] == KILLED and index not in grading.killed:
            grading.killed.add(index)  # perhaps by the kernel or by a person: the answer gets another try
        else:
            graded = Graded("error", None, reason=f"grading it ended the process: {reply[1]}")
        process.signal(SIGUSR2)
        if process.receive(START_TIMEOUT) != ("ready",):
            self._end()
        if graded is not None:
            grading.put(index, graded)
            current += 1
        self.pool.put_back(chunk[current:])

    def _ready_process(self) -> GradingProcess:
        """The worker, ready to read. If its fork has died between two chunks, it makes another first."""
        with self.lock:
            process = self.process
        if process is None:
            process = self._start()
            reply = process.receive(START_TIMEOUT)
            if reply is not None and reply[0] == "unusable":
                raise GradingError(f"Verifier.kind = {self.pool.settings['kind']!r} cannot be used: {reply[1]}")
            if reply != ("ready",):
                raise Broken("it did not start")
        elif process.has_reply():
            reply = process.receive(0)
            if reply is None or reply[0] != "died":
                raise Broken("it sent a reply that was not asked for")
            process.signal(SIGUSR2)
            if process.receive(START_TIMEOUT) != ("ready",):
                raise Broken("it did not start again")
        return process

    def _start(self) -> GradingProcess:
        with self.lock:
            if self.pool.closed:
                raise GradingError("the pool of grading processes was closed")
            self.process = GradingProcess(self.pool.settings)
            return self.process


_pools: dict[str, Pool] = {}
_pools_lock = threading.Lock()


def pool(settings: Mapping[str, Any], timeout: float, workers: int) -> Pool:
    """This process's pool for these settings, made at its first use. workers: 0 for as many as there are cores."""
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
    """After a fork: the child has no threads of the pool, and the workers belong to its parent."""
    global _pools_lock
    _pools_lock = threading.Lock()
    _pools.clear()


atexit.register(close_pools)
os.register_at_fork(after_in_child=_forget)
