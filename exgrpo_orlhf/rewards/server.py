"""A reward server with OpenRLHF's protocol: POST {"query", "prompts", "labels"}, each a list, and back {"rewards"}, as
many numbers, with "scores" where success is another thing than the reward.

Whatever the server does, an answer without a number is one that could not be graded, with the reason in the log.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx

from ..records import Verdict
from .answer import Answer, Graded, logs_of, single
from .pool.pool import NoGrader

_PAUSE = 0.5  # seconds before the second try; twice as long before each further one
_SHOWN = 80  # characters of an answer of the server


class RewardServer:
    """One server, or several that share the answers.

    urls: addresses, taken in turn; the next one gets an answer that failed
    timeout: seconds that a server may take for one request, which has the responses to one question
    tries: of each request, at most
    connections: requests at a time
    success_at: least score of a success, or reward where there are no scores
    """

    def __init__(self, urls: tuple[str, ...], timeout: float, tries: int, connections: int, success_at: float) -> None:
        self.urls, self.timeout, self.tries, self.success_at = list(urls), timeout, tries, success_at
        self._turns, self._lock = itertools.cycle(range(len(urls))), threading.Lock()
        self._threads = ThreadPoolExecutor(connections, "reward-server")
        self._client = httpx.Client(limits=httpx.Limits(max_connections=connections))

    def check(self, columns: Sequence[str] | None) -> None:
        """Raises NoGrader unless something listens at one of the addresses at least."""
        faults = []
        for url in self.urls:
            try:
                self._client.get(url, timeout=self.timeout)  # whatever it answers
                return
            except httpx.HTTPError as error:
                faults.append(f"{url}: {error_text(error)}")
        raise NoGrader(f"Verifier.url: no reward server answers ({'; '.join(faults)})")

    def submit(self, answers: Sequence[Answer], times: float = 1.0) -> list[Future[Graded]]:
        """Grade the answers in one request. times: the limit, in multiples of the server's"""
        futures: list[Future[Graded]] = [Future() for _ in answers]
        self._threads.submit(self._grade, list(answers), futures, times * self.timeout)
        return futures

    def close(self) -> None:
        """Cancel what waits. Requests that are under way end by their own limit."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _grade(self, answers: list[Answer], futures: list[Future[Graded]], timeout: float) -> None:
        if all(future.cancelled() for future in futures):
            return
        try:
            graded = self._ask(answers, timeout)
        except Exception as error:  # a fault of ours must not leave the caller waiting
            graded = [Graded("error", None, reason=f"{type(error).__name__}: {error}")] * len(answers)
        for future, each in zip(futures, graded, strict=True):
            if future.set_running_or_notify_cancel():
                future.set_result(each)

    def _ask(self, answers: list[Answer], timeout: float) -> list[Graded]:
        prompts = [_text(answer) for answer in answers]
        body = {
            "query": [prompt + answer.response for prompt, answer in zip(prompts, answers, strict=True)],
            "prompts": prompts,
            "labels": [answer.gold for answer in answers],
        }
        with self._lock:
            first = next(self._turns)
        verdict: Verdict = "error"
        reason = ""
        for attempt in range(self.tries):
            url = self.urls[(first + attempt) % len(self.urls)]
            if attempt:
                time.sleep(_PAUSE * 2 ** (attempt - 1))
            try:
                response = self._client.post(url, json=body, timeout=timeout)
                response.raise_for_status()
                return _read(response.json(), len(answers), url, self.success_at)
            except httpx.TimeoutException:
                verdict, reason = "timeout", f"{url} took more than {timeout:g} s"
            except httpx.HTTPStatusError as error:
                text = error.response.text[:_SHOWN]
                verdict, reason = "error", f"{url} answered {error.response.status_code}: {text!r}"
            except httpx.HTTPError as error:
                verdict, reason = "error", f"{url}: {error_text(error)}"
            except ValueError as error:  # no JSON, or not what was asked for
                verdict, reason = "error", f"{url} answered what cannot be read: {error}"
        return [Graded(verdict, None, reason=reason)] * len(answers)


server = cache(RewardServer)  # this process's connections with these settings
os.register_at_fork(after_in_child=server.cache_clear)  # the child has no threads


def _read(answer: Any, count: int, url: str, success_at: float) -> list[Graded]:
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
        columns.append([_number(value) for value in values])
    logs, reason = logs_of(answer.get("extra_logs"), count)
    graded = []
    for i, (reward, score) in enumerate(zip(columns[0], columns[1] or columns[0], strict=True), 1):
        if reward is None or score is None:
            shown = f"{answer['rewards']!r:.{_SHOWN}}"
            graded.append(Graded("error", None, reason=f"{url}: reward {i} of {count} is no finite number: {shown}"))
        else:
            verdict: Verdict = "correct" if score >= success_at else "wrong"
            graded.append(Graded(verdict, reward, reason=reason, logs=logs[i - 1]))
    return graded


def _number(value: Any) -> float | None:
    value = single(value)
    fine = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if fine else None


def _text(answer: Answer) -> str:
    prompt = answer.prompt
    return prompt if isinstance(prompt, str) else "\n".join(content for _, content in prompt)


def error_text(error: Exception) -> str:
    """Its class and its message, if it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def address_fault(url: Any) -> str | None:
    """What is wrong with an address, if anything."""
    if not isinstance(url, str) or urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        return f"{url!r} is no address such as 'http://host:5000/get_reward'"
    return None
