"""Samplers whose engines take all requests at once and answer each when it is done."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..records import Rollout
from .request import Pending, Portion, Request, Sampler


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
            pending.send({i: request for i, request in enumerate(requests) if i not in done})
            while pending:
                yield pending.arrived(wait=True)


class _Queue(Pending):
    """Of a sampler, with its own `_send` and `_arrived`. requests: by handle, with their positions"""

    def __init__(self, send: Callable[[Request, int], Any], arrived: Callable[..., list[tuple[Any, Any]]]) -> None:
        self._send, self._arrived = send, arrived
        self.requests: dict[Any, tuple[int, Request]] = {}

    def __len__(self) -> int:
        return len(self.requests)

    def send(self, requests: Mapping[int, Request]) -> None:
        for position, request in requests.items():
            self.requests[self._send(request, request.seed_at(position))] = (position, request)

    def arrived(self, wait: bool) -> Portion:
        return [(self.requests.pop(handle)[0], rollouts) for handle, rollouts in self._arrived(self.requests, wait)]
