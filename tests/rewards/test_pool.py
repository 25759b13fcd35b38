"""The pool: a limit for each answer, from any thread, with nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from run_builders import python, wait_until

from exgrpo_orlhf.grader.answer import Answer
from exgrpo_orlhf.grader.grade import Grade
from exgrpo_orlhf.records import Question, Rollout, RolloutGroup
from exgrpo_orlhf.rewards import GradingError, Verifier
from exgrpo_orlhf.rewards.pool import Pool
from exgrpo_orlhf.sampling import EngineLost

pytestmark = pytest.mark.slow

FUNCTION = """
import time
def reward_func(queries, prompts, labels):
    query = queries[0]
    if "sleep" in query: time.sleep(60)
    if "nap" in query: time.sleep(1)
    if "note" in query: open(query.split()[-1], "a").write(query + "\\n")
    assert prompts[0] == "p:" and query.startswith("p:"), (queries, prompts)
    return {"rewards": [0.5 if labels[0] in query else 0.0], "scores": [float(labels[0] in query)]}
def swallows(queries, prompts, labels):
    blocks = []
    try:
        for i in range(int(queries[0].removeprefix("p:"))): blocks.append(bytearray(2**20))
    except MemoryError: pass
    return 0.0
"""
QUESTION = Question.make("test", "p:", "42")
ANSWERS = [
    ("42", "\\boxed{42}"),
    ("42", "\\boxed{41}"),
    ("\\frac{x+1}{2}", "\\boxed{\\frac12 + \\frac{x}{2}}"),
    ("7", ""),
]
VERDICTS = ["correct", "wrong", "correct", "no_answer"]


@pytest.fixture
def verifier(function) -> Verifier:
    return Verifier("function", function=function, timeout=60.0, memory=512, max_failed_share=1.0)


def processes(pool: Pool) -> list[int]:
    """Of a pool: its server and the workers."""
    if (server := pool.server._process) is None:
        return []
    workers = subprocess.run(["pgrep", "-P", str(server.pid)], capture_output=True, text=True).stdout.split()
    return [server.pid, *map(int, workers)]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # empty for a zombie
    except OSError:
        return False


def grade(pool: Pool, responses: Sequence[str]) -> list[Grade]:
    return [future.result() for future in pool.submit([Answer("42", text, "p:") for text in responses])]


def verdicts(pairs=ANSWERS) -> list[str]:
    answers = [(Question.make("test", "", gold), response) for gold, response in pairs]
    return [grade.verdict for grade in Verifier("math").grade_all(answers)]


def test_the_same_verdicts_from_the_main_thread_any_thread_and_asyncio():
    assert verdicts() == VERDICTS
    answers = [[(gold, f"{response}{' ' * i}")] for i in range(8) for gold, response in ANSWERS]

    async def in_asyncio():
        return await asyncio.gather(*(asyncio.to_thread(verdicts, each) for each in answers))

    assert [each for (each,) in asyncio.run(in_asyncio())] == VERDICTS * 8
    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(verdicts, [[(gold, f"\n{response}") for gold, response in ANSWERS]])] == [VERDICTS]


def test_the_same_verdicts_in_ray():
    pytest.importorskip("ray")
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    code = textwrap.dedent("""
        import asyncio, json, os, ray
        ray.init(num_cpus=2, include_dashboard=False, logging_level="error",
                 runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}})
        from test_pool import verdicts
        @ray.remote
        def task(): return verdicts()
        @ray.remote
        class Actor:
            async def direct(self): return verdicts()
            async def threaded(self): return await asyncio.to_thread(verdicts)
        actor = Actor.remote()
        print(json.dumps(ray.get([task.remote(), actor.direct.remote(), actor.threaded.remote()], timeout=600)))
    """)
    done = python("-c", code, env={"PYTHONPATH": path}, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.strip().split("\n")[-1]) == [VERDICTS] * 3


PATHOLOGICAL = {
    "tower": "\\boxed{9^{9^{9^9}}}",
    "python tower": "9**9**9**9",
    "factorial": "\\boxed{999999999!}",
    "brackets": f"\\boxed{{{'(' * 5000}1{')' * 5000}}}",
    "bare brackets": "(" * 5000,
    "digits": f"\\boxed{{{'1' * 100_000}}}",
    "letters": "x" * 100_000,
    "fractions": "\\boxed{" + "\\frac{1}{" * 3000 + "1" + "}" * 3001,
    "boxes": "\\boxed{" * 20_000,
    "closed boxes": "\\boxed{" * 9000 + "1" + "}" * 9000,
    "dollars": "$" * 100_000,
    "NUL": "\\boxed{\x00}" + "\x00" * 99_999,
    "surrogates": "\\boxed{\ud800\udfff}",
    "thoughts": "<think></think>" * 9000,
    "statements": "the answer is " * 7000,
    "spaces": " " * 100_000,
    "sums": "\\boxed{" + "1+" * 50_000 + "1}",
    "product": "\\boxed{\\prod_{k=1}^{10^{8}} (k+1)}",
    "binomial": "\\boxed{\\binom{10^{9}}{5\\cdot 10^{8}}}",
    "code": "\\boxed{__import__('os').system('touch pwned')}",
    "integral": "\\boxed{\\int_0^1 e^{x^{x^{x}}} \\sin(x^5) dx}",
    "powers": "\\boxed{(x+y+z+w+1)^{199}}",
    "carets": f"\\boxed{{{'2^' * 500}2}}",
    "commas": "\\boxed{" + "1," * 2000 + "1}",
    "numbers": "12,345 " * 14_000,
    "matrix": "\\boxed{\\begin{pmatrix}" + "1&" * 2000 + "1\\end{pmatrix}}",
}


def test_pathological_answers_return_in_time_and_the_pool_lives():
    verifier = Verifier("math", timeout=3.0, max_failed_share=1.0)
    for gold in ("5", "x^2+1=0"):
        question = Question.make("test", "", gold)
        assert verifier.grade(question, f"\\boxed{{{gold}}} ").correct
        for name, response in PATHOLOGICAL.items():
            begun = time.monotonic()
            grade = verifier.grade(question, response)
            assert time.monotonic() - begun < 30, name
            assert not grade.correct, name
        assert verifier.grade(question, f"\\boxed{{{gold}}}  ").correct
    assert not Path("pwned").exists()


def test_memory_is_bounded_also_where_the_error_is_swallowed(function):
    """sympy and math-verify catch MemoryError like any other: what then comes out is no verdict."""
    verifier = Verifier("function", function=f"{function}:swallows", memory=300, max_failed_share=1.0)
    assert verifier.grade(QUESTION, "200").verdict == "wrong"
    assert verifier.grade(QUESTION, "295").verdict == "error"
    assert verifier.grade(QUESTION, "20").verdict == "wrong"


def group(number: int) -> RolloutGroup:
    question = Question.make("test", "p:", f"42, the {number}th")
    return RolloutGroup(question, tuple(Rollout(np.array([number, k], np.int32), "stop") for k in range(2)), False)


def test_a_group_is_graded_while_others_have_not_come(verifier, tmp_path):
    """The last one comes only when the answers of the first have been graded."""
    notes = tmp_path / "notes"

    def coming():
        yield group(7)
        wait_until(lambda: notes.exists() and notes.read_text().count("\n") == 2)
        yield group(3)

    written = lambda _, several: [f"note {one.token_ids[0]}.{one.token_ids[1]} {notes}" for one in several]
    graded = verifier.grade_groups(coming(), written)
    assert [int(each.rollouts[0].token_ids[0]) for each in graded] == [7, 3]
    assert sorted(line.split()[1] for line in notes.read_text().splitlines()) == ["3.0", "3.1", "7.0", "7.1"]
    assert all(rollout.grade.verdict == "wrong" for each in graded for rollout in each.rollouts)


def test_the_same_answer_to_the_same_gold_is_graded_once(monkeypatch):
    sent = []
    submit = Pool.submit
    monkeypatch.setattr(
        Pool, "submit", lambda self, answers, **how: (sent.extend(answers), submit(self, answers, **how))[1]
    )
    questions = [Question.make("test", prompt, "778899") for prompt in ("a", "b")]
    rollouts = tuple(Rollout(np.array([k], np.int32), "stop") for k in range(2))
    groups = (RolloutGroup(each, rollouts, False) for each in questions)
    verifier = Verifier("math")
    written = lambda _, several: [f"\\boxed{{778899}}{' ' * int(one.token_ids[0])}" for one in several]
    graded = verifier.grade_groups(groups, written)
    assert all(rollout.grade.correct for each in graded for rollout in each.rollouts)
    assert len(sent) == 2, "four rollouts, two answers"
    assert not verifier.grade(Question.make("test", "a", "998877"), "\\boxed{778899}").correct


def test_groups_that_cannot_come_end_the_grading_of_those_that_wait(function, tmp_path):
    one = Verifier("function", function=function, workers=1, memory=516, max_failed_share=1.0)
    notes = tmp_path / "notes"

    def coming():
        yield group(0)
        wait_until(notes.exists)
        for number in range(1, 20):
            yield group(number)
        raise EngineLost("the engine died")

    def written(_, several):
        first = [int(each.token_ids[0]) for each in several]
        return [f"nap {token} note {notes}" if token else f"note 0 {notes}" for token in first]

    with pytest.raises(EngineLost):
        one.grade_groups(coming(), written)
    assert one.grade(QUESTION, "42").correct, "the pool lives, and has nothing else to do"
    assert notes.read_text().count("nap") < 5, "of 38"


def test_a_grader_that_cannot_be_loaded_ends_it_before_all_groups_have_come(function):
    Path(f"{function}.wrong.py").write_text("1 / 0")
    broken = Verifier("function", function=f"{function}.wrong.py")
    end = time.monotonic() + 200  # a worker has 180 s to start

    def coming():
        while time.monotonic() < end:
            yield group(0)
            time.sleep(0.01)

    with pytest.raises(GradingError, match="ZeroDivisionError"):
        broken.grade_groups(coming(), lambda _, several: ["42"] * len(several))
    assert time.monotonic() < end


def test_closing_ends_all_processes_and_waiting_callers(function):
    pool = Pool({"kind": "function", "function": function, "success_at": 1.0, "memory": 512}, 60.0, 2)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(grade, pool, ["sleep"] * 8)
        wait_until(lambda: len(processes(pool)) == 3)  # the server and two workers
        before = processes(pool)
        pool.close()
        with pytest.raises(GradingError, match="the pool of grading processes was closed"):
            waiting.result(600)
    wait_until(lambda: not any(map(lives, before)))


def test_a_forked_process_makes_a_pool_of_its_own(verifier):
    verifier.grade(QUESTION, "42")
    child = os.fork()
    if child == 0:
        os._exit(0 if verifier.grade(QUESTION, "42").correct else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pickle.loads(pickle.dumps(verifier)).grade(QUESTION, "42").correct, "and the parent's own lives"
