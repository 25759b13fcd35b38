"""Episodes of environments: users' files run unchanged, and a broken episode costs no other anything."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from run_builders import BUILDERS

from exgrpo_orlhf.environments import Environment, Reply
from exgrpo_orlhf.workers.fork_server import CallFailed, Worker, close_workers

# By the action: what a broken environment does.
BROKEN = """
import asyncio, gc, os, random, signal, socket, subprocess, sys, time
import numpy as np

class Env:
    def __init__(self): self.first = random.random()
    def reset(self, states):
        self.rng = self.first, random.random(), np.random.rand(), list({"a", "b", "c", "d"})
        return {"observation": str(self.rng)}

    def step(self, states):
        action = states["action_text"]
        result = {"rewards": 1, "environment_feedback": "more", "done": np.bool_(False)}
        if action == "spin":
            while True: pass
        if action == "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        if action == "exit": os._exit(3)
        if action == "sys.exit": sys.exit("bye")
        if action == "kill": os.kill(os.getpid(), 9)
        if action == "eat": bytearray(8 * 2**30)
        if action == "raise": return 1 / 0
        if action == "several\\nlines": raise KeyError("one\\ntwo\\n" + "x" * 10**6)
        if action == "none": return None
        if action == "noise":
            for each in gc.get_objects():
                if isinstance(each, socket.socket) and each.fileno() >= 0: each.send(b"no reply")
        if action == "child":
            result["environment_feedback"] = str(subprocess.Popen(["sleep", "1000"]).pid)
        if action == "echo": result["environment_feedback"] = states["observation_text"]
        if action.startswith("result"): exec(action)
        return result
