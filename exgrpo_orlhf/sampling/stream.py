"""Samplers with many requests under way, in an event loop with its own thread."""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import abstractmethod
from collections.abc import Collection, Coroutine, Generator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ..records import Rollout
from .request import Portion, Request, Sampler

_LAST_WORDS = 10.0  # seconds for cancelled requests to tell their engine
_Result = TypeVar("_Result")


class StreamSampler(Sampler):
    """The event loop runs until `close`, because an engine's connections belong to the loop that opened them.

    at_once: requests under way at a time
    """

    together = 256
    at_once: int

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def _live(self) -> None:
        with self._runner:  # however the loop ends, what is left in it is cancelled: nobody waits for it in vain
            self._loop.run_forever()

    @abstractmethod
    async def _answer(self, request: Request, seed: int) -> Rollout:
        """One response. Raises EngineLost."""

    def sample(self, requests: Sequence[Request], done: Collection[int] = ()) -> Generator[Portion, None, None]:
        """Portions of what has arrived since the last portion. A new request starts when one ends.

        A failure ends all requests and is raised after the responses that arrived before it.
        """
        arrivals: queue.SimpleQueue[tuple[int, list[Rollout]] | None] = queue.SimpleQueue()
        waiting = iter([(i, request) for i, request in enumerate(requests) if i not in done])

        async def answer_next() -> None:
            for i, request in waiting:
                seed = request.seed_at(i)
                arrivals.put((i, [await self._answer(request, seed + k) for k in range(request.n)]))

        async def answer_all() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self.at_once, len(requests))):
                        group.create_task(answer_next())
            finally:
                arrivals.put(None)

        work, ended = asyncio.run_coroutine_threadsafe(answer_all(), self._loop), False
        try:
            while not ended:
                arrived = [arrivals.get()]
                while not arrivals.empty():
                    arrived.append(arrivals.get())
                ended = arrived[-1] is None
                if portion := [each for each in arrived if each is not None]:
                    yield portion
            if failure := work.exception():
                raise failure.exceptions[0] if isinstance(failure, ExceptionGroup) else failure
        finally:
            work.cancel()
            with suppress(queue.Empty):
                while not ended:
                    ended = arrivals.get(timeout=_LAST_WORDS) is None

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine in the loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
