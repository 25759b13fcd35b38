"""Verifier.kind = 'http': a real server in this process, sound and broken in every way."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from contextlib import contextmanager

import pytest
from http_server import http_server

from exgrpo_orlhf.io.metric_names import check_name
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.rewards import NoGrader, Verifier

QUESTION = Question.make("here", "2 + 2 = ", "4")
CLOSE = {"connection": "close"}  # no connection is kept: a server that has ended answers nothing
MESSAGES = Question.make("here", (("system", "Add."), ("user", "2 + 2 = ")), "4")


@contextmanager
def serving(reply):
    """reply: body → (status, text), or None, which hangs up. Yields the address and the bodies."""
    bodies = []

    def answer(method, path, headers, body):
        if method == "GET":
            return 405, CLOSE, ""
        bodies.append(json.loads(body))
        replied = reply(bodies[-1])
        return replied and (replied[0], CLOSE, replied[1])

    with http_server(answer) as address:
        yield f"{address}/get_reward", bodies


def judged(body):
    return 200, json.dumps({"rewards": [1.0 if query.endswith("4") else 0.1 for query in body["query"]]})


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("exgrpo_orlhf.io.http_client._FIRST_WAIT", 0.01)


def grades(url, question=QUESTION, texts=("4", "5"), **settings):
    settings = {"timeout": 20.0, "max_failed_share": 1.0, "tries": 1} | settings
    return Verifier("http", url=url, **settings).grade_all([(question, text) for text in texts])


def shown(graded):
    return [(grade.verdict, grade.reward) for grade in graded]


def test_a_servers_rewards_are_the_rewards_and_its_protocol_is_openrlhfs():
    with serving(judged) as (url, bodies):
        assert shown(grades(url)) == [("correct", 1.0), ("wrong", 0.1)]
        grades(url, MESSAGES)
    assert bodies[0] == {"query": ["2 + 2 = 4", "2 + 2 = 5"], "prompts": ["2 + 2 = "] * 2, "labels": ["4"] * 2}
    assert bodies[1]["prompts"] == ["Add.\n2 + 2 = "] * 2


def test_scores_say_success_where_there_are_any_and_extra_logs_are_kept():
    answer = '{"rewards": [0.3, 2.0], "scores": [1, 0], "extra_logs": {"length": [3, 4], "bad": [1]}}'
    with serving(lambda *_: (200, answer)) as (url, _):
        assert shown(graded := grades(url)) == [("correct", 0.3), ("wrong", 2.0)]
    assert [grade.logs for grade in graded] == [(("length", 3.0),), (("length", 4.0),)]


@pytest.mark.parametrize("name", ["größe", "a//b", "../up", "n" * 300, "/", "a@1", "日本", "x/", "."])
def test_an_extra_log_of_any_name_can_be_a_metric(name):
    answer = json.dumps({"rewards": [1.0, 0.0], "extra_logs": {name: [3, 4]}})
    with serving(lambda *_: (200, answer)) as (url, _):
        [(metric, value)] = grades(url)[0].logs
    check_name(f"reward_log/{metric}")
    assert value == 3.0


def test_several_servers_share_the_requests_and_one_that_failed_goes_to_the_next():
    with serving(judged) as (one, of_one), serving(judged) as (two, of_two):
        verifier = Verifier("http", url=(one, two), timeout=300.0)
        assert all(verifier.grade(QUESTION, "4").correct for _ in range(4))
        assert [len(of_one), len(of_two)] == [2, 2]
        with serving(lambda *_: (503, "busy")) as (down, _):
            for _ in range(2):
                assert shown(grades((down, one), tries=2)) == [("correct", 1.0), ("wrong", 0.1)]


BROKEN = {
    "an error of the server": (lambda *_: (500, "boom"), "error", "answered 500: 'boom'"),
    "a hung-up connection": (lambda *_: None, "error", "RemoteProtocolError"),
    "no JSON": (lambda *_: (200, "<html>"), "error", "answered what cannot be read"),
    "deeply nested JSON": (lambda *_: (200, "[" * 10**5 + "]" * 10**5), "error", "answered what cannot be read"),
    "too long": (
        lambda *_: (200, '{"rewards": [1, 1], "x": "' + "x" * 2**24 + '"}'),
        "error",
        "more than 16,777,216 bytes",
    ),
    "another dict": (lambda *_: (200, '{"reward": [1, 1]}'), "error", "a dict with 'rewards' is needed"),
    "too few": (lambda *_: (200, '{"rewards": [1]}'), "error", "1 rewards for 2 queries"),
    "too many": (lambda *_: (200, '{"rewards": [1, 1, 1]}'), "error", "3 rewards for 2 queries"),
    "a text": (lambda *_: (200, '{"rewards": ["1", "2"]}'), "error", "reward 1 of 2 is no finite number"),
    "no number": (lambda *_: (200, '{"rewards": [NaN, null]}'), "error", "reward 2 of 2 is no finite number"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_answers_of_a_broken_server_are_not_graded_and_the_log_says_why(name, caplog):
    reply, verdict, words = BROKEN[name]
    with serving(reply) as (url, bodies):
        assert shown(grades(url, tries=2)) == [(verdict, None)] * 2
        assert words in caplog.text
        assert url in caplog.text
        assert len(bodies) == (1 if "number" in words else 2), "what may pass is tried again"


def test_the_only_address_gets_again_what_it_was_late_with_but_not_what_it_refused(caplog):
    with serving(lambda *_: (422, '{"detail": "no labels"}')) as (url, bodies), serving(judged) as (other, _):
        assert shown(grades(url, tries=2)) == [("error", None)] * 2
        assert f"{url} answered 422: \"{{'detail': 'no labels'}}\"" in caplog.text
        assert len(bodies) == 1
        assert shown(grades((url, other), tries=2)) == [("correct", 1.0), ("wrong", 0.1)]
    release = threading.Event()
    with serving(lambda *_: release.wait(60) and None) as (url, bodies):
        assert shown(grades(url, timeout=0.3, tries=2)) == [("timeout", None)] * 2
        assert f"2 attempts failed, the last: {url} did not answer within 0.3 s" in caplog.text
        release.set()
    assert len(bodies) == 2


def test_a_server_that_is_too_slow_is_a_timeout():
    release = threading.Event()
    with serving(lambda *_: release.wait(60) and None) as (url, _):
        begun = time.monotonic()
        assert shown(grades(url, timeout=0.3)) == [("timeout", None)] * 2
        assert time.monotonic() - begun < 30
        release.set()


@contextmanager
def dribbling(answer: bytes):
    """A server that sends a byte every tenth of a second. Yields its address."""
    ended = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection:
            connection.recv(65536)
            for byte in answer:
                if ended.wait(0.1):
                    return
                try:
                    connection.send(bytes([byte]))
                except OSError:  # the client has gone
                    return

    def accept() -> None:
        while True:
            try:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("part", ["head", "body"])
def test_a_server_that_sends_a_byte_now_and_then_has_one_deadline(part):
    lines = b"HTTP/1.1 200 OK\r\n" + (b"x: y\r\n" * 99 if part == "head" else b"\r\n" + b" " * 999)
    with dribbling(lines) as url:
        begun = time.monotonic()
        assert shown(grades(url, timeout=0.7)) == [("timeout", None)] * 2
        assert time.monotonic() - begun < 40  # of the minute and more that it takes to send all


def test_no_message_has_the_user_the_password_or_the_query_of_an_address(caplog):
    caplog.set_level(logging.WARNING)
    with serving(lambda *_: (500, "boom")) as (url, _):
        private = url.replace("//", "//me:hidden@") + "?key=hidden"
        grades(private)
        assert f"{url} answered 500" in caplog.text
    with pytest.raises(NoGrader) as gone:
        Verifier("http", url=private, timeout=2.0).check_questions([QUESTION])
    with pytest.raises(ValueError, match="must be set") as unused:
        Verifier("exact", url=private)
    with pytest.raises(ValueError, match="is no address") as malformed:
        Verifier("http", url=private.replace("http", "htp"))
    for address in ("http://me:hid#den@host/x", "http://:5000/get_reward"):
        with pytest.raises(ValueError, match="is no address") as malformed:
            Verifier("http", url=address)
        assert "hid" not in str(malformed.value)
    with pytest.raises(ValueError, match="is no address: Port out of range"):
        Verifier("http", url="http://host:99999/get_reward")
    with pytest.raises(ValueError, match="must be set") as slash:
        Verifier("exact", url="http://me:hid/hidden@a.b/c")
    texts = [caplog.text, *(str(error.value) for error in (gone, unused, malformed, slash))]
    assert [text for text in texts if "hidden" in text] == []


def test_a_reward_beyond_a_million_or_a_score_without_a_number_is_refused_by_its_name(caplog):
    with serving(lambda *_: (200, '{"rewards": [1e7, 1, 1], "scores": [1, null, 1e7]}')) as (url, _):
        assert shown(grades(url, texts="456")) == [("error", None), ("error", None), ("correct", 1.0)]
    assert "reward 1 of 3 is no finite number, or beyond ±1,000,000: [10000000.0, 1, 1]" in caplog.text
    assert "score 2 of 3" in caplog.text
    assert caplog.text.count("[10000000.0, 1, 1]") == 1


def test_a_server_that_is_down_stops_a_run_before_anything_is_generated():
    with serving(lambda *_: (500, "")) as (url, _):
        Verifier("http", url=url).check_questions([QUESTION])
    with pytest.raises(NoGrader, match=r"Verifier\.url: no reward server answers \(http://127.0.0.1:\d+/get_reward: "):
        Verifier("http", url=url).check_questions([QUESTION])
