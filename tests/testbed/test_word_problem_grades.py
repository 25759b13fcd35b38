"""Grading of word problems: which number is the answer, and which reasoning is sound."""

from __future__ import annotations

import re
import time
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from exgrpo_orlhf.records import Question
from exgrpo_orlhf.rewards import Verifier
from exgrpo_orlhf.testbed.word_problems import WordProblems, grade

QUESTION = Question.make(
    "word_problems", "Anna has 4 bags with 12 marbles in each bag. She loses 9 of her marbles. How many …?", "39"
)
SOLUTION = "4 * 12 = 48. 48 - 9 = 39. The answer is 39."


@cache
def examples() -> list[tuple[Question, str]]:
    return [
        example for split in ("train", "validation") for example in WordProblems(400, (1, 2, 3, 4), 5, split).examples()
    ]


ANSWERS = {  # what stands after "The answer is"
    "correct": [
        *(" 39.", " 39", "\n39", ": 39.", " 39 apples.", " $39.", " **39**.", " 039.", " 39.0.", " 39. 4 * 12 = 48."),
        *(" 40. No, the ANSWER is 39.", " 39!", " 39\n40", " 39 km.", " 39...", " $39$.", " 39 kittens", " 39)"),
        *(" 39 because 48 - 9 = 39.", " 39 marbles, and 48 - 9 = 39.", " 39 marbles to 4 friends."),
        *(" 39 orders, 40 of them late",),
    ],
    "wrong": [
        *(" 39. The answer is 40.", " 40.", " 39.5.", " 39.5.1", " 3.9e1", " 39e2", " 1,039.", " 39,5.", " 39,039."),
        *(" -39.", " −39.", " 39%.", " 39/2.", " 39 1/2.", " 39 x 2.", " 39 × 2.", " 39 or 40.", " 39 to 41."),
        *(" 39, 40 or 41.", " 39 = 40.", " 48 - 9 = 39.", " 391.", " " + "3" * 100_000, " " + "0" * 100_000 + "39"),
        *(" **39** or **40**.", " $39$ or $40$", " 39, or 40", " 39 (or 40)", " 39; 40", " 39 | 40", " 39...40"),
        *(" 39… 40", " 39 dollars or 40 dollars", " 39 apples or 40", " 39–41", " 39—41", " 39~41", " 39:40", " 39½"),
        *(" 39 ½", " 39²", " 39⁴", " 39 ** 2", " 39 plus 1", " 39 minus 9", " 39 times 2", " 39 divided by 3"),
        *(" 39 thousand", " 39k", " 39 and a half", " 39 per cent", " 39 percent", " 39_000", " 39'000", " 39４"),
        *(" 39\u00a040", " 39\u00a0%", " 39^{2}", " 39 \\times 2", " 39\\%"),
    ],
    "no_answer": [
        *(" not 39.", " thirty-nine.", " ３９.", " ٣٩.", " 39. The answer is", "", "n't 39.", "39."),
    ],
}


@pytest.mark.parametrize("reasoning", ["", "4 * 12 = 48. 48 - 9 = 39. "])
@pytest.mark.parametrize("verdict", ANSWERS)
def test_the_answer_is_the_whole_number_after_the_last_answer_is(verdict, reasoning):
    for end in ANSWERS[verdict]:
        response = f"{reasoning}The answer is{end}"
        grade_ = grade(QUESTION, response)
        assert (grade_.verdict, grade_.reward) == (verdict, float(verdict == "correct")), end
        assert grade_.sound == (bool(reasoning) and verdict == "correct"), end
        assert grade_ == Verifier("word_problem").grade(QUESTION, response)
        assert grade_.extracted is None or len(grade_.extracted) <= 200


@pytest.mark.parametrize("response", ["39", ""])
def test_a_response_without_the_words_has_no_answer(response):
    assert grade(QUESTION, response).verdict == "no_answer"


