"""A pool of workers that grade, each fed by a thread of its own, with a wall-clock limit for each answer."""

from __future__ import annotations

import json
import logging
import os
import pickle
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..grader.answer import Answer
from ..grader.grade import Grade
from ..workers.fork_server import CallFailed, ForkServer, NotLoaded, Worker, kept

log = logging.getLogger(__name__)

_CHUNK = 8  # answers sent at a time: messages cost little beside grading, and few answers wait behind one that hangs
_TRIES = 3  # workers that may be lost on an answer through no fault that is known of it before it is given up
_LOAD = "exgrpo_orlhf.rewards.kinds:load"


class GradingError(ValueError):
    """Grading cannot go on: the grader cannot be loaded, the pool is closed, or too many answers have failed."""


class NoGrader(GradingError):
    """The grader cannot be loaded."""


@dataclass
class _Call:
    """Answers that the grader gets in one call: one, or those of a group or a batch."""

    answers: bytes  # pickled by the caller, who gets the error if that fails
    timeout: float  # seconds, for all of them
    grades: list[Future[Grade]]
    lost: int = 0  # workers, while they graded it

    def settle(self, grades: Sequence[Grade]) -> None:
        for future, grade in zip(self.grades, grades, strict=True):
            with suppress(InvalidStateError):  # cancelled meanwhile
                future.set_result(grade)

    def fail(self, error: GradingError) -> None:
        for future in self.grades:
            with suppress(InvalidStateError):
                future.set_exception(error)


class Pool:
    """Workers that share one queue of answers.

    settings: what `kinds.load` takes, JSON; 'memory' in MiB among it
    timeout: seconds of wall clock for each answer
    workers: processes; each starts when there is first something to do for it
    """

    def __init__(self, settings: Mapping[str, Any], timeout: float, workers: int) -> None:
        self.settings, self.timeout, self.workers = dict(settings), timeout, workers
        self.failed: GradingError | None = None  # why no more answers are taken
        self.server = self._server()
        self._calls: str | None = None
        self._waiting = deque[list[_Call]]()
        self._change = threading.Condition()
        self._threads = self._idle = 0

    def _server(self, **changes: Any) -> ForkServer:
        return ForkServer(_LOAD, {**self.settings, **changes}, f"Verifier.kind = {self.settings['kind']!r}")

    def submit(self, answers: Sequence[Answer], times: float = 1.0, together: bool = False) -> list[Future[Grade]]:
        """Queue answers, from any thread, and start workers for them. A future that is cancelled may not be graded.

        times: the limit of each, in multiples of the pool's; together: in one call, which has the limits of all
        Raises GradingError if the pool has failed or is closed; the futures raise it if that comes later.
        """
        calls = [answers] if together else [[answer] for answer in answers]
        queued = [
            _Call(pickle.dumps([*call]), times * self.timeout * len(call), [Future() for _ in call]) for call in calls
        ]
        size = max(1, min(_CHUNK, len(queued) // (4 * self.workers)))
        with self._change:
            if self.failed:
                raise self.failed
            self._waiting.extend(queued[i : i + size] for i in range(0, len(queued), size))
            for _ in range(min(len(self._waiting) - self._idle, self.workers - self._threads)):
                threading.Thread(target=self._grade, name="grading", daemon=True).start()
                self._threads += 1
            self._change.notify_all()
        return [grade for call in queued for grade in call.grades]

    def check_columns(self, columns: Sequence[str] | None) -> None:
        """Load the grader and end its process again. Raises NoGrader, also for a function that needs other columns."""
        try:
            self._calls = self._server(columns=columns).try_loading()
        except NotLoaded as error:
            raise NoGrader(str(error)) from error

    @property
    def calls(self) -> str:
        """How many answers the grader takes in a call: those of a 'response', a 'group' or a 'batch'. Raises as
        `check_columns`."""
        if self._calls is None:
            self.check_columns(None)
        return self._calls or ""

    def fail(self, error: GradingError) -> None:
        """Take no more answers and kill the workers. Answers that still wait for a grade get the error."""
        with self._change:
            self.failed = self.failed or error
            waiting = [call for chunk in self._waiting for call in chunk]
            self._waiting.clear()
            self._change.notify_all()
        for call in waiting:
            call.fail(self.failed)
        self.server.close()

    def close(self) -> None:
        """Kill the workers. Answers that still wait for a grade get GradingError."""
        self.fail(GradingError("the pool of grading processes was closed"))

    def _grade(self) -> None:
        """Grade until the pool has failed, in a worker that is replaced when a call has failed."""
        worker: Worker | None = None
        while chunk := self._take():
            try:
                if worker is None or worker.fileno() < 0:
                    worker = self.server.worker()
                worker.call(*(call.answers for call in chunk))
                while chunk:
                    chunk[0].settle(worker.reply(chunk[0].timeout))
                    del chunk[0]
            except Exception as error:  # of any kind: a caller must never wait for a grade that cannot come
                if isinstance(error, NotLoaded):
                    self.fail(NoGrader(str(error)))
                if worker:
                    worker.close()
                self._take_back(chunk, error if isinstance(error, CallFailed) else CallFailed("error", repr(error)))

    def _take(self) -> list[_Call]:
        """The next calls, without cancelled ones; none when the pool has failed."""
        while True:
            with self._change:
                self._idle += 1
                self._change.wait_for(lambda: self._waiting or self.failed)
                self._idle -= 1
                if self.failed:
                    return []
                chunk = self._waiting.popleft()
            if chunk := [call for call in chunk if not all(grade.done() for grade in call.grades)]:
                return chunk

    def _take_back(self, chunk: list[_Call], failure: CallFailed) -> None:
        """Put calls back at the head of the queue, without the first if it failed by its own fault or too often."""
        call = chunk[0]
        call.lost += failure.lost
        if failure.lost and not self.failed:
            log.warning("a grading process is replaced: %s", failure.reason)
        if not (self.failed or (failure.lost and call.lost < _TRIES)):
            times = f"the grading process broke down {_TRIES} times: " if failure.lost else ""
            call.settle([Grade(failure.verdict, None, reason=times + failure.reason)] * len(call.grades))
            del chunk[0]
        with self._change:
            if not self.failed:
                self._waiting.extendleft([chunk] if chunk else [])
                self._change.notify()
                return
        for call in chunk:
            call.fail(self.failed)


def pool(settings: Mapping[str, Any], timeout: float, workers: int) -> Pool:
    """This process's pool for these settings. workers: 0 for as many as there are cores"""
    workers = workers or len(os.sched_getaffinity(0))
    key = json.dumps([settings, timeout, workers], sort_keys=True)
    return kept(key, lambda: Pool(settings, timeout, workers))
