"""A server that speaks OpenAI's protocol, with its refusals and failures: a real one on the loopback interface."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from email.message import Message
from typing import Any

import pytest
import torch
from eval_builders import all_responses, greedy_by_transformers, needs_vllm, published_model, request, texts
from http_server import Reply, http_server
from run_builders import byte_tokenizer, free_port, wait_until

from exgrpo_orlhf.evaluation.responses import respond
from exgrpo_orlhf.io.terminal import warn_once
from exgrpo_orlhf.sampling import EngineLost, Request
from exgrpo_orlhf.sampling.openai_server import ServerSampler

KEY = "sk-secret"
Answer = tuple[int, dict[str, str], Any]  # status, headers, body: text as it is, else as JSON


@dataclass
class Server:
    """answer: (path, body of the request, how often it came before) → what it gets. requests: (when, path, body)"""

    answer: Callable[[str, dict[str, Any], int], Answer]
    models: Answer = (200, {}, {"data": [{"id": "tiny"}, {"id": "tiny-instruct"}, {"id": "other"}]})
    requests: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    running: int = 0
    most_running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""


@contextmanager
def serving(answer: Callable[[str, dict[str, Any], int], Answer]) -> Iterator[Server]:
    server = Server(answer)

    def reply(method: str, path: str, headers: Message, body: bytes) -> Reply:
        if method == "GET":
            return text_of(server.models if path == "/v1/models" else (404, {}, "not found"))
        content = json.loads(body)
        with server.lock:
            before = sum(content == other for _, _, other in server.requests)
            server.requests.append((time.monotonic(), path, content))
            server.keys.add(headers["authorization"])
            server.running += 1
            server.most_running = max(server.most_running, server.running)
        result = server.answer(path, content, before)
        with server.lock:
            server.running -= 1
        return text_of(result)

    with http_server(reply) as address:
        server.url = f"{address}/v1"
        yield server


def text_of(answer: Answer) -> Reply:
    status, headers, content = answer
    return status, headers, content if isinstance(content, str) else json.dumps(content)


@contextmanager
def client(url: str, api: str = "completions", **settings: Any) -> Iterator[ServerSampler]:
    engine = ServerSampler(url, "tiny", api=api, key=KEY, **settings)
    try:
        yield engine
    finally:
        engine.close()


def requests(n: int) -> list[Request]:
    settings = {"max_tokens": 100, "temperature": 0.6, "top_p": 0.9}
    messages = lambda i: (("system", "be brief"), ("user", f"question {i}"))
    return [Request((1, 2, 3, i), 2**62 + i, key=("set", i, 0), messages=messages(i), **settings) for i in range(n)]


def number(body: dict[str, Any]) -> int:
    """Of the request, in either interface."""
    return body["prompt"][-1] if "prompt" in body else int(body["messages"][-1]["content"].split()[-1])


def completion(body: dict[str, Any], finish: str | None = "stop", **usage: int) -> Answer:
    text = f"answer {number(body)}"
    choice = {"text": text} if "prompt" in body else {"message": {"role": "assistant", "content": text}}
    usage = {"prompt_tokens": 4, "completion_tokens": 10 + number(body)} | usage
    return 200, {}, {"choices": [choice | {"finish_reason": finish}], "usage": usage}


def error(status: int, message: str, headers: dict[str, str] | None = None) -> Answer:
    return status, headers or {}, {"error": {"message": message}}


def failure_of(answer: Answer) -> tuple[str, int]:
    """The message of the EngineLost when the server always gives this answer, and the number of its requests."""
    with serving(lambda *_: answer) as server, client(server.url) as engine:
        with pytest.raises(EngineLost) as raised:
            all_responses(engine, requests(1))
        assert KEY not in str(raised.value) + json.dumps(engine.describe())
        return str(raised.value), len(server.requests)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_every_request_is_answered_once_but_those_done(api):
    tokens = 9 if api == "chat" else 4  # of a prompt that the server renders, or gets
    answer = lambda _, body, __: completion(body, "length" if number(body) == 3 else "stop", prompt_tokens=tokens)
    own = {"chat_template_kwargs": {"enable_thinking": False}} if api == "chat" else {}
    with serving(answer) as server, client(server.url, api, concurrency=5, **own) as engine:
        engine.check_server()
        answers = all_responses(engine, requests(30), done={("set", 7, 0), ("set", 29, 0)})
    assert sorted(key[1] for key in answers) == sorted(set(range(30)) - {7, 29})
    for (_, row, _), response in answers.items():
        assert (response.text, response.tokens) == (f"answer {row}", 10 + row)
        assert response.prompt_tokens == (9 if api == "chat" else None)
        assert response.finish == ("length" if row == 3 else "stop")
    assert server.most_running <= 5
    assert server.keys == {f"Bearer {KEY}"}
    for _, path, body in server.requests:
        assert (body["model"], body["max_tokens"], body["temperature"], body["top_p"]) == ("tiny", 100, 0.6, 0.9)
        if api == "completions":
            assert (path, body["prompt"]) == ("/v1/completions", [1, 2, 3, number(body)])
        else:
            turns = [("system", "be brief"), ("user", f"question {number(body)}")]
            assert path == "/v1/chat/completions"
            assert body["messages"] == [{"role": role, "content": content} for role, content in turns]
        assert body.items() >= own.items()
        assert body.items() >= {"presence_penalty": 0, "frequency_penalty": 0}.items()
        assert not {"top_k", "skip_special_tokens"} & set(body), "which are not of the protocol"
    seeds = {body["seed"] for *_, body in server.requests}
    assert len(seeds) == len(server.requests) == 28
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
def test_a_server_that_knows_more_filters_is_told_that_there_are_none(owner):
    """Else they are those of the model's generation config."""
    with serving(lambda _, body, __: completion(body)) as server, client(server.url) as engine:
        server.models = (200, {}, {"data": [{"id": "tiny", "owned_by": owner}]})
        engine.check_server()
        all_responses(engine, requests(2))
        none = {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
        own = {**none, "skip_special_tokens": False}  # they may be the tags of a thought
        assert all(body.items() >= own.items() for *_, body in server.requests)
        assert engine.describe()["filters"] == none


@pytest.mark.parametrize("owner", ["vllm", "sglang", "somebody"])
def test_a_server_that_can_end_a_response_with_the_templates_turn_is_told_to_and_another_is_warned_of(owner, caplog):
    warn_once.cache_clear()
    asked = [replace(one, end=(7, 9)) for one in requests(3)]
    with serving(lambda _, body, __: completion(body)) as server:
        server.models = (200, {}, {"data": [{"id": "tiny", "owned_by": owner}]})
        for api in ("completions", "chat"):  # in 'chat' the server has a template of its own
            with client(server.url, api) as engine:
                engine.check_server()
                all_responses(engine, asked)
    sent = {(path, tuple(body.get("stop_token_ids", ()))) for _, path, body in server.requests}
    ends = () if owner == "somebody" else (7, 9)
    assert sent == {("/v1/completions", ends), ("/v1/chat/completions", ())}
    assert len([message for message in caplog.messages if "closes a turn" in message]) == (owner == "somebody")


def test_finished_responses_come_out_while_the_rest_is_generated():
    seen = threading.Event()

    def answer(path, body, before):
        assert number(body) or seen.wait(300), "the others were held back"
        return completion(body)

    with serving(answer) as server, client(server.url, concurrency=2) as engine:
        rows = []
        for portion in respond(engine, requests(10), (), None):
            rows += [response.request.key[1] for response in portion]
            if len(rows) == 9:
                assert 0 not in rows
                seen.set()
    assert rows[-1] == 0
    assert len(rows) == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "at_least"),
    [
        (error(500, "out of memory"), 0.5),
        (error(429, "slow down"), 0.5),
        (error(429, "slow down", {"retry-after": "1"}), 1.5),  # seconds, on top of the usual wait
        (error(503, "starting", {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}), 0.5),
    ],
)
def test_an_overloaded_server_gets_the_request_again_after_a_while(failure, at_least):
    answer = lambda _, body, before: completion(body) if before else failure
    with serving(answer) as server, client(server.url) as engine:
        assert len(all_responses(engine, requests(4))) == 4
    for row in range(4):
        first, second = [when for when, _, body in server.requests if number(body) == row]
        assert second - first >= at_least


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        (error(401, "bad key"), "bad key.*OPENAI_API_KEY"),
        (error(404, "no model tiny"), "no model tiny.*'tiny' among"),
        (error(400, "context is 512 tokens"), "context is 512 tokens"),
        ((400, {}, "plain words"), "plain words"),
        ((422, {}, {"detail": [{"msg": "field required"}]}), "field required"),
        ((200, {}, "[" * 10**5 + "]" * 10**5), "does not follow the protocol"),
        ((400, {}, "[" * 10**5 + "]" * 10**5), r"answered 400: '\[\["),
        ((200, {}, "<html>"), "does not follow the protocol.*<html>"),
        ((200, {}, {"choices": []}), "does not follow the protocol"),
        ((200, {}, {"choices": [{"text": "x", "finish_reason": "stop"}]}), "does not follow the protocol.*usage"),
        (completion({"prompt": [0]}, "content_filter"), "set/0/0.*content_filter"),
        (completion({"prompt": [0]}, None), "set/0/0.*None"),
        (completion({"prompt": [0]}, prompt_tokens=5), "5 tokens in a prompt of 4"),
        (error(500, "out of memory"), "2 attempts.*out of memory"),
    ],
)
def test_a_refusal_is_reported_at_once_in_the_servers_words_and_attempts_come_to_an_end(refusal, message, monkeypatch):
    monkeypatch.setattr("exgrpo_orlhf.sampling.openai_server._RETRIES", 1)
    text, attempts = failure_of(refusal)
    assert re.search(message, text)
    assert attempts == (2 if refusal[0] == 500 else 1)


