"""A reward server with OpenRLHF's protocol: POST {"query", "prompts", "labels"}, each a list, and back {"rewards"}, as
many numbers, with "scores" where success is another thing than the reward.

Whatever the server does, an answer without a number is one that could not be graded, with the reason in the log.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache, partial
from typing import Any

from ..grader.answer import Answer
from ..grader.grade import Grade, Verdict
from ..grader.kind import Kind
from ..io.http_client import HttpClient, Reply, RequestFailed
from ..rounding import LARGEST_REWARD
from .pool import NoGrader
from .protocol import logs_of, openrlhf_lists, single

_SHOWN = 80  # characters of an answer of the server


class RewardClient:
    """One server, or several that share the answers.

    urls: addresses, taken in turn; the next one gets an answer that failed
    timeout: seconds from the begin of a request to the last byte of its answer; it has the responses to one question
    tries: of each request, at most
    connections: requests at a time
    success_at: least score of a success, or reward where there are no scores
    """

    calls = "group"  # as `Grading.calls`

    def __init__(self, urls: tuple[str, ...], timeout: float, tries: int, connections: int, success_at: float) -> None:
        self.urls, self.timeout, self.success_at = list(urls), timeout, success_at
        self._turns, self._free = itertools.cycle(range(len(urls))), asyncio.Semaphore(connections)
        self._http = HttpClient(connections, tries, late_again=True)

    def check_columns(self, columns: Sequence[str] | None) -> None:
        """Raises NoGrader unless something answers, whatever it is, at one of the addresses at least."""
        faults = []
        for url in self.urls:
            try:
                self._http.get(url, self.timeout)
                return
            except RequestFailed as error:
                faults.append(str(error))
        raise NoGrader(f"Verifier.url: no reward server answers ({'; '.join(faults)})")

    def submit(self, answers: Sequence[Answer], times: float = 1.0, together: bool = True) -> list[Future[Grade]]:
        """Grade the answers in one request. times: the limit, in multiples of the server's"""
        futures: list[Future[Grade]] = [Future() for _ in answers]
        self._http.submit(self._grade(list(answers), futures, times * self.timeout))
        return futures

    async def _grade(self, answers: list[Answer], futures: list[Future[Grade]], timeout: float) -> None:
        async with self._free:
            if all(future.cancelled() for future in futures):
                return
            try:
                graded = await self._ask(answers, timeout)
            except RequestFailed as error:
                graded = [Grade("timeout" if error.late else "error", None, reason=str(error))] * len(answers)
            except Exception as error:  # a fault of ours must not leave the caller waiting
                graded = [Grade("error", None, reason=f"{type(error).__name__}: {error}")] * len(answers)
        for future, grade in zip(futures, graded, strict=True):
            if future.set_running_or_notify_cancel():
                future.set_result(grade)

    async def _ask(self, answers: list[Answer], timeout: float) -> list[Grade]:
        lists = openrlhf_lists(answers)
        first = next(self._turns)
        urls = self.urls[first:] + self.urls[:first]
        read = partial(_read, count=len(answers), success_at=self.success_at)
        return await self._http.post(urls, {"query": lists.pop("queries"), **lists}, timeout, read)


server = cache(RewardClient)  # this process's connections with these settings
os.register_at_fork(after_in_child=server.cache_clear)  # the child has no threads


def _read(reply: Reply, count: int, success_at: float) -> list[Grade]:
    """Raises ValueError unless it is JSON with one reward for each query."""
    answer = json.loads(reply.content)
    answer = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
    if not isinstance(answer, dict) or "rewards" not in answer:
        raise ValueError(f"a dict with 'rewards' is needed, got {str(answer)[:_SHOWN]!r}")
    columns = []
    for name in ("rewards", "scores"):
        values = answer.get(name)
        values = values if isinstance(values, list) else [values] * (1 if values is not None else 0)
        if len(values) != count and not (name == "scores" and not values):
            raise ValueError(f"{len(values)} {name} for {count} queries")
        columns.append([_number(value, LARGEST_REWARD if name == "rewards" else math.inf) for value in values])
    logs, reason = logs_of(answer.get("extra_logs"), count)
    graded = []
    for i, (reward, score) in enumerate(zip(columns[0], columns[1] or columns[0], strict=True), 1):
        if reward is None or score is None:
            name = "reward" if reward is None else "score"
            values = f"{answer[f'{name}s']!r:.{_SHOWN}}"
            why = (
                f"{reply.where}: {name} {i} of {count} is no finite number, or beyond ±{LARGEST_REWARD:,.0f}: {values}"
            )
            graded.append(Grade("error", None, reason=why))
        else:
            verdict: Verdict = "correct" if score >= success_at else "wrong"
            graded.append(Grade(verdict, reward, reason=reason, logs=logs[i - 1]))
    return graded


def _number(value: Any, most: float) -> float | None:
    value = single(value)
    fine = isinstance(value, int | float) and math.isfinite(value) and abs(value) <= most
    return float(value) if fine else None


KIND = Kind(takes_list=True, any_reward=True, whole=True, tries_loading=True, workers=16)
