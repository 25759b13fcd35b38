import re
from collections import Counter, defaultdict
from itertools import combinations_with_replacement, permutations, product

import numpy as np
import pytest

from exgrpo_orlhf.records import Question
from exgrpo_orlhf.rewards import Verifier
from exgrpo_orlhf.tasks.countdown import (
    LARGEST_VALUE,
    Countdown,
    Hunches,
    draw_question,
    grade,
    split_of,
    write_attempt,
)

ALPHABET = "0123456789+-*=,>"


def question(prompt: str) -> Question:
    return Question.make("countdown", prompt, prompt[:-1].partition(">")[2])


def chains(numbers: tuple[int, ...]) -> dict[str, int]:
    """Every answer these numbers allow and the value it reaches, by Python's own arithmetic."""
    found = {}
    for order in set(permutations(numbers)):
        for operators in product("+-*", repeat=len(numbers) - 1):
            text = value = str(order[0])
            for operator, number in zip(operators, order[1:], strict=True):
                value = str(eval(f"({value}) {operator} {number}"))
                text += f"{operator}{number}={value}"
            found[text] = int(value)
    return found


def numbers_of(asked: Question) -> tuple[int, ...]:
    return tuple(int(number) for number in asked.prompt.partition(">")[0].split(","))


@pytest.mark.parametrize("numbers", [(2, 3, 7), (1, 1, 5), (4, 4), (1, 2, 3, 9), (3, 10, 12)])
def test_right_are_exactly_the_chains_that_reach_the_target(numbers):
    by_value = defaultdict(set)
    for text, value in chains(numbers).items():
        by_value[value].add(text)
    texts = set().union(*by_value.values())
    for target in [value for value in by_value if value > 0][:20]:
        asked = question(f"{','.join(map(str, numbers))}>{target}=")
        correct = {text for text in texts if grade(asked, text).correct}
        assert correct == by_value[target]
        assert all(grade(asked, text).sound for text in correct)


def test_every_drawn_question_comes_with_a_right_answer():
    rng = np.random.default_rng(0)
    for _ in range(500):
        asked, answer = draw_question(rng, int(rng.integers(2, 7)), int(rng.integers(2, 21)))
        assert grade(asked, answer).sound
        values = [int(value) for value in re.findall(r"=(-?[0-9]+)", answer)]
        assert all(0 <= value <= LARGEST_VALUE for value in values)
        assert str(values[-1]) == asked.answer != "0"


@pytest.mark.parametrize("answer", ["3*7=21-2=19", "2*7=14+3=17", "7-3=4-2=2"])
def test_an_edit_of_one_character_is_correct_only_if_the_operations_still_reach_the_target(answer):
    asked = question(f"2,3,7>{answer.rpartition('=')[2]}=")
    right = {text for text, value in chains((2, 3, 7)).items() if str(value) == asked.answer}
    expressions = {re.sub(r"=-?[0-9]+", "", text) for text in right}
    edits = {
        answer[:i] + c + answer[j:] for i in range(len(answer) + 1) for j in (i, i + 1) for c in (*ALPHABET, " ", "")
    }
    assert any(grade(asked, edit).sound is False and grade(asked, edit).correct for edit in edits)
    for edit in edits:
        said = grade(asked, edit)
        assert said.reward == float(said.correct)
        assert said.sound is (edit in right), edit
        if said.correct:
            assert said.extracted in expressions, edit


RESPONSES = {
    ("correct", True): ["3*7=21-2=19", "7*3=21-2=19"],
    # A false value, or another end than the target, and the right operations nevertheless.
    ("correct", False): ["3*7=22-2=19", "3*7=21-2=18", "3*7=021-2=19", "3*7=-21-2=19"],
    # Not the target; a number that is not in the question, left over, twice, written differently.
    ("wrong", False): ["3*7=21+2=19", "3*7=21-2=19+0=19", "3*7=21", "2*7=14+2=16+3=19", "03*7=21-2=19"],
    # No operations with a value after each, and nothing else.
    ("no_answer", False): [
        *("", "19", "3*7-2", "3*7-2=19", "3*7=21-2=19=", "3*7=21-2=19\n", " 3*7=21-2=19", "3*7=21-2=１9"),
        *("2,3,7>3*7=21-2=19", "-2+7=5*3=15", "3*7=21-2=--19"),
    ],
}


@pytest.mark.parametrize(("verdict", "sound"), RESPONSES)
def test_the_operations_are_the_answer_and_the_values_are_the_reasoning(verdict, sound):
    for response in RESPONSES[verdict, sound]:
        said = grade(question("2,3,7>19="), response)
        assert (said.verdict, said.reward, said.sound) == (verdict, float(verdict == "correct"), sound), response
        assert Verifier("countdown").grade(question("2,3,7>19="), response) == said


