"""Samplers whose engines take all requests at once and answer each when it is done."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from typing import Any

from ..environments.playing import Play
from ..records import Rollout
from .request import Portion, Request, Sampler

POLL = 0.01  # seconds between two looks at what environments have answered


class QueuedSampler(Sampler):
    """A subclass sends requests, says what has arrived, and cancels. It may let its engines sleep meanwhile."""

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

    def sample(self, requests: Sequence[Request], done: Collection[int] = ()) -> Generator[Portion, None, None]:
        pending: dict[Any, tuple[int, Request]] = {}
        with self.awake():
            try:
                for i, request in enumerate(requests):
                    if i not in done:
                        pending[self._send(request, request.seed_at(i))] = (i, request)
                while pending:
                    yield [(pending.pop(handle)[0], rollouts) for handle, rollouts in self._arrived(pending, True)]
            finally:
                self._cancel(pending)

    def _play(self, plays: Sequence[Play], like: Request) -> Iterator[Sequence[int]]:
        """Each at its own pace: its next turn is sent when its environment has answered."""
        environment_turns = set(range(len(plays)))  # whose environment has not answered
        pending: dict[Any, tuple[int, Request]] = {}
        with self.awake():
            try:
                while environment_turns or pending:
                    for i in [i for i in environment_turns if plays[i].answered]:
                        environment_turns.remove(i)
                        if not plays[i].received():
                            yield [i]
                            continue
                        turn = like.turn(plays[i])
                        pending[self._send(turn, turn.seed_at(i))] = (i, turn)
                    if not pending:
                        time.sleep(POLL if environment_turns else 0)
                        continue
                    for handle, (rollout,) in self._arrived(pending, not environment_turns):
                        i, _ = pending.pop(handle)
                        plays[i].act(rollout)
                        environment_turns.add(i)
            finally:
                self._cancel(pending)
