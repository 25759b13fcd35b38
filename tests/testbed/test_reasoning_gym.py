"""reasoning-gym: its tasks as questions, its checkers as a verifier."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
from run_builders import python

from exgrpo_orlhf.grader.answer import Answer
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.rewards import Verifier
from exgrpo_orlhf.testbed.reasoning_gym import SOURCE, ReasoningGym
from exgrpo_orlhf.workers.fork_server import close_workers

pytest.importorskip("reasoning_gym", reason="make reasoning-gym")
SMALL = {"min_terms": 2, "max_terms": 3, "max_digits": 1}


def test_questions_are_distinct_the_same_every_time_and_of_one_split_each():
    train, validation = (ReasoningGym("chain_sum", SMALL, 40, split=split) for split in ("train", "validation"))
    questions = train.load()
    assert questions == train.load() == [Question.make(q.source, q.prompt, q.answer) for q in questions]
    assert len({question.prompt for question in questions}) == 40
    other = [*replace(validation, seed=5).load(), *validation.load()]
    assert {q.prompt for q in other}.isdisjoint(
        q.prompt for q in [*questions, *replace(train, seed=9, count=80).load()]
    )


def test_a_mixture_has_its_shares_and_each_task_its_settings():
    mixture = ReasoningGym({"chain_sum": 3, "simple_equations": 1}, {"chain_sum": SMALL}, 20)
    made = [question.meta[SOURCE] for question in mixture.load()]
    assert sorted(one["task"] for one in made) == ["chain_sum"] * 15 + ["simple_equations"] * 5
    assert {one["settings"] for one in made} == {repr(SMALL), "{}"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tasks": "chain_sun"}, r"ReasoningGym: 'chain_sun' with \{\}: Dataset 'chain_sun' not registered"),
        ({"settings": {"terms": 3}}, r"with \{'terms': 3\}: .*unexpected keyword argument 'terms'"),
        ({"settings": {"min_terms": 0}}, r"with \{'min_terms': 0\}"),
        ({"settings": {"max_terms": 2, "max_digits": 1}, "count": 5000}, "asks for 5000 distinct train questions"),
        (
            {"tasks": "acre", "count": 3000},
            "asks for 3000 distinct train questions of 'acre', and only [0-9]+ were made in",
        ),
        ({"tasks": {}}, r"ReasoningGym\.tasks must be a task's name or positive weights by name, got \{\}"),
        ({"tasks": {"chain_sum": -1}}, r"ReasoningGym\.tasks must be"),
        ({"tasks": {"chain_sum": 1}, "settings": {"chainsum": {}}}, r"ReasoningGym\.settings has chainsum, which"),
        ({"split": "test"}, r"ReasoningGym\.split must be"),
        ({"count": 0}, r"ReasoningGym\.count must be"),
    ],
)
def test_what_is_wrong_is_named(more, message):
    with pytest.raises(ValueError, match=message):
        ReasoningGym(**{"tasks": "chain_sum", **more}).load()


def test_a_task_that_takes_no_large_set_has_questions_and_one_without_answers_is_no_supervised_start():
    assert len(ReasoningGym("word_ladder", count=3).load()) == 3
    ladders = ReasoningGym("word_ladder", count=3)
    assert all(response == f"<answer>{question.answer}</answer>" for question, response in ladders.examples())
    mixture = ReasoningGym({"chain_sum": 1, "propositional_logic": 1}, count=4)
    assert len(mixture.load()) == 4
    with pytest.raises(ValueError, match="propositional_logic has no answers for a supervised start"):
        mixture.examples()


@pytest.mark.slow
def test_the_reward_is_the_librarys_score_and_success_is_where_it_is_drawn():
    question = next(q for q in ReasoningGym("chain_sum", SMALL, 60).load() if len(q.answer) == 2)
    gold = question.answer
    right, longer = f"<answer>1</answer> no: <answer> {gold} </answer>", f"<answer>It is {gold}</answer>"
    texts = [right, longer, "<answer>x</answer>", gold]
    pairs = [(question, text) for text in texts]
    grades = Verifier("reasoning_gym", workers=1).grade_all(pairs)
    assert [grade.verdict for grade in grades] == ["correct", "wrong", "wrong", "no_answer"]
    assert [grade.reward for grade in grades] == [1.0, 0.25, 0.0, 0.0]
    lower = Verifier("reasoning_gym", success_at=0.25, workers=1).grade_all(pairs)
    assert [grade.verdict for grade in lower] == ["correct", "correct", "wrong", "no_answer"]
    assert [grade.reward for grade in lower] == [grade.reward for grade in grades]


@pytest.mark.parametrize(
    ("task", "text"), [("string_insertion", "oracle_answer"), ("n_queens", 'entry["metadata"]["solutions"][0]')]
)
def test_the_names_of_a_checkers_own_variables_are_no_answer(task, text):
    question = ReasoningGym(task, {}, 1).load()[0]
    from exgrpo_orlhf.testbed import gym_grader as gym

    answer = Answer(question.answer, f"<answer>{text}</answer>", question.prompt, question.meta)
    assert (gym.grade(answer).verdict, gym.grade(answer).reward) == ("wrong", 0.0)


def test_a_response_on_which_the_checker_fails_scores_0_and_a_broken_question_is_not_graded(monkeypatch):
    from exgrpo_orlhf.testbed import gym_grader as gym
    from exgrpo_orlhf.testbed import reasoning_gym

    question = ReasoningGym("chain_sum", SMALL, 1).load()[0]
    entries = reasoning_gym.entries_of("chain_sum", repr(SMALL), 0)
    answer = Answer(question.answer, "<answer>x</answer>", question.prompt, question.meta)
    monkeypatch.setattr(type(entries), "score_answer", lambda self, text, entry: float(text))
    assert gym.grade(answer).reward == 0.0
    monkeypatch.setattr(type(entries), "score_answer", lambda self, text, entry: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gym.grade(answer)
    with pytest.raises(ValueError, match="another version of reasoning-gym made this question"):
        gym.grade(answer._replace(prompt="What?"))
    with pytest.raises(ValueError, match="grades questions of ReasoningGym alone"):
        gym.grade(answer._replace(meta={}))


def _all_tasks() -> dict[str, int]:
    """How many questions of each task of the library are compared: more where some alone differ."""
    from reasoning_gym.factory import DATASETS

    more = ("isomorphic_strings", "list_functions", "polynomial_multiplication", "ransom_note", "word_ladder")
    return {task: 12 if task in more else 2 for task in sorted(DATASETS) if task != "composite"}  # which is of others


@pytest.mark.slow
@pytest.mark.usefixtures("needs_sandbox")
def test_every_task_has_the_same_questions_whatever_the_hash_seed_and_all_right_answers_are_right():
    tasks = _all_tasks()
    code = (
        "import pickle, sys\nfrom exgrpo_orlhf.testbed.reasoning_gym import ReasoningGym\n"
        f"made = ReasoningGym({tasks}, count={sum(tasks.values())}).load()\n"
        "sys.stdout.buffer.write(pickle.dumps(made))"
    )
    words = {"args": [sys.executable, "-c", code], "capture_output": True}
    lists = [subprocess.run(**words, env={**os.environ, "PYTHONHASHSEED": seed}) for seed in ("1", "2")]
    first, second = (pickle.loads(done.stdout) for done in lists)
    differing = {one.meta[SOURCE]["task"] for one, other in zip(first, second, strict=True) if one != other}
    assert not differing
    assert {question.meta[SOURCE]["task"] for question in first} == {*tasks}
    rated = [question for question in first if question.answer != str(None)]
    answers = [(question, f"<answer>{question.answer}</answer>") for question in rated]
    grades = Verifier("reasoning_gym", timeout=60.0).grade_all(answers)
    assert {q.meta[SOURCE]["task"]: g for q, g in zip(rated, grades, strict=True) if g.reward != 1.0} == {}
    close_workers()


EVALUATED = {  # tasks whose checkers evaluate an answer, and the right answer from TEXT in Python where that is no text
    **dict.fromkeys(("binary_matrix", "n_queens"), "[line.split() for line in TEXT.split('\\n')]"),
    "spiral_matrix": "TEXT.split()", "string_insertion": "list(TEXT)",
    **dict.fromkeys(
        ("puzzle24", "countdown", "simple_integration", "intermediate_integration", "polynomial_multiplication"),
        "sympify(TEXT)",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("needs_sandbox")
@pytest.mark.parametrize("task", EVALUATED)
def test_an_answer_that_is_a_program_reaches_nothing_outside_the_sandbox(task, tmp_path):
    [question] = ReasoningGym(task, count=1, seed=3).load()
    gold, marker = tmp_path / "gold", tmp_path / "marker"
    gold.write_text(question.answer)
    program = EVALUATED[task]
    harmless = (question.answer, program.replace("TEXT", repr(question.answer)))
    hostile = (
        program.replace("TEXT", f"open({str(gold)!r}).read()"),
        f"open({str(marker)!r}, 'w')",
        f"__import__('os').system('touch {marker}')",
        rf"""[NQueensDataset + "open\x28'{marker}', 'w'\x29" for NQueensDataset.__class__.__add__ in [eval]]""",
        "[0] * 10**10",
        "__import__('os')._exit(0)",
        "__import__('os').kill(1, 9)",
    )
    texts = [(question, f"<answer>{text}</answer>") for text in (*harmless, *hostile)]
    grades = Verifier("reasoning_gym", timeout=20.0, memory=256, workers=1).grade_all(texts)
    right, evaluated, *rewards = [grade.reward for grade in grades]
    assert right == 1.0
    assert evaluated > 0.09 > max(rewards), "the checker does evaluate it"
    assert not marker.exists()
    close_workers()


@pytest.mark.slow
@pytest.mark.usefixtures("needs_sandbox")
def test_an_answer_without_end_is_wrong():
    """That the sandbox leaves nothing running is held by test_code_rewards.py."""
    [question] = ReasoningGym("n_queens", count=1).load()
    program = "<answer>[number for number in iter(int, 1)]</answer>"
    grade = Verifier("reasoning_gym", timeout=1.0, workers=1).grade(question, program)
    assert (grade.verdict, grade.reward) == ("wrong", 0.0)
    close_workers()


NEED_IT = (
    "exgrpo_orlhf.testbed.reasoning_gym import ReasoningGym as G; G('chain_sum').load()",
    "exgrpo_orlhf.testbed.tiny_models import GymModel as G; G(tasks='chain_sum').prepare()",
)


@pytest.mark.parametrize("call", NEED_IT)
def test_without_the_library_one_line_says_what_to_install(call, tmp_path):
    (tmp_path / "reasoning_gym.py").write_text("raise ImportError('not here')")
    done = python("-c", f"from {call}", env={"PYTHONPATH": str(tmp_path)})
    assert "ValueError: ReasoningGym needs reasoning-gym: pip install '.[reasoning-gym]'" in done.stderr