"""
WAIT = 600.0  # seconds, only against waiting for ever


def environment(tmp_path: Path, source: str, **settings) -> Environment:
    path = tmp_path / "game.py"
    path.write_text(source)
    return Environment(str(path), **{"timeout": WAIT, **settings})


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    yield environment(tmp_path_factory.mktemp("environments"), BROKEN, memory=256)
    close_workers()


def ask(episode: Worker, **states) -> None:
    episode.call(pickle.dumps(states))


def begin(environment: Environment, seed: int = 0, **states) -> Worker:
    episode = environment.server().worker()
    ask(episode, observation="6*7?", label="42", seed=seed, **states)
    return episode


def act(episode: Worker, action: str, **states) -> Reply:
    ask(episode, **{"observation_text": "", "action_text": action, "label": "42", **states})
    return episode.reply(WAIT)


def ended(pid: int) -> bool:
    """Whether a process is gone or a zombie, after a minute at most."""
    for _ in range(6000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("answers", [("#41", "it is #42"), ("#41", "no", "#43")], ids=["right", "three times wrong"])
def test_a_file_of_openrlhf_runs_unchanged_over_several_turns(answers, capfd):
    episode = begin(Environment(str(BUILDERS / "agent_file.py"), timeout=WAIT))
    assert episode.reply(WAIT) == Reply("6*7?")
    replies = [act(episode, answer) for answer in answers]
    close_workers()
    right, n = "#42" in answers[-1], len(answers)
    assert replies[:-1] == [Reply("6*7?", False, 0.0, 0.0, (("turns", float(i)),)) for i in range(1, n)]
    assert replies[-1] == Reply("6*7?", True, float(right), 2.0 * right, (("turns", float(n)),))
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "turn 1" in printed.err


def test_one_loop_serves_all_turns_of_an_async_class_and_each_episode_has_an_instance(tmp_path):
    source = (
        "import asyncio\n"
        "class Game:\n"
        "    turns = []\n"
        "    async def reset(self, states):\n"
        "        self.queue = asyncio.Queue()\n"
        "        self.task = asyncio.create_task(self.fill())\n"
        "        return {'observation': states['observation']}\n"
        "    async def fill(self):\n"
        "        for i in range(9):\n"
        "            await self.queue.put(i)\n"
        "            await asyncio.sleep(0)\n"
        "    async def step(self, states):\n"
        "        self.turns.append(await self.queue.get())\n"
        "        return {'rewards': [1.0], 'environment_feedback': str(self.turns), 'done': False}\n"
    )
    one = environment(tmp_path, source)
    one.check_file()
    for _ in range(2):
        episode = begin(one)
        assert episode.reply(WAIT) == Reply("6*7?")
        assert [act(episode, "").observation for _ in range(2)] == ["[0]", "[0, 1]"]
        episode.close()
    close_workers()


def test_an_edited_environment_is_played_by_the_next_run(tmp_path):
    source = "class Own:\n    def reset(self, states): return {'observation': states['observation'] + '%s'}\n"
    source += "    def step(self, states): return {'rewards': 1.0, 'environment_feedback': '', 'done': True}\n"
    for added in ("a", "b"):
        one = environment(tmp_path, source % added)
        assert begin(one).reply(WAIT) == Reply(f"6*7?{added}")


def test_the_same_seed_gives_the_same_episode_in_another_process_too(broken):
    first, second, other = (begin(broken, seed).reply(WAIT).observation for seed in (7, 7, 8))
    assert first == second != other
    close_workers()
    assert begin(broken, 7).reply(WAIT).observation == first


FAULTS = {
    "exit": "its process ended: exit status 3",
    "kill": "its process ended: killed by SIGKILL",
    "eat": "out of memory (Environment.memory)",
    "sys.exit": "game.py, line 20: SystemExit: bye",
    "raise": "game.py, line 23: ZeroDivisionError: division by zero",
    "several\nlines": "game.py, line 24: KeyError: 'one\\ntwo\\nxxx",
    "noise": "no reply",
    "none": "game.py: step returned None; expected a dict with 'rewards', 'environment_feedback', 'done'",
    "del result['rewards']": "step returned no 'rewards'; expected a dict with 'rewards', 'environment_feedback',",
    "result.clear()": "step returned no 'rewards', 'environment_feedback', 'done'; expected",
    "result.pop('done')": "step returned no 'done'; expected",
    "result['rewards'] = None": "step returned 'rewards' = None; expected one finite number",
    "result['rewards'] = '1'": "step returned 'rewards' = '1'; expected one finite number",
    "result['rewards'] = float('nan')": "step returned 'rewards' = nan; expected one finite number",
    "result['rewards'] = -np.inf": "step returned 'rewards' = -inf; expected one finite number",
    "result['rewards'] = np.ones(2)": "step returned 'rewards' = array([1., 1.]); expected one finite number",
    "result['scores'] = 'high'": "step returned 'scores' = 'high'; expected one finite number",
    "result['environment_feedback'] = b'x'": "step returned 'environment_feedback' = b'x'; expected text",
    r"result['environment_feedback'] = '\udcff'": "step returned 'environment_feedback' with half a surrogate pair",
    "result['done'] = 'no'": "step returned 'done' = 'no'; expected True or False",
    "result['environment_images'] = [1]": "step returned 'environment_images': images are not supported",
}


@pytest.mark.parametrize("action", FAULTS)
def test_a_broken_episode_fails_with_its_line_and_others_go_on(broken, action):
    other, episode = begin(broken), begin(broken)
    other.reply(WAIT)
    episode.reply(WAIT)
    with pytest.raises(CallFailed) as failure:
        act(episode, f"result; {action}" if action.startswith("del") else action)
    assert failure.value.verdict == "error"
    assert FAULTS[action] in str(failure.value)
    assert "\n" not in failure.value.reason
    assert len(failure.value.reason) <= 400
    with pytest.raises(CallFailed, match="closed"):
        act(episode, "more")
    assert act(other, "more") == Reply("more", False, 1.0)
    other.close()


def test_a_step_that_hangs_is_killed_at_its_deadline(broken):
    other, episode = begin(broken), begin(broken)
    for each in (other, episode):
        each.reply(WAIT)
    start = time.monotonic()
    ask(episode, action_text="ignore")
    assert act(other, "more") == Reply("more", False, 1.0)
    assert not episode.ready(WAIT)
    with pytest.raises(CallFailed, match=r"^no answer within 1 s \(Environment.timeout\)$") as failure:
        episode.reply(1.0)
    assert failure.value.verdict == "timeout"
    assert 1.0 <= time.monotonic() - start < WAIT
    assert episode.ready(1.0)
    assert act(other, "more") == Reply("more", False, 1.0)
    other.close()


def test_megabytes_pass_in_both_directions_and_a_hung_episode_takes_them_without_blocking(broken):
    text = "x" * 5_000_000
    episode = begin(broken, text=text)
    episode.reply(WAIT)
    assert act(episode, "echo", observation_text=text).observation == text
    ask(episode, action_text="spin")
    start = time.monotonic()
    for _ in range(20):
        ask(episode, action_text=text)
    assert time.monotonic() - start < 60  # it hangs for ever
    episode.close()


@pytest.mark.slow
def test_two_hundred_episodes_at_once(broken):
    close_workers()
    with ThreadPoolExecutor(4) as threads:  # which end while the episodes go on
        episodes = [*threads.map(lambda seed: begin(broken, seed), range(200))]
    waiting, replies = {*episodes}, {}
    while waiting:
        for each in wait(waiting, timeout=WAIT):
            assert each.ready(WAIT)
            replies[each] = each.reply(WAIT).observation
            waiting.discard(each)
    assert len({*replies.values()}) == 200, "each has its seed"
    for each in episodes:
        ask(each, action_text="more")
    assert {each.reply(WAIT) for each in episodes} == {Reply("more", False, 1.0)}
    for each in episodes:
        each.close()
        each.close()


def test_the_time_until_a_process_begins_is_not_the_reset_s(broken):
    """With hundreds of episodes the last fork comes late."""
    begin(broken).close()
    pid = broken.server()._process.pid
    os.kill(pid, signal.SIGSTOP)
    episode = begin(broken)
    time.sleep(1.2)
    assert not episode.ready(1.0)
    os.kill(pid, signal.SIGCONT)
    assert episode.reply(WAIT).observation
    episode.close()


def test_close_kills_what_an_episode_left_behind(broken):
    episodes = [begin(broken) for _ in range(3)]
    for each in episodes:
        each.reply(WAIT)
    pids = [int(act(each, "child").observation) for each in episodes]
    episodes[0].close()
    assert ended(pids[0])
    with pytest.raises(CallFailed):
        act(episodes[1], "exit")
    assert ended(pids[1])
    assert Path(f"/proc/{pids[2]}").exists()
    close_workers()
    assert ended(pids[2])


@pytest.mark.slow
def test_no_process_is_left_when_the_caller_ends_or_is_killed(broken):
    source = (
        "import os, pickle, sys\nfrom exgrpo_orlhf.environments import Environment\n"
        f"server = Environment({broken.path!r}).server()\n"
        "episode = server.worker()\nepisode.call(pickle.dumps({'seed': 0}))\nepisode.reply(600)\n"
        "episode.call(pickle.dumps({'action_text': 'child'}))\n"
        "print(server._process.pid, episode.reply(600).observation, flush=True)\n"
        "episode.call(pickle.dumps({'action_text': 'spin'}))\n"
        "os.kill(os.getpid(), 9) if sys.argv[1] == 'killed' else None\n"
    )
    for way in ("ends", "killed"):
        done = subprocess.run([sys.executable, "-c", source, way], capture_output=True, text=True, timeout=WAIT)
        pids = [int(pid) for pid in done.stdout.split()]
        assert len(pids) == 2, done.stderr
        assert all(map(ended, pids)), way
