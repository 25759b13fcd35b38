"""Reward functions of OpenRLHF, TRL and verl: each is called as its own tool calls it, any other is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from run_builders import train_command

from exgrpo_orlhf.questions import QuestionFile
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.rewards import Verifier
from exgrpo_orlhf.rewards.answer import Answer
from exgrpo_orlhf.rewards.sandbox import function

MESSAGES = (("system", "Be brief."), ("user", "6*7?"))
META = {"row": 3, "level": 5, "extra_info": {"index": 8}}


def reward(tmp_path: Path, source: str, answer: Answer | None = None):
    path = tmp_path / "reward.py"
    path.write_text(source)
    name = source.split("def ")[-1].split("(")[0]
    [graded] = function.grading(f"{path}:{name}").grade([answer or Answer("42", "it is 42", "6*7?", META, "set")])
    return graded


def test_openrlhfs_own_signature_is_called_as_it_calls_it(tmp_path):
    source = "import numpy\ndef reward_func(queries, prompts, labels, **kwargs):\n    return numpy.array([0.5])"
    graded = reward(tmp_path, source)
    assert graded.reward == 0.5, graded.reason


def test_messages_stay_messages_for_trl_and_are_text_for_openrlhf(tmp_path):
    answer = Answer("42", "42", MESSAGES)
    trl = (
        "def chat(prompts, completions):\n"
        "    assert prompts == [[{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '6*7?'}]]\n"
        "    assert completions == [[{'role': 'assistant', 'content': '42'}]], completions\n    return [1.0]"
    )
    openrlhf = "def f(queries, prompts, labels):\n    return queries == ['Be brief.\\n6*7?42'] or 1 / 0"
    for source in (trl, openrlhf):
        assert reward(tmp_path, source, answer).reward == 1.0, source


def test_the_whole_meta_is_verl_s_extra_info_where_no_column_has_that_name(tmp_path):
    source = "def f(solution_str, ground_truth, extra_info):\n    return extra_info['level'] == 5"
    assert reward(tmp_path, source, Answer("42", "42", meta={"level": 5})).reward == 1.0


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ("None", "reward.py, line 1: it returned None"),
        ("[1.0, 2.0]", "one reward for each query, got 2 for one"),
        ("float('nan')", "finite"),
        ("{'reward': 1.0}", "a dict has the reward as 'score'"),
        ("int('x')", "reward.py, line 2: ValueError: invalid literal"),
    ],
)
def test_what_cannot_be_a_reward_is_named(tmp_path, returned, reason):
    graded = reward(tmp_path, f"def f(solution_str, ground_truth):\n    return {returned}")
    assert (graded.verdict, graded.reward) == ("error", None)
    assert reason in graded.reason


def test_a_column_that_no_question_has_is_named(tmp_path):
    graded = reward(tmp_path, "def f(completions, solution):\n    return [1.0]")
    assert "takes solution, which is no column of the questions: add it to QuestionFile.meta" in graded.reason


@pytest.mark.parametrize(
    "parameters",
    [
        "queries, prompts, labels, threshold", "a, b, c", "*args", "",
        "solution_str, ground_truth, tokenizer",
    ],
)  # fmt: skip
def test_other_parameters_are_refused_with_what_is_accepted(tmp_path, parameters):
    with pytest.raises(ValueError, match=r"reward_func\(queries, prompts, labels\), TRL's .* verl's compute_score\("):
        reward(tmp_path, f"def f({parameters}):\n    return 1.0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "message"), [(None, "there is no file"), ("def other(): pass", "defines no function 'reward_func'")]
)
def test_training_with_a_reward_file_that_cannot_be_used_ends_with_status_2(tmp_path, source, message):
    path = tmp_path / "reward.py"
    if source is not None:
        path.write_text(source)
    bindings = ["Verifier.kind = 'function'", f"Verifier.function = '{path}'", "Tracking.enabled = False"]
    command = train_command(tmp_path / "run", bindings, "quickstart.gin")
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr.count("error: ")) == (2, 1), done.stderr
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


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


@pytest.mark.slow
def test_success_is_a_reward_of_success_at_or_openrlhfs_score(tmp_path):
    """A reward of 0.1 for a wrong answer, and of 1.1 for a right one with a bonus."""
    question, texts = Question.make("here", "6*7?", "42"), ("42", "41", "40")
    (tmp_path / "graded.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return 1.1 if queries[0].endswith(labels[0]) else 0.1\n"
        "def with_scores(queries, prompts, labels):\n"
        "    return {'rewards': [0.1], 'scores': [float(queries[0].endswith(labels[0]))], 'extra_logs': {}}\n"
    )
    for name, success_at, expected in (
        ("reward_func", 1.0, [("correct", 1.1), ("wrong", 0.1), ("wrong", 0.1)]),
        ("reward_func", 0.1, [("correct", 1.1), ("correct", 0.1), ("correct", 0.1)]),
        ("with_scores", 1.0, [("correct", 0.1), ("wrong", 0.1), ("wrong", 0.1)]),
    ):
        verifier = Verifier("function", f"{tmp_path}/graded.py:{name}", success_at, workers=1)
        grades = verifier.grade_all([(question, text) for text in texts])
        assert [(grade.verdict, grade.reward) for grade in grades] == expected
