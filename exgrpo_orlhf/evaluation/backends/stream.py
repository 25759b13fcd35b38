"""Many requests at a time, in an event loop with its own thread. Responses are yielded as they arrive."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from . import GenerationRequest, Response

_LAST_WORDS = 10.0  # seconds for cancelled requests to tell their engine
_Result = TypeVar("_Result")


class Stream:
    """The event loop. It runs until `close`, because an engine's connections belong to the loop that opened them."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def _live(self) -> None:
        with self._runner:  # however the loop ends, what is left in it is cancelled: nobody waits for it in vain
            self._loop.run_forever()

    def answers(
        self,
        requests: Sequence[GenerationRequest],
        answer: Callable[[GenerationRequest], Awaitable[Response]],
        at_once: int,
    ) -> Iterator[list[Response]]:
        """Yield portions: all responses that arrived since the last portion. A new request starts when one ends.

        An exception of `answer` ends all requests and is raised after the responses that arrived before it. Closing the
        iterator cancels the requests under way. at_once: requests at a time
        """
        arrivals: queue.SimpleQueue[Response | None] = queue.SimpleQueue()
        waiting = iter(requests)

        async def answer_next() -> None:
            for request in waiting:
                arrivals.put(await answer(request))

        async def answer_all() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(at_once, len(requests))):
                        group.create_task(answer_next())
            finally:
                arrivals.put(None)

        work, ended = asyncio.run_coroutine_threadsafe(answer_all(), self._loop), False
        try:
            while not ended:
                portion = [arrivals.get()]
                while not arrivals.empty():
                    portion.append(arrivals.get())
                ended = portion[-1] is None
                if responses := [response for response in portion if response is not None]:
                    yield responses
            if failure := work.exception():
                raise failure.exceptions[0] if isinstance(failure, ExceptionGroup) else failure
        finally:
            work.cancel()
            with suppress(queue.Empty):
                while not ended:
                    ended = arrivals.get(timeout=_LAST_WORDS) is None

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine in the loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
