"""Workers whatever they answer: limits of each call, a server that is killed, closed while it loads, or cannot load."""

from __future__ import annotations

import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from signal import SIGKILL

import psutil
import pytest
from run_builders import wait_until

from exgrpo_orlhf.workers.fork_server import CallFailed, ForkServer, NotLoaded

FILE = """
import subprocess, time
def load(settings):
    time.sleep(settings["sleep"])
    return "loaded", answer
def answer(call):
    if call == "raise": raise KeyError("why")
    if call == "begin": return [subprocess.Popen(["sleep", "600"], start_new_session=own).pid for own in (0, 1)]
    time.sleep(call)
    return call
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    (tmp_path / "answers.py").write_text(FILE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    servers = []

    def server(sleep: float = 0.0) -> ForkServer:
        servers.append(ForkServer("answers:load", {"sleep": sleep, "memory": 256}, "Game.path = 'answers.py'"))
        return servers[-1]

    yield server
    for each in servers:
        each.close()


def ask(worker, *calls) -> None:
    worker.call(*map(pickle.dumps, calls))


@pytest.mark.slow
def test_each_of_several_calls_has_its_limit_and_a_failed_one_drops_those_behind_it(make):
    server = make()
    worker = server.worker()
    ask(worker, 2.0, 2.0, 2.0)
    assert [worker.reply(5.0) for _ in range(3)] == [2.0] * 3, "together longer than the limit"
    ask(worker, 0.0, "raise", 0.0)
    assert worker.reply(60) == 0.0
    with pytest.raises(CallFailed, match=r"^KeyError: 'why'$") as failure:
        worker.reply(60)
    assert (failure.value.verdict, failure.value.lost) == ("error", False)
    with pytest.raises(CallFailed, match="closed"):
        worker.reply(60)
    late = server.worker()
    ask(late, 0.0, 60.0)
    assert late.reply(60) == 0.0
    with pytest.raises(CallFailed, match=r"^no answer within 0.5 s \(Game.timeout\)$"):
        late.reply(0.5)


def test_what_a_worker_has_started_ends_with_it_in_whatever_session_and_that_of_others_goes_on(make):
    server = make()
    first, second = server.worker(), server.worker()
    started = []
    for worker in (first, second):
        ask(worker, "begin")
        started += worker.reply(60)
    first.close()
    wait_until(lambda: not any(map(psutil.pid_exists, started[:2])), seconds=60)
    assert all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in started[2:])
    server.close()
    wait_until(lambda: not any(map(psutil.pid_exists, started)), seconds=60)


def test_a_killed_server_costs_the_calls_under_way_and_the_next_worker_is_another_ones(make):
    server = make()
    worker = server.worker()
    ask(worker, 60.0)
    pid = server._process.pid
    os.kill(pid, SIGKILL)
    with pytest.raises(CallFailed, match="its process ended") as failure:
        worker.reply(60)
    assert failure.value.lost
    again = server.worker()  # at once
    ask(again, 0.0)
    assert again.reply(60) == 0.0
    assert server._process.pid != pid


def test_closing_does_not_wait_for_what_still_loads(make):
    server = make(sleep=1000.0)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(server.worker)
        wait_until(lambda: server._process is not None)
        begun = time.monotonic()
        server.close()
        assert time.monotonic() - begun < 30
        with pytest.raises(NotLoaded, match="its processes were closed"):
            waiting.result(600)
    with pytest.raises(NotLoaded, match="closed"):
        server.worker()


def test_check_loads_and_ends_the_process_again(make):
    server = make()
    assert server.try_loading() == "loaded"
    assert server._process is None
    with pytest.raises(NotLoaded, match=r"^Game.path = 'answers.py' cannot be used: KeyError: 'sleep'$"):
        ForkServer("answers:load", {"memory": 256}, "Game.path = 'answers.py'").try_loading()
