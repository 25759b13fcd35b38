"""A pool of grading processes that can be killed, with a wall-clock limit for each answer.

A limit cannot be enforced inside the caller's process: alarms work in the main thread only, and one `999999999!` holds
the interpreter lock for hours. So answers are graded in separate processes (`worker.py`), without a signal handler or a
semaphore in the caller: it works the same from the main thread, any other thread, asyncio.to_thread, a Ray task and an
actor. Each worker has a thread here that feeds it and watches the clock; the thread also starts it, since Linux ties
"killed with its parent" to the parent's thread.

pebble's pool is about as fast, but a worker that is killed from outside can break it, with all answers that wait, and
what an answer has started (a child of a user's function) outlives its limit there.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from signal import SIGKILL
from typing import Any

from ..answer import Answer, Graded
from .processes import Owned, start_worker
from .worker import KILLED

log = logging.getLogger(__name__)

_CHUNK = 8  # answers sent at a time: messages cost little beside grading, and few answers wait behind one that hangs
_TRIES = 3  # processes that may be lost on an answer through no fault that is known of it before it is given up
_START_TIMEOUT = 180.0  # seconds that a worker may take to import what it needs, on a busy machine

Reply = tuple[Any, ...]  # see worker.py


class GradingError(ValueError):
    """Grading cannot go on: the grader cannot be loaded, the pool is closed, or too many answers have failed."""


class NoGrader(GradingError):
    """The grader cannot be loaded."""


class _Broken(Exception):
    """The worker process itself has failed and must be replaced."""


@dataclass
class _Job:
    """Answers that the grader gets in one call: one, or those of a group or a batch."""

    answers: bytes  # pickled by the caller, who gets the error if that fails
    timeout: float  # seconds, for all of them
    verdicts: list[Future[Graded]]
    lost: int = 0  # processes, while they graded it

    @property
    def done(self) -> bool:
        return all(verdict.done() for verdict in self.verdicts)

    def settle(self, graded: Sequence[Graded]) -> None:
        for verdict, own in zip(self.verdicts, graded, strict=True):
            with suppress(InvalidStateError):  # cancelled meanwhile
                verdict.set_result(own)

    def settle_all(self, graded: Graded) -> None:
        self.settle([graded] * len(self.verdicts))


class Pool:
    """Worker processes that share one queue of answers.

    settings: what `worker.load` takes, JSON; 'memory' in MiB among it
    timeout: seconds of wall clock for each answer
    workers: processes; each starts when there is first something to do for it
    """

    def __init__(self, settings: Mapping[str, Any], timeout: float, workers: int) -> None:
        self.settings, self.timeout, self.workers = dict(settings), timeout, workers
        self.failed: GradingError | None = None  # why no more answers are taken
        self.loaded = False  # by any worker so far
        self._calls: str | None = None
        self._waiting: deque[list[_Job]] = deque()
        self._change = threading.Condition()
        self._slots: list[_Slot] = []
        self._idle = 0

    def submit(self, answers: Sequence[Answer], times: float = 1.0, together: bool = False) -> list[Future[Graded]]:
        """Queue answers, from any thread, and start workers for them. A future that is cancelled may not be graded.

        times: the limit of each, in multiples of the pool's; together: in one call, which has the limits of all
        Raises GradingError if the pool has failed or is closed; the futures raise it if that comes later.
        """
        calls = [answers] if together else [[answer] for answer in answers]
        jobs = [
            _Job(pickle.dumps([*call]), times * self.timeout * len(call), [Future() for _ in call]) for call in calls
        ]
        size = max(1, min(_CHUNK, len(jobs) // (4 * self.workers)))
        with self._change:
            if self.failed:
                raise self.failed
            self._waiting.extend(jobs[i : i + size] for i in range(0, len(jobs), size))
            for _ in range(min(len(self._waiting) - self._idle, self.workers - len(self._slots))):
                slot = _Slot(self)
                slot.start()
                self._slots.append(slot)
            self._change.notify_all()
        return [verdict for job in jobs for verdict in job.verdicts]

    def check(self, columns: Sequence[str] | None) -> None:
        """Start a worker and end it again. Raises NoGrader, also for a function that needs other columns."""
        process = _Process({**self.settings, "columns": columns})
        try:
            process.wait_for_fork(first=True)
            self._calls = process.calls
        finally:
            process.close()

    @property
    def calls(self) -> str:
        """How many answers the grader takes in a call: those of a 'response', a 'group' or a 'batch'. Raises as
        `check`."""
        if self._calls is None:
            self.check(None)
        return self._calls or ""

    def fail(self, error: GradingError) -> None:
        """Take no more answers and kill the workers. Answers that still wait for a verdict get the error."""
        with self._change:
            self.failed = self.failed or error
            waiting = [job for chunk in self._waiting for job in chunk]
            self._waiting.clear()
            self._change.notify_all()
        self.put_back(waiting)
        for slot in self._slots:
            if process := slot.process:
                process.kill()  # the slot's own thread cleans up

    def close(self) -> None:
        """Kill the workers and wait for their end. Answers that still wait for a verdict get GradingError."""
        self.fail(GradingError("the pool of grading processes was closed"))
        for slot in self._slots:
            slot.join(timeout=5)

    def take(self) -> list[_Job] | None:
        """The next chunk, without cancelled jobs; None when the pool has failed."""
        while True:
            with self._change:
                self._idle += 1
                self._change.wait_for(lambda: self._waiting or self.failed)
                self._idle -= 1
                if self.failed:
                    return None
                if chunk := [job for job in self._waiting.popleft() if not job.done]:
                    return chunk

    def put_back(self, chunk: list[_Job]) -> None:
        """Put jobs at the head of the queue, for the next free worker; after a failure, give up those jobs."""
        with self._change:
            if self.failed is None:
                self._waiting.extendleft([chunk] if chunk else [])
                self._change.notify()
                return
        for verdict in (verdict for job in chunk for verdict in job.verdicts):
            with suppress(InvalidStateError):
                verdict.set_exception(self.failed)


class _Slot(threading.Thread):
    """The thread that feeds one worker process, and replaces it when it breaks down."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(name="grading", daemon=True)
        self.pool = pool
        self.process: _Process | None = None

    def run(self) -> None:
        while chunk := self.pool.take():
            try:
                self._grade(self.process or self._start(), chunk)
            except GradingError as error:
                self.pool.fail(error)
                self.pool.put_back(chunk)
            except Exception as error:  # anything else: a caller must never wait for a verdict that cannot come
                self._replace(chunk, error)
        self._end()

    def _start(self) -> _Process:
        process = self.process = _Process(self.pool.settings)
        if self.pool.failed:  # while it was started: nobody else would kill it
            raise self.pool.failed
        process.wait_for_fork(first=not self.pool.loaded)
        self.pool.loaded = True
        return process

    def _end(self) -> None:
        process, self.process = self.process, None
        if process:
            process.close()

    def _replace(self, chunk: list[_Job], error: Exception) -> None:
        """After the worker broke down (killed from outside, out of memory): a new worker, and the chunk again."""
        self._end()
        left = [job for job in chunk if not job.done]
        if left:
            left[0].lost += 1
            if left[0].lost >= _TRIES:  # of a reply that cannot be read, two are counted
                reason = f"the grading process broke down {_TRIES} times: {error}"
                left.pop(0).settle_all(Graded("error", None, reason=reason))
        if not self.pool.failed:
            log.warning("a grading process broke down (%s) and is replaced", error)
        self.pool.put_back(left)

    def _grade(self, process: _Process, chunk: list[_Job]) -> None:
        """Grade up to the first answer that ends the fork that grades it; the others go back to the queue."""
        if process.receive(0):  # ("died", …): between two chunks
            process.fork_again()
        start = process.send([job.answers for job in chunk])
        for i, job in enumerate(chunk):
            reply = process.receive(job.timeout) if start[0] == "begun" else start
            if reply and reply[0] == "graded":
                job.settle([Graded(*own) for own in reply[1:]])
                continue
            graded = None
            if reply is None:
                process.kill_fork()
                reason = f"not graded within {job.timeout:g} s (Verifier.timeout)"
                graded = Graded("timeout", None, reason=reason)
            else:
                job.lost += 1
                if reply[1] != KILLED or job.lost >= _TRIES:  # the kernel or a person may have killed it
                    graded = Graded("error", None, reason=f"grading it ended the process: {reply[1]}")
            try:
                process.fork_again()  # before the verdict: what a caller then asks for needs no further worker
            finally:
                if graded:
                    job.settle_all(graded)
            self.pool.put_back([other for other in chunk[i:] if not other.done])
            return


