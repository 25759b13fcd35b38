"""The sampler behind a server with OpenAI's protocol: vLLM, SGLang, llama.cpp, a provider."""

from __future__ import annotations

import asyncio
import difflib
import json
import queue
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from ..io.http_client import HttpClient, Reply, RequestFailed, address_fault
from ..io.redaction import address_only
from ..io.terminal import warn_once
from ..records import Rollout
from .queued import QueuedSampler
from .request import POLL, EngineLost, Request, ServedRollout

_SEEDS = 2**31  # seeds below this are accepted by all servers
_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
_TIMEOUT = 600.0  # seconds for one response
_RETRIES = 5  # further attempts after the first
_LAST_WORDS = 10.0  # seconds for cancelled requests to tell the server


class ServerSampler(QueuedSampler):
    """Sends `concurrency` requests at a time, and tries again if the server is overloaded or the connection breaks.

    api 'completions' sends the prompt's token ids, so the server starts from the same tokens as every other engine and
    adds no second begin token. It must serve the model of the tokenizer that made them; its count of prompt tokens is
    checked. 'chat' sends the messages, and the server applies its own template.

    Penalties of 0 are sent, and to vLLM and SGLang also that there is no top-k, min-p and repetition penalty, which the
    protocol lacks: else they come from the model's generation config. Another server must be set up without them. Nor
    has the protocol token ids that end a response: with 'completions' those of `Request.end` go to vLLM and SGLang.
    These two are told to leave special tokens in the text, which the tags of a thought may be.

    A failure is raised after the responses that arrived before it; from then on no request is begun.
    """

    together = 256
    reproducible = (
        "a server at most accepts the seed: its version, and the other requests it computes, can change responses"
    )

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api: Literal["completions", "chat"],
        key: str | None,
        concurrency: int = 64,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """base_url: with its version, such as http://localhost:8000/v1; chat_template_kwargs: for the server's own chat
        template, as vLLM and SGLang take them. Raises EngineLost if it is no address."""
        self.base_url, self.model, self.api, self.at_once = base_url.rstrip("/"), model, api, concurrency
        if fault := address_fault(self.base_url):
            raise EngineLost(f"--base-url: {fault}")
        self._where = address_only(self.base_url)
        self._own = {"chat_template_kwargs": dict(chat_template_kwargs)} if chat_template_kwargs else {}
        self._filters: dict[str, float] = _PENALTIES
        self._knows_tokens = False  # whether the server takes stop_token_ids and skip_special_tokens
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http = HttpClient(concurrency, _RETRIES + 1, late_again=False, headers=headers)
        self._free, self._under_way = asyncio.Semaphore(self.at_once), 0
        self._over = threading.Event()  # set by a failure or `_cancel`: of the requests since the last `_cancel`
        self._done: queue.SimpleQueue[Future[list[Rollout]]] = queue.SimpleQueue()

    def check_server(self) -> str | None:
        """Raises EngineLost unless the server answers and has the model. Returns what the server says that it has
        loaded under the model's name, such as a folder, if it does."""
        try:
            reply = self._http.get(f"{self.base_url}/models", 30.0)
        except RequestFailed as error:
            raise EngineLost(f"no server answers: {error}") from error
        if reply.status == 404:
            raise EngineLost(f"{reply.where} is not there; the address usually ends in /v1")
        if reply.status != 200:
            raise self._lost(reply.refusal())
        try:
            models = {str(model["id"]): model for model in json.loads(reply.content)["data"]}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise EngineLost(f"{reply.where} gave no list of models: {reply.beginning}") from error
        if self.model not in models:
            near = ", ".join(difflib.get_close_matches(self.model, models, n=5, cutoff=0.3) or sorted(models)[:5])
            raise EngineLost(f"{self._where} does not serve {self.model!r}; nearest of {len(models)}: {near}")
        if models[self.model].get("owned_by") in ("vllm", "sglang"):
            self._filters = {**_PENALTIES, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
            self._knows_tokens = True
        root = models[self.model].get("root")
        return None if root in (None, self.model) else str(root)

    async def _answers(self, request: Request, seed: int, over: threading.Event) -> list[Rollout]:
        async with self._free:
            if over.is_set():
                await asyncio.Event().wait()  # until it is cancelled, which it is a moment later
            self._under_way += 1
            try:
                return [await self._answer(request, seed + k) for k in range(request.n)]
            except Exception:  # and not where it is cancelled
                over.set()
                raise
            finally:
                self._under_way -= 1

    def _send(self, request: Request, seed: int) -> Any:
        future = self._http.submit(self._answers(request, seed, self._over))
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
        self._over.set()  # before any is cancelled: its place would go to one that waits, and be sent
        for future in handles:
            future.cancel()
        self._over = threading.Event()
        end = time.monotonic() + _LAST_WORDS
        while handles and self._under_way and time.monotonic() < end:
            time.sleep(POLL)

    async def _answer(self, request: Request, seed: int) -> Rollout:
        body = {name: getattr(request, name) for name in ("max_tokens", "temperature", "top_p")}
        body |= {"model": self.model, "seed": seed % _SEEDS, **self._filters}
        if self._knows_tokens:
            body["skip_special_tokens"] = False
        if self.api == "completions":
            body["prompt"] = [*request.prompt_ids]
            if request.end and self._knows_tokens:
                body["stop_token_ids"] = [*request.end]
            elif request.end:
                warn_once(
                    f"the token that closes a turn of the template, in requests to {self._where}: only vLLM and SGLang "
                    "take it. Where it is not the model's own end token, responses go on behind it; use --api chat"
                )
            return self._response(request, await self._post("/completions", body))
        messages = [{"role": role, "content": content} for role, content in request.messages]
        body |= {"messages": messages, **self._own}
        return self._response(request, await self._post("/chat/completions", body))

    async def _post(self, path: str, body: dict[str, Any]) -> Reply:
        """The server's answer. Raises EngineLost if it refuses, or after the last attempt."""
        try:
            return await self._http.post([self.base_url + path], body, _TIMEOUT, lambda reply: reply)
        except RequestFailed as error:
            raise self._lost(error) from error

    def _lost(self, failure: RequestFailed) -> EngineLost:
        advice = ""
        if failure.late:
            advice = f": give --concurrency less than {self.at_once}, or --max-tokens less"
        elif failure.status in (401, 403):
            advice = "; the key is what the environment variable OPENAI_API_KEY, or that of --key-variable, holds"
        elif failure.status == 404:
            advice = f"; is {self.model!r} among {self._where}/models, and --api {self.api} served?"
        return EngineLost(f"{failure}{advice}")

    def _response(self, request: Request, reply: Reply) -> ServedRollout:
        try:
            content = json.loads(reply.content)
            (choice,), usage = content["choices"], content["usage"]
            message = {"content": choice["text"]} if self.api == "completions" else choice["message"]
            text = message["content"] or ""  # there is none of a reasoning model that was truncated while thinking
            finish, tokens, of_prompt = choice["finish_reason"], usage["completion_tokens"], usage["prompt_tokens"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise EngineLost(
                f"{request.name}: {self._where} does not follow the protocol ({type(error).__name__}: {error}): "
                f"{reply.beginning}"
            ) from error
        if finish not in ("stop", "length"):
            raise EngineLost(f"{request.name}: {self._where} ended the response by {finish!r}")
        if self.api == "completions" and of_prompt != len(request.prompt_ids):
            raise EngineLost(
                f"{request.name}: {self._where} counts {of_prompt} tokens in a prompt of {len(request.prompt_ids)}: it "
                "adds tokens or has another tokenizer; --api chat lets it render"
            )
        if not text and (message.get("reasoning_content") or message.get("reasoning")):
            warn_once(
                f"the reasoning_content of responses of {self._where} without content: they count as no answer; raise "
                "--max-tokens where they are truncated, or start the server without its reasoning parser"
            )
        rendered = None if self.api == "completions" else of_prompt
        return ServedRollout(np.empty(0, np.int32), finish, text=text, tokens=tokens, prompt_tokens=rendered)

    def describe(self) -> dict[str, Any]:
        return {
            "name": "openai",
            "base_url": self._where,
            "model": self.model,
            "api": self.api,
            "concurrency": self.at_once,
            "seed": f"of each response, modulo {_SEEDS}",
            "filters": self._filters,
        }

    def close(self) -> None:
        self._http.close()
