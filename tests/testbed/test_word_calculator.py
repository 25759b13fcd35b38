"""The calculator of word problems: what it answers, and that a worked solution with calls is a right episode of it."""

from __future__ import annotations

import re

import pytest

from exgrpo_orlhf.testbed.word_calculator import Calculator
from exgrpo_orlhf.testbed.word_problems import WordProblems

CALLED = "4 and 12?<calc>4 * 12</calc> = 48."
TURNS = [  # what stood there, the turn, what the calculator says, the reward; without a call the episode ends
    *(("4 and 12?", f"{turn}</calc>", feedback, 0.0) for turn, feedback in (
        ("<calc>4 * 12", " = 48."), ("First, <calc>4*12</calc> = 48. Then <calc>7 - 9", " = -2."),
        ("<calc>12 / 4", " = 3."), ("<calc>12 / 5", " = ?."), ("<calc>12 / 0", " = ?."), ("<calc>4 * 12 - 1", " = ?."),
        ("<calc>9999999 * 1", " = ?."), ("4 * 12", " = ?."))),
    (CALLED, " The answer is 48.", "", 1.0),
    (CALLED, " The answer is 49.", "", 0.0),
    (CALLED, " I do not know.", "", 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("before", "turn", "feedback", "reward"), TURNS)
def test_a_call_gets_its_result_and_the_first_turn_without_one_is_the_answer(before, turn, feedback, reward):
    calculator = Calculator()
    calculator.reset({"observation": "4 and 12?"})
    step = calculator.step({"observation_text": before, "action_text": turn, "label": "48"})
    assert step == {"rewards": reward, "environment_feedback": feedback, "done": not feedback}


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