class _Process:
    """A worker process, the connection to it, and the file in which it finds the answers: the connection has short
    messages only, so that a write to it never waits for a process that has stopped reading."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._connection, theirs = Pipe()
        self._answers = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (it lives as long as the process)
        self._settings, self._fork, self.calls = settings, 0, ""
        with theirs:
            fds = (theirs.fileno(), self._answers.fileno())
            self._process = start_worker("exgrpo_orlhf.rewards.pool.worker", [json.dumps(settings)], fds)
        self.pid = self._process.pid

    def receive(self, timeout: float) -> Reply | None:
        """The next reply, or None if there is none within `timeout` seconds. Raises _Broken if the process is gone."""
        try:
            # Polled twice, because this thread itself may have been kept from running for all of the timeout.
            come = self._connection.poll(timeout) or self._connection.poll()
            return self._connection.recv() if come else None
        except (EOFError, OSError) as error:
            raise _Broken("it is gone") from error

    def send(self, answers: list[bytes]) -> Reply:
        """Returns ("begun",), so that a fork's waking up is in no answer's time, or ("died", …)."""
        pickled = pickle.dumps(answers)
        self._answers.seek(0)
        self._answers.write(pickled)
        self._connection.send(len(pickled))
        if (reply := self.receive(_START_TIMEOUT)) is None:
            raise _Broken("it does not begin")
        return reply

    def wait_for_fork(self, first: bool = False) -> None:
        """Wait for the fork that grades. Raises NoGrader if the grader cannot be loaded. first: so far by no worker"""
        grader = self._settings.get("function", "the grader")
        try:
            late = "", f"{grader} was not loaded within {_START_TIMEOUT:g} s"
            name, what, *calls = self.receive(_START_TIMEOUT) or late
        except _Broken:
            name, what, calls = "", f"the process ended while {grader} was loaded", []
        if name == "unusable" or (first and name != "ready"):
            raise NoGrader(f"Verifier.kind = {self._settings['kind']!r} cannot be used: {what}")
        if name != "ready":
            raise _Broken(what)
        self._fork, [self.calls] = what, calls

    def kill_fork(self) -> None:
        """Kill the fork that grades; a reply that it still sends does not count."""
        if self._process.poll() is not None:
            raise _Broken("it is gone")
        os.kill(self._fork, SIGKILL)  # of a living worker: a dead fork keeps its id until `fork_again`
        while (reply := self.receive(_START_TIMEOUT)) and reply[0] != "died":
            pass
        if reply is None:
            raise _Broken("it does not end")

    def fork_again(self) -> None:
        """After "died"."""
        self._connection.send(0)
        self.wait_for_fork()

    def kill(self) -> None:
        """The fork that grades dies with it."""
        self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._connection.close()
        self._answers.close()


_pools = Owned(Pool.close)
close_pools = _pools.close


def pool(settings: Mapping[str, Any], timeout: float, workers: int) -> Pool:
    """This process's pool for these settings. workers: 0 for as many as there are cores"""
    workers = workers or len(os.sched_getaffinity(0))
    key = json.dumps([settings, timeout, workers], sort_keys=True)
    return _pools.get(key, lambda: Pool(settings, timeout, workers), lambda made: not made.failed)