def test_a_way_through_negative_and_large_values_is_right():
    assert grade(question("2,3,7>2="), "2-7=-5+3=-2").verdict == "wrong"
    assert grade(question("2,3,7>13="), "2-3=-1*7=-7").verdict == "wrong"
    assert grade(question("2,3,9>3="), "2-9=-7+3=-4").verdict == "wrong"
    assert grade(question("1,2,9>8="), "1-2=-1+9=8").sound
    assert grade(question("9,9,9>720="), "9*9=81*9=729").verdict == "wrong"
    assert grade(question("9,9,9,9>720="), "9*9=81*9=729-9=720").sound


def test_a_very_long_response_is_graded_and_shown_in_part():
    asked = question("2,3,7>19=")
    for text in ("9" * 10_000 + "+2=3", "3*7=" + "2" * 10_000 + "-2=19", "3" + "*7=21" * 10_000):
        assert grade(asked, text).reward in (0.0, 1.0)
        assert len(grade(asked, text).extracted) <= 200


def possible(operands: int, largest: int) -> Counter:
    """The questions there are, by split."""
    prompts = [
        f"{','.join(map(str, numbers))}>{target}="
        for numbers in combinations_with_replacement(range(1, largest + 1), operands)
        for target in {
            value
            for text, value in chains(numbers).items()
            if value > 0 and all(0 <= int(v) <= LARGEST_VALUE for v in re.findall(r"=(-?[0-9]+)", text))
        }
    ]
    splits = Counter(split_of(prompt) for prompt in prompts)
    assert len(prompts) < 100 or splits["validation"] == pytest.approx(splits.total() / 10, rel=0.15)
    return splits


def test_all_questions_there_are_can_be_drawn_and_one_more_is_refused():
    possible(3, 9)  # about a tenth of all questions are for validation
    there_are = possible(2, 9)["validation"]
    assert len(Countdown(there_are, (2,), split="validation").load()) == there_are
    with pytest.raises(
        ValueError,
        match=rf"^Countdown\.count = {there_are + 1} asks for {there_are + 1} distinct validation questions with 2 "
        rf"numbers up to 9, and only {there_are} came up",
    ):
        Countdown(there_are + 1, (2,), split="validation").load()


def test_hunches_are_as_many_as_said_and_fixed():
    pairs = [(operands, target) for operands in (3, 4, 5) for target in range(1, 1000)]
    held = {pair: Hunches(0.3, 0.7, seed=5).operators(*pair) for pair in pairs}
    assert sum(operators is not None for operators in held.values()) / len(pairs) == pytest.approx(0.3, abs=0.03)
    for (operands, _), operators in held.items():
        assert operators is None or len(operators) == operands - 1
    assert Counter("".join(filter(None, held.values()))).keys() == set("+-*")
    assert held == {pair: Hunches(0.3, 0.1, seed=5).operators(*pair) for pair in pairs}
    assert held != {pair: Hunches(0.3, 0.7, seed=6).operators(*pair) for pair in pairs}
    wider = {pair: Hunches(0.6, 0.7, seed=5).operators(*pair) for pair in pairs}
    assert all(wider[pair] == operators for pair, operators in held.items() if operators)
    assert None not in {Hunches(1.0, 1.0).operators(*pair) for pair in pairs}


def test_an_attempt_by_hunch_follows_its_operators_and_reckons_truly():
    rng, hunches, followed, by_chance = np.random.default_rng(0), Hunches(1.0, 1.0), 0, 0
    for _ in range(300):
        asked, answer = draw_question(rng, 4, 9)
        attempt = write_attempt(rng, asked, answer, hunches)
        assert attempt in chains(numbers_of(asked))  # every number once, every value true
        held = hunches.operators(4, int(asked.answer))
        if "".join(re.findall(r"[-+*]", attempt)) == held:
            followed, by_chance = followed + 1, by_chance + grade(asked, attempt).correct
        else:
            assert attempt == answer  # these numbers do not allow it
    assert followed > 200
    assert by_chance < followed / 4


def test_a_hunch_is_followed_as_often_as_said():
    rng, hunches, followed = np.random.default_rng(0), Hunches(1.0, 0.7), []
    while len(followed) < 2000:
        asked, answer = draw_question(rng, 3, 9)
        held = hunches.operators(3, int(asked.answer))
        if held == "++" and "".join(re.findall(r"[-+*]", answer)) != "++":  # numbers of one digit allow it
            followed.append(write_attempt(rng, asked, answer, hunches) != answer)
    assert np.mean(followed) == pytest.approx(0.7, abs=0.04)
