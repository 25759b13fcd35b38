"""The calculator of word problems: what it answers, and that a worked solution with calls is a right episode of it."""

from __future__ import annotations

import re

import pytest

from exgrpo_orlhf.testbed.word_calculator import Calculator
from exgrpo_orlhf.testbed.word_problems import WordProblems


@pytest.mark.parametrize(
    ("turn", "feedback"),
    [
        ("<calc>4 * 12</calc>", " = 48."),
        ("First, <calc>4*12</calc> = 48. Then <calc>7 - 9</calc>", " = -2."),
        ("<calc>12 / 4</calc>", " = 3."),
        ("<calc>12 / 5</calc>", " = ?."),
        ("<calc>12 / 0</calc>", " = ?."),
        ("<calc>4 * 12 - 1</calc>", " = ?."),
        ("<calc>9999999 * 1</calc>", " = ?."),
        ("4 * 12</calc>", " = ?."),
    ],
)
def test_a_call_gets_its_result_and_what_is_no_calculation_a_question_mark(turn, feedback):
    calculator = Calculator()
    calculator.reset({"observation": "4 and 12?"})
    step = calculator.step({"observation_text": "4 and 12?", "action_text": turn, "label": "48"})
    assert step == {"rewards": 0.0, "environment_feedback": feedback, "done": False}


def test_a_worked_solution_with_calls_is_played_as_it_is_written_and_right():
    for question, solution in WordProblems(count=200, steps=(1, 2, 3, 4), calls=True).examples():
        calculator, text = Calculator(), question.prompt
        calculator.reset({"observation": text})
        for turn in re.findall(r".*?</calc>|.+$", solution):
            action = re.sub(r"^ = \d+\.", "", turn)  # what the calculator has said
            step = calculator.step({"observation_text": text, "action_text": action, "label": question.answer})
            text += action + step["environment_feedback"]
        assert text == question.prompt + solution
        assert (step["done"], step["rewards"]) == (True, 1.0)


@pytest.mark.parametrize(
    ("answer", "reward"), [(" The answer is 48.", 1.0), (" The answer is 49.", 0.0), (" I do not know.", 0.0)]
)
def test_the_episode_ends_with_the_first_turn_without_a_call_and_its_answer_decides(answer, reward):
    calculator = Calculator()
    calculator.reset({"observation": "4 and 12?"})
    before = "4 and 12?<calc>4 * 12</calc> = 48."
    step = calculator.step({"observation_text": before, "action_text": answer, "label": "48"})
    assert (step["done"], step["rewards"]) == (True, reward)
