"""Requests to other people's servers: one deadline each, further attempts after growing waits, and messages without the
user, password and query of an address."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpx

from .redaction import address_only

log = logging.getLogger(__name__)
_FIRST_WAIT = 1.0  # seconds before the second attempt, at most; twice as long before each further one
_LONGEST_WAIT = 60.0  # seconds before a further attempt, unless the server asks for more
_CONNECT = 30.0  # seconds
_LARGEST = 16 * 2**20  # bytes of an answer: rewards and logs of a thousand responses take less
_SHOWN = 300  # characters of an answer in a message
_PASSING = (408, 425, 429)  # refusals that may pass; those from 500 on may too
T = TypeVar("T")


class RequestFailed(Exception):
    """There is no answer that can be used. The message names the address.

    status: of a refusal; late: whether the deadline has passed; wait: seconds that the server asks for
    """

    def __init__(self, message: str, status: int | None = None, *, late: bool = False, wait: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.late, self.wait = status, late, wait

    @property
    def for_good(self) -> bool:
        """Whether the server refused the request, and would again."""
        return self.status is not None and self.status < 500 and self.status not in _PASSING


class Reply(NamedTuple):
    """where: the address, as it may be written; wait: seconds until another request, if the server says so"""

    where: str
    status: int
    content: bytes
    wait: float

    @property
    def beginning(self) -> str:
        """Of its text, for a message."""
        return repr(self.content.decode(errors="replace")[:_SHOWN])

    def refusal(self) -> RequestFailed:
        """With the server's words, from wherever its answer holds them."""
        try:
            content = json.loads(self.content)
            error = content.get("error", content)
            words = repr(str(error["message"] if isinstance(error, dict) and "message" in error else error)[:_SHOWN])
        except (ValueError, AttributeError, RecursionError):
            words = self.beginning
        return RequestFailed(f"{self.where} answered {self.status}: {words}", self.status, wait=self.wait)


class HttpClient:
    """Connections in an event loop with its own thread, because they belong to the loop that opened them."""

    def __init__(
        self, connections: int, attempts: int, *, late_again: bool, headers: Mapping[str, str] | None = None
    ) -> None:
        """connections: at a time; attempts: of a request, at most; late_again: whether an address gets a request again
        that it did not answer in time"""
        self.attempts, self.late_again = attempts, late_again
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=_CONNECT),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        )
        self._jitter = random.Random()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._live, name="http", daemon=True)
        self._thread.start()

    def _live(self) -> None:
        with self._runner:  # however the loop ends, what is left in it is cancelled: nobody waits for it in vain
            self._loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin it in the loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def get(self, url: str, timeout: float) -> Reply:
        """The answer to one attempt, with any status. Blocks. timeout: seconds. Raises RequestFailed."""
        return self.submit(self._once("GET", url, timeout)).result()

    async def post(self, urls: Sequence[str], body: Mapping[str, Any], timeout: float, read: Callable[[Reply], T]) -> T:
        """What `read` makes of an answer with status 2xx.

        urls: addresses of the attempts, in turn. The only one does not get again what it refused for good.
        timeout: seconds from the begin of an attempt to the last byte of its answer
        read: raises ValueError or RecursionError for an answer that another attempt may better
        Raises RequestFailed.
        """
        attempt, alone = 0, len(urls) == 1
        while True:
            try:
                return _read(await self._once("POST", urls[attempt % len(urls)], timeout, body), read)
            except RequestFailed as error:
                attempt += 1
                if attempt == self.attempts or (alone and (error.for_good or (error.late and not self.late_again))):
                    error.args = (f"{attempt} attempts failed, the last: {error}",) if attempt > 1 else error.args
                    raise
                wait = min(_FIRST_WAIT * 2 ** (attempt - 1), _LONGEST_WAIT) * self._jitter.uniform(0.5, 1.0)
                wait += error.wait if alone else 0.0
                if wait > _LONGEST_WAIT:
                    log.warning("%s; it asks for %.0f s until another attempt", error, error.wait)
            await asyncio.sleep(wait)

    async def _once(self, method: str, url: str, timeout: float, body: Mapping[str, Any] | None = None) -> Reply:
        where, content = address_only(url), bytearray()
        try:
            async with asyncio.timeout(timeout), self._client.stream(method, url, json=body) as response:
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > _LARGEST:
                        raise RequestFailed(f"{where} answered what cannot be read: more than {_LARGEST:,} bytes")
        except TimeoutError as error:
            raise RequestFailed(f"{where} did not answer within {timeout:g} s", late=True) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise RequestFailed(f"{where}: {text}") from error
        wait = response.headers.get("retry-after", "")  # it may also be a date
        return Reply(where, response.status_code, bytes(content), float(wait) if wait.isdigit() else 0.0)

    def close(self) -> None:
        """End what is under way, and the thread."""
        if not self._client.is_closed:
            self.submit(self._client.aclose()).result()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


def _read(reply: Reply, read: Callable[[Reply], T]) -> T:
    """Raises RequestFailed for a refusal, and for what cannot be read."""
    if not 200 <= reply.status < 300:
        raise reply.refusal()
    try:
        return read(reply)
    except (ValueError, RecursionError) as error:
        raise RequestFailed(f"{reply.where} answered what cannot be read: {error}") from error


def address_fault(url: Any) -> str | None:
    """What is wrong with an address, if anything."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for one above 65535
    except (ValueError, AttributeError) as error:
        why = "" if "@" in str(url) else f": {error}"  # which may quote a password
        return f"{address_only(str(url))!r} is no address{why}"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"{address_only(str(url))!r} is no address such as 'http://host:5000/get_reward'"
    return None
