"""Many requests at a time, in an event loop with its own thread. Responses are yielded as they arrive."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from .engine import GenerationRequest, Response

_LAST_WORDS = 10.0  # seconds for cancelled requests to tell their engine


_Result = TypeVar("_Result")
Respond = Callable[[GenerationRequest], Awaitable[Response]]


class Stream:
    """The event loop. It runs until `close`, because an engine's connections belong to the loop that opened them."""

    def __init__(self) -> None:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live(started)), daemon=True)
        self._thread.start()
        started.wait()

    async def _live(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        await self._stop.wait()

    def answers(
        self,
        requests: Sequence[GenerationRequest],
        answer: Respond,
        at_once: int,
    ) -> Iterator[list[Response]]:
        """Yield portions: all responses that arrived since the last portion. A new request starts when one ends.

        An exception of `answer` ends all requests and is raised after the responses that arrived before it. Closing the
        iterator cancels the requests under way. at_once: requests at a time
        """
        came: queue.SimpleQueue[Response | BaseException] = queue.SimpleQueue()
        work = asyncio.run_coroutine_threadsafe(self._answer_all(requests, answer, at_once, came), self._loop)
        end: BaseException | None = None
        try:
            while end is None:
                portion = []
                one: Response | BaseException | None = came.get()
                while isinstance(one, Response):
                    portion.append(one)
                    one = came.get() if not came.empty() else None
                end = one
                if portion:
                    yield portion
            if not isinstance(end, _Done):
                raise end
        finally:
            work.cancel()
            with suppress(queue.Empty):
                while end is None:
                    one = came.get(timeout=_LAST_WORDS)
                    end = one if isinstance(one, BaseException) else None

    async def _answer_all(
        self,
        requests: Sequence[GenerationRequest],
        answer: Respond,
        at_once: int,
        came: queue.SimpleQueue[Any],
    ) -> None:
        """Put each response as it arrives, then _Done or the exception that ended all requests."""
        waiting = iter(requests)

        async def one_after_another() -> None:
            for request in waiting:
                came.put(await answer(request))

        end: BaseException = _Done()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(at_once, len(requests))):
                    group.create_task(one_after_another())
        except* Exception as failures:
            end = failures.exceptions[0]
        finally:
            came.put(end)

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine in the loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()


class _Done(Exception):
    """All requests are answered or cancelled."""
