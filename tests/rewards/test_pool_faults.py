"""The grading pool when a user's function misbehaves, and a verifier's failures: the fast tests of both."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from dataclasses import replace

import numpy as np
import pytest

from exgrpo_orlhf.grader.answer import Answer
from exgrpo_orlhf.grader.grade import Grade
from exgrpo_orlhf.records import Question, Rollout, RolloutGroup
from exgrpo_orlhf.rewards import GradingError, NoGrader, Verifier
from exgrpo_orlhf.rewards.pool import Pool
from exgrpo_orlhf.workers import fork_server
from exgrpo_orlhf.workers.fork_server import close_workers

FUNCTION = """
import gc, os, socket, time

def reward_func(queries, prompts, labels):
    query = queries[0]
    if "spin" in query:
        while True: pass
    if "exit" in query: os._exit(3)
    if "abort" in query: os.abort()
    if "print" in query: print("noise", flush=True); os.write(1, b"more")
    if "eat" in query: bytearray(8 * 2**30)
    if "kill" in query: os.kill(os.getpid(), 9)
    if "fork" in query: os.fork()  # and both return
    if "zero" in query:  # a reply of its own, of no bytes
        next(each for each in gc.get_objects() if isinstance(each, socket.socket) and each.fileno() >= 0).send(b"0")
    if "note" in query: open(query.split()[-1], "a").write(query + "\\n")
    if "raise" in query:
        raise KeyError("inside")
    return {"rewards": [0.5 * (labels[0] in query)]}