def test_reasoning_without_content_is_no_answer_and_said_once(caplog):
    def answer(_, body, __):
        status, headers, content = completion(body)
        content["choices"][0]["message"] = {"role": "assistant", "content": None, "reasoning_content": "It is 4."}
        return status, headers, content

    warn_once.cache_clear()
    with serving(answer) as server, client(server.url, api="chat") as engine:
        assert {*texts(all_responses(engine, requests(3))).values()} == {""}
    [message] = [message for message in caplog.messages if "reasoning_content" in message]
    assert "without its reasoning parser" in message


def test_responses_before_a_failure_are_handed_out():
    answer = lambda _, body, __: completion(body) if number(body) < 5 else error(400, "enough")
    rows: list[int] = []
    with serving(answer) as server, client(server.url, concurrency=1) as engine:
        with pytest.raises(EngineLost, match="enough"):
            rows.extend(r.request.key[1] for portion in respond(engine, requests(20), (), None) for r in portion)
        assert rows == [0, 1, 2, 3, 4]
        assert len(server.requests) == 6, "no request follows the failure"


def test_a_slow_server_is_given_up(monkeypatch):
    monkeypatch.setattr("exgrpo_orlhf.sampling.openai_server._TIMEOUT", 0.3)
    answer = lambda _, body, __: time.sleep(1) or completion(body)
    with serving(answer) as server, client(server.url) as engine:
        with pytest.raises(EngineLost, match="did not answer within"):
            all_responses(engine, requests(1))
        wait_until(lambda: server.requests)  # its thread may not have run yet
        assert len(server.requests) == 1


