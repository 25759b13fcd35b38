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
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx

from ..grader.answer import Answer
from ..grader.grade import Grade, Verdict
from ..grader.kind import Kind
from ..rounding import LARGEST_REWARD
from .pool import NoGrader
from .protocol import logs_of, openrlhf_lists, single

_PAUSE = 0.5  # seconds before the second try; twice as long before each further one
_SHOWN = 80  # characters of an answer of the server
_LARGEST = 16 * 2**20  # bytes of an answer: rewards and logs of a thousand responses take less


class RewardClient:
    """One server, or several that share the answers. Requests are made in an event loop with its own thread.

    urls: addresses, taken in turn; the next one gets an answer that failed
    timeout: seconds from the begin of a request to the last byte of its answer; it has the responses to one question
    tries: of each request, at most
    connections: requests at a time
    success_at: least score of a success, or reward where there are no scores
    """

    calls = "group"  # as `Grading.calls`

    def __init__(self, urls: tuple[str, ...], timeout: float, tries: int, connections: int, success_at: float) -> None:
        self.urls, self.timeout, self.tries, self.success_at = list(urls), timeout, tries, success_at
        self._turns, self._free = itertools.cycle(range(len(urls))), asyncio.Semaphore(connections)
        self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=connections))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="reward-server", daemon=True).start()

    def check_columns(self, columns: Sequence[str] | None) -> None:
        """Raises NoGrader unless something listens at one of the addresses at least."""
        faults = []
        for url in self.urls:
            try:
                asyncio.run_coroutine_threadsafe(self._answers(url), self._loop).result()
                return
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
                faults.append(f"{shown(url)}: {error_text(error)}")
        raise NoGrader(f"Verifier.url: no reward server answers ({'; '.join(faults)})")

    def submit(self, answers: Sequence[Answer], times: float = 1.0, together: bool = True) -> list[Future[Grade]]:
        """Grade the answers in one request. times: the limit, in multiples of the server's"""
        futures: list[Future[Grade]] = [Future() for _ in answers]
        asyncio.run_coroutine_threadsafe(self._grade(list(answers), futures, times * self.timeout), self._loop)
        return futures

    async def _answers(self, url: str) -> None:
        """Whatever it answers. Raises httpx.HTTPError, TimeoutError."""
        async with asyncio.timeout(self.timeout), self._client.stream("GET", url):
            pass

    async def _grade(self, answers: list[Answer], futures: list[Future[Grade]], timeout: float) -> None:
        async with self._free:
            if all(future.cancelled() for future in futures):
                return
            try:
                graded = await self._ask(answers, timeout)
            except Exception as error:  # a fault of ours must not leave the caller waiting
                graded = [Grade("error", None, reason=f"{type(error).__name__}: {error}")] * len(answers)
        for future, grade in zip(futures, graded, strict=True):
            if future.set_running_or_notify_cancel():
                future.set_result(grade)

    async def _ask(self, answers: list[Answer], timeout: float) -> list[Grade]:
        lists = openrlhf_lists(answers)
        body = {"query": lists.pop("queries"), **lists}
        first = next(self._turns)
        verdict: Verdict = "error"
        reason = ""
        for attempt in range(self.tries):
            url = self.urls[(first + attempt) % len(self.urls)]
            if attempt:
                await asyncio.sleep(_PAUSE * 2 ** (attempt - 1))
            try:
                status, content = await self._post(url, body, timeout)
                if 200 <= status < 300:
                    return _read(json.loads(content), len(answers), shown(url), self.success_at)
                text = content.decode(errors="replace")[:_SHOWN]
                verdict, reason = "error", f"{shown(url)} answered {status}: {text!r}"
            except TimeoutError:
                verdict, reason = "timeout", f"{shown(url)} took more than {timeout:g} s"
            except httpx.HTTPError as error:
                verdict, reason = "error", f"{shown(url)}: {error_text(error)}"
            except (ValueError, RecursionError) as error:  # no JSON, too long, or not what was asked for
                verdict, reason = "error", f"{shown(url)} answered what cannot be read: {error}"
        return [Grade(verdict, None, reason=reason)] * len(answers)

    async def _post(self, url: str, body: dict[str, Any], timeout: float) -> tuple[int, bytes]:
        """Status and content. Raises TimeoutError, httpx.HTTPError, ValueError for an answer that is too long."""
        content = bytearray()
        async with asyncio.timeout(timeout), self._client.stream("POST", url, json=body) as response:
            async for part in response.aiter_bytes():
                content += part
                if len(content) > _LARGEST:
                    raise ValueError(f"more than {_LARGEST:,} bytes")
        return response.status_code, bytes(content)


server = cache(RewardClient)  # this process's connections with these settings
os.register_at_fork(after_in_child=server.cache_clear)  # the child has no threads


def _read(answer: Any, count: int, url: str, success_at: float) -> list[Grade]:
    """Raises ValueError unless there is one reward for each query."""
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
            why = f"{url}: {name} {i} of {count} is no finite number, or beyond ±{LARGEST_REWARD:,.0f}: {values}"
            graded.append(Grade("error", None, reason=why))
        else:
            verdict: Verdict = "correct" if score >= success_at else "wrong"
            graded.append(Grade(verdict, reward, reason=reason, logs=logs[i - 1]))
    return graded


def _number(value: Any, most: float) -> float | None:
    value = single(value)
    fine = isinstance(value, int | float) and math.isfinite(value) and abs(value) <= most
    return float(value) if fine else None


def error_text(error: Exception) -> str:
    """Its class and its message, if it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def shown(url: str) -> str:
    """An address without its user, password and query, which may hold a key."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        _ = parts.port  # raises where a password has a slash, so that a part of it would be taken for the port
        return f"{parts.scheme}://{host}{parts.path}" if host else parts.path
    except ValueError:
        return f"{url.partition(':')[0]}://…"


def address_fault(url: Any) -> str | None:
    """What is wrong with an address, if anything."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for one above 65535
    except (ValueError, AttributeError) as error:
        return f"{shown(str(url))!r} is no address: {error}"
    if parts.scheme not in ("http", "https") or not parts.netloc:
        return f"{shown(str(url))!r} is no address such as 'http://host:5000/get_reward'"
    return None


KIND = Kind(takes_list=True, any_reward=True, whole=True, tries_loading=True, workers=16)