"""
WAIT = 300  # seconds, only against waiting for ever


@pytest.fixture(scope="module")
def pool(function):
    one = Pool({"kind": "function", "function": function, "success_at": 0.5, "memory": 512}, 60.0, 1)
    yield one
    one.close()


def grade(pool: Pool, *responses: str) -> list[Grade]:
    return [each.result(WAIT) for each in pool.submit([Answer("42", response) for response in responses])]


def verdicts(pool: Pool, *responses: str) -> list[str]:
    return [graded.verdict for graded in grade(pool, *responses)]


def test_a_broken_answer_costs_no_other_its_verdict_and_the_order_stays(pool):
    responses = ["42", "exit", "no", "print 42", "abort", "eat", "raise", "42", "no"]
    graded = grade(pool, *responses)
    rewards = [0.5, None, 0.0, 0.5, None, None, None, 0.5, 0.0]  # the function's own
    assert [each.reward for each in graded] == rewards
    verdicts = {None: "error", 0.0: "wrong", 0.5: "correct"}
    assert [each.verdict for each in graded] == [*map(verdicts.get, rewards)]
    assert [each.reason for each in graded if each.reason] == [
        "its process ended: exit status 3",
        "its process ended: killed by SIGABRT",
        "its process ended: out of memory (Verifier.memory)",
        "reward.py, line 18: KeyError: 'inside'",
    ]


@pytest.mark.slow
def test_an_answer_is_killed_at_its_limit_and_those_behind_it_are_graded(function):
    short = Pool({"kind": "function", "function": function, "success_at": 0.5, "memory": 513}, 0.5, 1)
    [future, *others] = short.submit([Answer("42", response) for response in ("spin", "42", "no")])
    assert future.result(WAIT).verdict == "timeout"
    assert "no answer within 0.5 s (Verifier.timeout)" in future.result().reason
    assert [each.result(WAIT).verdict for each in others] == ["correct", "wrong"]
    [again] = short.submit([Answer("42", "spin")], times=2)
    assert "no answer within 1 s" in again.result(WAIT).reason
    short.close()
    with pytest.raises(GradingError, match="closed"):
        short.submit([Answer("42", "42")])


@pytest.mark.parametrize(
    ("response", "reason"),
    [("kill", "broke down 3 times: its process ended: killed by SIGKILL"), ("zero 42", "cannot be read")],
    ids=["loses three processes", "a reply that is none"],
)
def test_an_answer_that_cannot_be_graded_is_given_up(response, reason, pool):
    graded = grade(pool, response, "42")
    assert [each.verdict for each in graded] == ["error", "correct"]
    assert reason in graded[0].reason


def test_a_function_that_forks_and_returns_twice_shifts_no_verdict(pool, tmp_path):
    notes = tmp_path / "notes"
    responses = [f"fork 42 note {notes}", "no", "42", "no", "42", "no"]
    for _ in range(3):
        assert verdicts(pool, *responses) == ["correct", "wrong"] * 3
    assert verdicts(pool, "no", "42") == ["wrong", "correct"], "and no fork of an answer takes the next ones"


def test_a_cancelled_answer_is_not_graded(function, tmp_path):
    notes = tmp_path / "notes"
    idle = Pool({"kind": "function", "function": function, "success_at": 0.5, "memory": 514}, 60.0, 1)
    futures = idle.submit([Answer("42", f"{i} note {notes}") for i in range(40)])
    cancelled = [future.cancel() for future in futures]
    for future, gone in zip(futures, cancelled, strict=True):
        if gone:
            with pytest.raises(CancelledError):
                future.result(WAIT)
    assert verdicts(idle, "42") == ["correct"]
    assert len(notes.read_text().splitlines() if notes.exists() else []) < 40
    idle.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import time\ntime.sleep(1000)", "it was not loaded within 1 s"),
        ("import os\nos._exit(0)", "its process ended while it was loaded"),
    ],
)
def test_the_first_failed_start_fails_the_pool(tmp_path, monkeypatch, source, message):
    """Not each answer, three times each."""
    if "sleep" in source:
        monkeypatch.setattr(fork_server, "START_TIMEOUT", 1.0)
    path = tmp_path / "hangs.py"
    path.write_text(source)
    verifier = Verifier("function", function=str(path))
    starts = []
    start = fork_server.ForkServer._start
    monkeypatch.setattr(fork_server.ForkServer, "_start", lambda self: (starts.append(1), start(self))[1])
    with pytest.raises(NoGrader, match=message):
        verifier.grade_all([(Question.make("t", "", "42"), str(i)) for i in range(2)])
    assert len(starts) <= verifier.graders().workers
    with pytest.raises(NoGrader, match=message):
        verifier.check_questions([])
    close_workers()


# -- the verifier ------------------------------------------------------------------------------------------------------


def test_the_same_answer_to_other_options_is_another_one():
    right, other = (Question.make("t", "", "B", {"options": o}) for o in (["Rome", "Paris"], ["Paris", "Rome"]))
    grades = Verifier("choice").grade_all([(each, "\\boxed{Paris}") for each in (right, other, right)])
    assert [grade.correct for grade in grades] == [True, False, True]


def test_too_many_failures_stop_training_and_earlier_rounds_count(function):
    """A late round of few groups is no sample of its own."""
    verifier = Verifier("function", function, success_at=0.5, memory=516, workers=1, max_failed_share=0.25)

    def graded(failures: list[int], earlier: list[RolloutGroup]) -> list[RolloutGroup]:
        rollouts = tuple(Rollout(np.array([k], np.int32), "stop") for k in range(4))
        groups = [RolloutGroup(Question.make("t", "", "42", {"n": n}), rollouts, False) for n in failures]
        fails = iter([k < n for n in failures for k in range(4)])
        return verifier.grade_groups(groups, lambda _, four: ["raise" if next(fails) else "42" for _ in four], earlier)

    one = graded([1], [])
    assert [rollout.grade.verdict for rollout in one[0].rollouts] == ["error", "correct", "correct", "correct"]
    assert one[0].accuracy == 1, "what could not be graded does not count"
    with pytest.raises(GradingError, match=r"2 of 4 answers .* \(0 timeouts, 2 errors\).*max_failed_share"):
        graded([2], [])
    late = graded([2], graded([0], []))  # 2 of 8
    assert [rollout.grade.verdict for rollout in late[0].rollouts] == ["error", "error", "correct", "correct"]
    with pytest.raises(GradingError, match="3 of 8"):
        graded([2], one)
    ungraded = replace(one[0], rollouts=tuple(replace(each, grade=None) for each in one[0].rollouts))
    with pytest.raises(GradingError, match="2 of 4"):
        graded([2], [ungraded])


class Scripted:
    """Stands for a pool: what each answer gives at its first and at its second try."""

    def __init__(self, **results: tuple[str, str]) -> None:
        self.results, self.sent = results, []

    def submit(self, answers, times=1.0, together=False):
        futures = []
        for answer in answers:
            self.sent.append((answer.gold, answer.response, times))
            verdict = "wrong"
            if answer.gold == "unreadable":
                verdict = "timeout"
            elif answer.response in self.results:
                verdict = self.results[answer.response][times > 1]
            future: Future = Future()
            future.set_result(Grade(verdict, {"correct": 1.0, "wrong": 0.0}.get(verdict)))
            futures.append(future)
        return futures


@pytest.mark.parametrize("kind", ["math", "math_verify"])
def test_what_its_response_makes_ungradable_is_wrong_after_a_second_try_in_twice_the_time(monkeypatch, kind):
    pool = Scripted(slow=("timeout", "correct"), hard=("timeout", "timeout"), huge=("error", "error"))
    monkeypatch.setattr(Verifier, "graders", lambda self: pool)
    verifier = Verifier(kind, max_failed_share=1.0)
    pairs = [("5", "slow"), ("5", "hard"), ("5", "huge"), ("5", "fine"), ("unreadable", "other")]
    grades = verifier.grade_all([(Question.make("t", kind, gold), response) for gold, response in pairs])
    assert grades == [Grade("correct", 1.0), *[Grade("wrong", 0.0)] * 3, Grade("timeout", None)]
    again = [("5", "slow", 2), ("5", "hard", 2), ("5", "huge", 2), ("unreadable", "other", 2)]
    assert [sent for sent in pool.sent if sent[2] == 2 and "\\boxed" not in sent[1]] == again


@pytest.mark.parametrize(
    ("settings", "gold", "reason"),
    [
        ({"kind": "modular_chain"}, "2", "not a modular chain"),
        ({"kind": "word_problem"}, "1/2", "not a word problem"),
        pytest.param({"kind": "math"}, "\\boxed{", "the gold answer .* is empty", marks=pytest.mark.slow),
        pytest.param({"kind": "choice"}, "Paris", "the gold 'Paris' is no option", marks=pytest.mark.slow),
        pytest.param({"rewards": {"exact": 1.0, "choice": 0.5}}, "Paris", "is no option", marks=pytest.mark.slow),
    ],
)
def test_a_gold_answer_that_cannot_be_graded_against_is_refused_before_a_run(settings, gold, reason):
    questions = [Question.make("own", "1+1?", gold)] * 2
    kind = settings.get("kind", "choice")
    with pytest.raises(ValueError, match=rf"the question '1\+1\?' of 'own', Verifier.kind = '{kind}': .*{reason}"):
        Verifier(**settings, workers=1).check_questions(questions)


def test_few_gold_answers_that_cannot_be_graded_against_are_logged_with_one_of_them(caplog):
    questions = [Question.make("own", "1+1?", gold) for gold in ("1", "2", "3", "\\boxed{")]
    Verifier("math", workers=1).check_questions(questions)
    assert "1 of 4 gold answers cannot be graded against: the question '1+1?' of 'own'" in caplog.text