def test_a_closed_iterator_sends_no_further_requests_and_the_engine_goes_on():
    over, begun = threading.Event(), threading.Semaphore(0)

    def answer(path, body, before):
        begun.release()
        if number(body) > 0:
            over.wait(300)
        return completion(body)

    with serving(answer) as server, client(server.url, concurrency=3) as engine:
        portions = respond(engine, requests(50), (), None)
        assert [response.request.key[1] for response in next(portions)] == [0]
        for _ in range(4):  # row 0, and the three that are under way
            assert begun.acquire(timeout=300)
        portions.close()
        over.set()
        assert len(server.requests) == 4
        assert len(all_responses(engine, requests(2))) == 2
        assert len(server.requests) == 6


def test_a_wrong_address_model_or_key_is_reported_before_anything_is_generated(monkeypatch):
    monkeypatch.setattr("exgrpo_orlhf.sampling.openai_server._RETRIES", 0)
    with serving(lambda *_: error(500, "unused")) as server:
        data = {"data": [{"id": "tyni"}, {"id": "other"}]}
        for models, address, message in (
            ((200, {}, data), server.url, "does not serve 'tiny'; nearest of 2: tyni"),
            (server.models, server.url.removesuffix("/v1"), "ends in /v1"),
            (error(401, "who are you"), server.url, r"who are you.*OPENAI_API_KEY"),
            ((200, {}, {"models": []}), server.url, "no list of models"),
            ((200, {}, "[" * 10**5 + "]" * 10**5), server.url, "no list of models"),
        ):
            server.models = models
            with client(address) as engine, pytest.raises(EngineLost, match=message):
                engine.check_server()
            engine.close()  # a second time
    for address in ("http://host:99999/v1", "http://host:port/v1", "host:80/v1"):
        with pytest.raises(EngineLost, match=r"--base-url: .* is no address"):
            client(address).__enter__()
    with client(server.url.replace("//", "//me:hidden@")) as engine:  # nobody listens there now
        assert engine.describe()["base_url"] == server.url, "without the password"
        with pytest.raises(EngineLost, match=r"no server answers.*Connect") as raised:
            engine.check_server()
        assert "hidden" not in str(raised.value)
        with pytest.raises(EngineLost, match=r"completions: Connect"):
            all_responses(engine, requests(1))


