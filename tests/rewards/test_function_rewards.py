"""Reward functions of OpenRLHF, TRL and verl: each is called as its own tool calls it, any other is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from exgrpo_orlhf.grader.answer import Answer
from exgrpo_orlhf.questions import QuestionFile
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.rewards import Verifier, function


def reward(tmp_path: Path, source: str):
    path = tmp_path / "reward.py"
    path.write_text(source)
    name = source.split("def ")[-1].split("(")[0]
    [graded] = function.grading(f"{path}:{name}").grade([Answer("42", "it is 42")])
    return graded


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ("None", "reward.py, line 1: it returned None"),
        ("[1.0, 2.0]", "one reward for each query, got 2 for one"),
        ("float('nan')", "finite"),
        ("{'reward': 1.0}", "a dict has the reward as 'score'"),
        *((text, "must return a number, got") for text in ("'1'", "b'1'", "['1']", "{'score': '1'}")),
        ("__import__('numpy').str_('1')", "must return a number, got '1'"),
        ("int('x')", "reward.py, line 2: ValueError: invalid literal"),
        ("-2e6", "it must return rewards between ±1,000,000, got -2e+06"),
    ],
)
def test_what_cannot_be_a_reward_is_named(tmp_path, returned, reason):
    graded = reward(tmp_path, f"def f(solution_str, ground_truth):\n    return {returned}")
    assert (graded.verdict, graded.reward) == ("error", None)
    assert reason in graded.reason


def test_a_reward_that_is_a_success_but_for_the_rounding_of_float32_is_one(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("import numpy\ndef f(solution_str, ground_truth):\n    return numpy.float32(0.99999994)\n")
    assert Verifier("function", function=f"{path}:f", workers=1).grade(Question.make("t", "", "1"), "1").correct


def test_a_column_that_no_question_has_is_named(tmp_path):
    graded = reward(tmp_path, "def f(completions, solution):\n    return [1.0]")
    assert "takes solution, which is no column of the questions: add it to QuestionFile.meta" in graded.reason


OTHERS = ("queries, prompts, labels, threshold", "a, b, c", "*args", "", "solution_str, ground_truth, tokenizer")


@pytest.mark.parametrize("parameters", OTHERS)
def test_other_parameters_are_refused_with_what_is_accepted(tmp_path, parameters):
    with pytest.raises(ValueError, match=r"reward_func\(queries, prompts, labels\), TRL's .* verl's compute_score\("):
        reward(tmp_path, f"def f({parameters}):\n    return 1.0")


def test_what_cannot_be_called_by_name_is_refused_and_the_binding_that_tells_the_tool_is_named(tmp_path):
    with pytest.raises(ValueError, match="takes prompts by position alone"):
        reward(tmp_path, "def f(prompts, completions, /, **_):\n    return [1.0]")
    with pytest.raises(ValueError, match=r"Verifier\.tool does: 'openrlhf', 'trl', 'verl'"):
        reward(tmp_path, "def f(prompts, **kwargs):\n    return [1.0]")


@pytest.mark.slow
def test_an_edited_function_is_used_by_the_next_verifier_and_by_none_that_has_begun(tmp_path):
    path, question = tmp_path / "reward.py", Question.make("t", "", "1")
    source = "def f(solution_str, ground_truth):\n    return {}\n"
    path.write_text(source.format(0.25))
    begun = Verifier("function", function=f"{path}:f", workers=1)
    assert begun.grade_all([(question, "1")])[0].reward == 0.25
    path.write_text(source.format(0.75))
    assert begun.grade_all([(question, "1")])[0].reward == 0.25
    assert Verifier("function", function=f"{path}:f", workers=1).grade_all([(question, "1")])[0].reward == 0.75
    assert begun.grade_all([(question, "1")])[0].reward == 0.25, "also behind the other"
    begun.graders().server._process.kill()
    begun.graders().server._process.wait()
    assert begun.grade_all([(question, "1")])[0].reward == 0.25, "also where its process is another one"
    path.unlink()
    assert begun.grade_all([(question, "1")])[0].reward == begun.grade(question, "1").reward == 0.25


def test_what_is_checked_before_a_run_is_what_grades_whatever_its_size_and_encoding(tmp_path):
    path, question = tmp_path / "reward.py", Question.make("t", "", "1")
    source = "# coding: latin-1\ndef f(solution_str, ground_truth):\n    return float(solution_str == 'é') * {}\n"
    path.write_bytes(source.format(0.25).encode("latin-1") + b"#" * 200_000)
    verifier = Verifier("function", function=f"{path}:f", workers=1)
    verifier.check_questions([question])
    checked = verifier.own_code
    path.write_text(source.format(0.75))
    assert verifier.grade_all([(question, "é")])[0].reward == 0.25
    assert verifier.own_code == checked, "what a checkpoint says of it"
    assert Verifier("function", function=f"{path}:f").own_code != checked


def test_a_function_that_nearly_used_its_memory_up_fails_whatever_the_reward(tmp_path):
    """Or of a group its high rewards alone would be left."""
    path = tmp_path / "reward.py"
    path.write_text("def f(solution_str, ground_truth):\n    len(bytearray(245 << 20))\n    return float(solution_str)")
    verifier = Verifier("function", function=f"{path}:f", workers=1, memory=256, max_failed_share=1.0)
    grades = [verifier.grade(Question.make("t", "", "1"), reward) for reward in ("0.25", "1")]
    assert [grade.reason for grade in grades] == ["its process ended: out of memory (Verifier.memory)"] * 2


def test_a_file_without_the_function_is_named(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def other(): pass")
    with pytest.raises(ValueError, match="defines no function 'reward_func'"):
        function.grading(str(path))


@pytest.mark.slow
def test_a_list_of_gold_answers_in_a_file_is_accepted_by_any_of_them(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "x^2=4?", "gold": ["2", -2]}\n{"question": "1+1?", "gold": "2"}\n')
    questions = QuestionFile(prompt="question", answer="gold", source=None, path=str(path)).load()
    verifier = Verifier("math")
    verifier.check_questions(questions)
    responses = ("\\boxed{2}", "\\boxed{-2}", "\\boxed{3}")
    assert [verifier.grade(questions[0], each).verdict for each in responses] == ["correct", "correct", "wrong"]
    assert questions[1].answer == "2"
    assert questions[0].answer == ("2", -2)
    with pytest.raises(ValueError, match="'exact': it takes one gold answer, not the list"):
        Verifier("exact").check_questions(questions)
    for bad in ("[]", '[""]', "[null]"):
        path.write_text(f'{{"question": "x?", "gold": {bad}}}\n')
        with pytest.raises(ValueError, match="line 1: field 'gold'"):
            QuestionFile(prompt="question", answer="gold", source=None, path=str(path)).load()