SOUND = [
    *("4 * 12 = 48. 48 - 9 = 39.", "12*4=48\n48-9=39\n", "4 × 12 = 48; 48 − 9 = 39;", "4x12=48. 48-9=39."),
    *("4 x 12 = 48, so 48 - 9 = 39 marbles.", "She has 4 * 12 = 48 marbles at first. Then 48 - 9 = 39."),
    *("Step 1: 4 * 12 = 48. Step 2: 48 - 9 = 39.", "4 * $12 = $48. $48 - 9 = 39.", "4 * 12 = 48.0. 48 - 9.0 = 39."),
    *("4 * 12 = 48. 4 * 12 = 48. 48 - 9 = 39.", "9 / 4 = 2.25. 12 - 2.25 = 9.75. 9.75 * 4 = 39."),  # again; another way
    *("- 4 * 12 = 48\n- 48 - 9 = 39\n", "So:\n * 4 * 12 = 48\n * 48 - 9 = 39\n", "• 4 * 12 = 48\n• 48 − 9 = 39\n"),
    *("1. 4 * 12 = 48\n2. 48 - 9 = 39\n", "1) 4 * 12 = 48\n2) 48 - 9 = 39\n", "12. 4 * 12 = 48\n48 - 9 = 39\n"),
]
UNSOUND = [
    *("-4 * 12 = 48\n48 - 9 = 39\n", "4 * 12 = 48\n- 9 = 39\n"),  # a number's sign, a chain in two lines
    *("- 4 * 12 = 47\n- 48 - 9 = 39\n", "4 * 12 = 48. 48 - 9 = 38.", "4 * 12 = 47. 48 - 9 = 39."),  # false
    *("", "I guess.", "48 - 9 = 39.", "4 * 12 = 48."),  # steps are missing
    *("4 * 12 = 48. 49 - 10 = 39.", "12 * 4 = 48. 48 - 9 = 39. 39 + 0 = 39."),  # numbers from nowhere
    *("4 * 12 = 48. 48 - 9 = 39. 4 + 9 = 13.", "4 + 9 = 13. 4 * 12 = 48. 48 - 9 = 39."),  # a result is not used
    *("48 - 9 = 39. 4 * 12 = 48.", "4 * 12 = 48. 39 = 48 - 9.", "4 * 12 = 48. -9 + 48 = 39."),  # the order
    *("4 * 12 = 48 - 9 = 39.", "4 * 12 - 9 = 39.", "(4 * 12) - 9 = 39."),  # not one calculation
    *("4 * 12 = 48 = 48. 48 - 9 = 39.", "4 * 12 == 48. 48 - 9 = 39.", "4 bags * 12 marbles = 48. 48 - 9 = 39."),
    *("4 * 12 = 48.5. 48 - 9 = 39.", "4 * 12 = 48.48 - 9 = 39.", "4 * 12 = 4,8. 48 - 9 = 39."),
    *("4 * 1,2 = 48. 48 - 9 = 39.", "4 * 12 = 4８. 48 - 9 = 39.", "4 ٭ 12 = 48. 48 - 9 = 39."),
    *("4 / 0 = 48. 48 - 9 = 39.", "9 - 9 = 0. 4 / 0 = 39."),
    *("4 * 12 = " + "0" * 100_000 + "48. 48 - 9 = 39.", "4 * 12 = " + "1" * 100_000 + ". 48 - 9 = 39."),
]


def test_reasoning_is_sound_if_every_equation_holds_and_leads_to_the_answer():
    for reasoning in (*SOUND, *UNSOUND):
        grade_ = grade(QUESTION, f"{reasoning} The answer is 39.")
        assert (grade_.verdict, grade_.sound) == ("correct", reasoning in SOUND), reasoning[:200]


SEATS = Question.make("word_problems", "There are 100 rows of 20 seats for 4 schools. How many …?", "500")
MARBLES = Question.make("word_problems", "Anna has 40 marbles in 2 bags and loses 20. How many …?", "20")


@pytest.mark.parametrize(
    ("question", "reasoning", "sound"),
    [
        *((SEATS, f"100 * 20 = {n}. {n} / 4 = 500.", n != "2,00") for n in ("2000", "2,000", "2,000.0", "2,00")),
        (MARBLES, "40 - 20 = 20.", False),  # a number of the question is not used
    ],
)
def test_a_thousand_may_have_its_comma_and_every_number_must_be_used(question, reasoning, sound):
    grade_ = grade(question, f"{reasoning} The answer is {question.answer}.")
    assert (grade_.correct, grade_.sound) == (True, sound)