@pytest.mark.slow
@needs_vllm
def test_vllms_own_server_answers_as_transformers_does(tmp_path):
    folder = published_model(tmp_path / "model")
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "tiny", "--dtype", "float32"]
    command += ["--data-parallel-size", "1" if torch.cuda.device_count() == 1 else "2"]  # as docs/evaluation.md has it
    quick = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_COMPILE_DISABLE": "1"}
    if not torch.cuda.is_available():
        command += ["--enforce-eager", "--no-enable-chunked-prefill", "--kv-cache-memory-bytes", str(2**26)]
    server = subprocess.Popen(command, env=os.environ | quick)
    try:
        with client(f"http://127.0.0.1:{port}/v1") as engine:

            def ready() -> bool:
                assert server.poll() is None, "the server ended"
                with suppress(EngineLost):
                    engine.check_server()
                    return True
                return False

            wait_until(ready, seconds=600)
            greedy = [request(i, temperature=0.0) for i in range(10)]
            answers, expected = all_responses(engine, greedy), greedy_by_transformers(folder, greedy)
            assert sum(answers[one.key].text == text for one, text in zip(greedy, expected, strict=True)) >= 9
            i, text = max(enumerate(expected), key=lambda pair: len(pair[1]))
            letter = text[len(text) // 2]
            (end,) = byte_tokenizer()(letter)["input_ids"]
            (ended,) = all_responses(engine, [replace(greedy[i], end=(end,))]).values()
            assert (ended.text, ended.finish) == (text.partition(letter)[0], "stop")
            sampled = [request(i) for i in range(20)]
            first = all_responses(engine, sampled)
            assert texts(all_responses(engine, sampled[::-1])) == texts(first)
            assert {response.finish for response in first.values()} == {"stop", "length"}
            with pytest.raises(EngineLost, match="max_model_len"):
                all_responses(engine, [request(0, max_tokens=600)])
        with client(f"http://127.0.0.1:{port}/v1", "chat") as engine:
            (response,) = all_responses(engine, sampled[:1]).values()
            assert 0 < response.tokens <= sampled[0].max_tokens
    finally:
        server.terminate()
        server.wait(30)
