"""Samplers whose engines take all requests at once and answer each when it is done."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

from ..records import Rollout
from .request import POLL, Pending, Portion, Request, Sampler

_LAST_WORDS = 10.0  # seconds for cancelled requests to tell their engine


class QueuedSampler(Sampler):
    """A subclass sends requests, says what has arrived, and cancels. It may let its engines sleep meanwhile."""

    in_step = False

    @abstractmethod
    def _send(self, request: Request, seed: int) -> Any:
        """A handle of what is under way."""

    @abstractmethod
    def _arrived(self, pending: Mapping[Any, tuple[int, Request]], wait: bool) -> list[tuple[Any, list[Rollout]]]:
        """What has been completed: handles and responses. wait: for at least one; else for POLL at most

        pending: by handle, the position of each request that is under way. Raises EngineLost.
        """

    @abstractmethod
    def _cancel(self, handles: Collection[Any]) -> None: ...

    @contextmanager
    def pending(self) -> Iterator[Pending]:
        queue = _Queue(self._send, self._arrived)
        with self.awake():
            try:
                yield queue
            finally:
                self._cancel(queue.requests)

    def sample(self, requests: Sequence[Request], done: Collection[int] = ()) -> Generator[Portion, None, None]:
        with self.pending() as pending:
            for i, request in enumerate(requests):
                if i not in done:
                    pending.send(i, request)
            while pending:
                yield pending.arrived(wait=True)


class _Queue(Pending):
    """Of a sampler, with its own `_send` and `_arrived`. requests: by handle, with their positions"""

    def __init__(self, send: Callable[[Request, int], Any], arrived: Callable[..., list[tuple[Any, Any]]]) -> None:
        self._send, self._arrived = send, arrived
        self.requests: dict[Any, tuple[int, Request]] = {}

    def __len__(self) -> int:
        return len(self.requests)

    def send(self, position: int, request: Request) -> None:
        self.requests[self._send(request, request.seed_at(position))] = (position, request)

    def arrived(self, wait: bool) -> Portion:
        return [(self.requests.pop(handle)[0], rollouts) for handle, rollouts in self._arrived(self.requests, wait)]


class StreamSampler(QueuedSampler):
    """Requests in an event loop with its own thread. It runs until `close`, because an engine's connections belong to
    the loop that opened them. A failure is raised after the responses that arrived before it; from then on no request
    is begun.

    at_once: requests under way at a time
    """

    together = 256
    at_once: int

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._free, self._under_way = asyncio.Semaphore(self.at_once), 0
        self._failed = threading.Event()  # of the requests since the last `_cancel`
        self._done: queue.SimpleQueue[Future[list[Rollout]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def _live(self) -> None:
        with self._runner:  # however the loop ends, what is left in it is cancelled: nobody waits for it in vain
            self._loop.run_forever()

    @abstractmethod
    async def _answer(self, request: Request, seed: int) -> Rollout:
        """One response. Raises EngineLost."""

    async def _answers(self, request: Request, seed: int, failed: threading.Event) -> list[Rollout]:
        async with self._free:
            if failed.is_set():
                await asyncio.Event().wait()  # until it is cancelled: the caller learns of the failure a moment later
            self._under_way += 1
            try:
                return [await self._answer(request, seed + k) for k in range(request.n)]
            except Exception:  # and not where it is cancelled
                failed.set()
                raise
            finally:
                self._under_way -= 1

    def _send(self, request: Request, seed: int) -> Any:
        future = asyncio.run_coroutine_threadsafe(self._answers(request, seed, self._failed), self._loop)
        future.add_done_callback(self._done.put)
        return future

    def _arrived(self, pending: Mapping[Any, tuple[int, Request]], wait: bool) -> list[tuple[Any, list[Rollout]]]:
        arrived: list[tuple[Any, list[Rollout]]] = []
        with suppress(queue.Empty):
            while True:
                future = self._done.get(timeout=0 if arrived else None if wait else POLL)
                if arrived and future in pending and future.exception():
                    self._done.put(future)
                    break
                if future in pending:  # and not of a generator that was closed
                    arrived.append((future, future.result()))
        return arrived

    def _cancel(self, handles: Collection[Any]) -> None:
        for future in handles:
            future.cancel()
        self._failed = threading.Event()
        end = time.monotonic() + _LAST_WORDS
        while handles and self._under_way and time.monotonic() < end:
            time.sleep(POLL)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
