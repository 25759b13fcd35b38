"""Grading processes are killed, again and again, while they are busy: no verdict is wrong, and none fails to come."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections import Counter
from contextlib import suppress
from signal import SIGKILL

import pytest

from exgrpo_orlhf.grader.answer import Answer
from exgrpo_orlhf.rewards.pool import _TRIES, Pool

pytestmark = pytest.mark.slow

FUNCTION = """
import time
def reward_func(queries, prompts, labels):
    number, notes = queries[0].split()
    with open(notes, "a") as file:
        file.write(number + "\\n")
    time.sleep(0.1)
    return float(int(number) % 3 > 0)
"""
ANSWERS, KILLS, WORKERS = 150, 40, 2


@pytest.mark.parametrize("victims", ["the workers", "their server", "both"])
def test_a_storm_of_kills_while_busy_costs_no_verdict_but_those_that_are_given_up(victims, tmp_path):
    """An answer is given up after it lost three processes, and says so."""
    (tmp_path / "reward.py").write_text(FUNCTION)
    notes = tmp_path / "notes"
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, done, kills = random.Random(seed), threading.Event(), []
    settings = {"kind": "function", "function": str(tmp_path / "reward.py"), "success_at": 1.0, "memory": 512}
    pool = Pool(settings, timeout=60.0, workers=WORKERS)

    def storm() -> None:
        while len(kills) < KILLS and not done.is_set():
            time.sleep(rng.uniform(0, 0.3))
            server = pool.server._process
            workers = server and subprocess.run(["pgrep", "-P", str(server.pid)], capture_output=True).stdout.split()
            if not workers:
                continue
            victim = rng.choice(workers)
            one = victims == "the workers" or (victims == "both" and rng.random() < 0.5)
            with suppress(ProcessLookupError):
                os.kill(int(victim) if one else server.pid, SIGKILL)
                kills.extend([victim] if one else workers)  # a server's workers die with it

    killer = threading.Thread(target=storm)
    futures = pool.submit([Answer("42", f"{i} {notes}", "") for i in range(ANSWERS)])
    killer.start()
    try:
        grades = [future.result(timeout=900) for future in futures]  # only against waiting for ever
    finally:
        done.set()
        killer.join()
    failures = [graded for graded in grades if graded.verdict == "error"]
    for i, graded in enumerate(grades):
        if graded.verdict == "error":
            assert graded.reward is None
            assert "broke down 3 times" in graded.reason or "killed by SIGKILL" in graded.reason, graded.reason
        else:
            assert graded.verdict == ("correct" if i % 3 else "wrong"), (i, graded)
    tries = Counter(map(int, notes.read_text().split()))
    again = sum(tries.values()) - len(tries)
    print(f"{len(kills)} kills, {again} of them at an answer's grading, {len(failures)} answers given up")
    assert again >= 5, "the kills hit no busy process"
    assert _TRIES == 3
    assert _TRIES * len(failures) <= len(kills)
    [after] = pool.submit([Answer("42", f"1 {notes}", "")])
    assert after.result(timeout=900).verdict == "correct", "the pool lives"
    pool.close()