def test_a_changed_solution_is_never_correct_and_sound():
    """One number changed, one step left out, one number that is not known, the answer changed."""
    rng = np.random.default_rng(0)
    for question, solution in examples()[::2]:
        *steps, last = solution.split(". ")
        at = int(rng.integers(len(steps)))
        left, sign, right, _, result = steps[at].split(" ")
        wrong = f"{left} {sign} {right} = {int(result) + int(rng.integers(1, 10))}"
        other = Fraction(left) + 1000 * (Fraction(right) if sign == "/" else 1)
        shifted = {"+": other + int(right), "-": other - int(right), "*": other * int(right), "/": other / int(right)}
        unknown = f"{other} {sign} {right} = {shifted[sign]}"  # right arithmetic
        changes = [[*steps[:at], wrong, *steps[at + 1 :]], [*steps[:at], unknown, *steps[at + 1 :]]]
        fewer = [*steps[:at], *steps[at + 1 :]]
        if result not in re.findall("[0-9]+", " ".join([str(question.prompt), *(s.split("= ")[1] for s in fewer)])):
            changes.append(fewer)  # else it is known without this step
        for changed in changes:
            grade_ = grade(question, ". ".join([*changed, last]))
            assert grade_.correct
            assert not grade_.sound, (question, changed)
        answer = f"The answer is {int(question.answer) + int(rng.integers(1, 10))}."
        assert grade(question, ". ".join([*steps, answer])).verdict == "wrong"


def test_an_edit_of_one_character_never_turns_the_solution_into_another_sound_answer():
    for question, solution in examples()[:12]:
        for at in range(solution.index("The answer")):
            for character in "0179+-*/= .,x":
                edited = solution[:at] + character + solution[at + 1 :]
                grade_ = grade(question, edited)
                if grade_.sound:  # the same calculations, in other spaces, signs or marks
                    same = [[*map(int, re.findall("[0-9]+", text))] for text in (edited.replace(".0", ""), solution)]
                    assert same[0] == same[1], edited


def test_no_text_makes_the_checker_raise():
    rng = np.random.default_rng(0)
    parts = [
        *("4", "12", "48", "9", "39", "0", "000", "3.5", "1,200", ",", ".", "-", "−", "$", "%", " ", "\n", "\t"),
        *("+", "*", "/", "×", "÷", "x", "X", "=", "==", "(", ")", "The answer is", "answer is", "answer", "is"),
        *("٣", "３", "½", "²", "\x00", "\u2028", "\ud800", "😀", "e5", "9" * 5000, "_", "inf", "nan"),
    ]
    for _ in range(1000):
        text = "".join(parts[i] for i in rng.integers(len(parts), size=int(rng.integers(1, 25))))
        for response in (text, f"{SOLUTION} {text}", f"{text} The answer is 39.", f"The answer is {text}"):
            grade_ = grade(QUESTION, response)
            assert grade_.reward in (0.0, 1.0)
            assert grade_.sound is False or grade_.correct


FILLINGS = (" ", "*", "$", ".", "(", "_", "**", ",;", "a", "4", "\\a")
LONG = [
    "4 * 12 = " * 20_000, "answer is " * 20_000, "4," * 50_000, "1 " * 50_000, "answer is" + " " * 100_000,
    "12 - 9 = 3. " * 4000, "- " * 50_000, "\n- " * 30_000,
    *(f"The answer is 39{filling * 50_000}" for filling in FILLINGS),
    *(f"The answer is 39{' ' * 50_000}{filling}" for filling in ("*" * 50_000, "a" * 50_000, " or " * 9000)),
]  # fmt: skip


@pytest.mark.parametrize("response", LONG, ids=lambda response: f"{response[14:24]!r}")
def test_long_texts_take_linear_time(response):
    """Each takes 0.2 s at most; a search that tried every way to cut the spaces would take minutes."""
    began = time.perf_counter()
    assert not grade(QUESTION, f"{response} The answer is 39.").sound
    assert not grade(QUESTION, response).sound
    assert time.perf_counter() - began < 60
