"""Word problems: what is asked, which answers there are, and what training and validation questions share (nothing)."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from functools import cache

import numpy as np
import pytest

from exgrpo_orlhf.records import Question
from exgrpo_orlhf.testbed.stories import (
    MOST_STEPS,
    NAMES,
    is_plain,
    scenes,
    split_of,
)
from exgrpo_orlhf.testbed.word_problems import WordProblems

SPLITS = ("train", "validation")
STEPS = tuple(range(1, MOST_STEPS + 1))
EQUATION = re.compile(r"([0-9]+) ([-+*/]) ([0-9]+) = ([0-9]+)\. ")


@cache
def many_examples(split: str, steps: int) -> list[tuple[Question, str]]:
    return WordProblems(6000 if split == "train" else 2000, (steps,), seed=1, split=split).examples()


def examples(split: str, steps: int) -> list[tuple[Question, str]]:
    return many_examples(split, steps)[:2000]


def calculations(solution: str) -> list[tuple[int, str, int, int]]:
    return [(int(a), sign, int(b), int(c)) for a, sign, b, c in EQUATION.findall(solution)]


def numbers_of(question: Question) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]+", question.prompt)]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("steps", STEPS)
def test_the_worked_solution_is_right_plain_and_leads_to_the_gold_answer(steps, split):
    for question, solution in examples(split, steps)[:500]:
        match = re.fullmatch(rf"((?:{EQUATION.pattern}){{{steps}}})The answer is ([0-9]+)\.", solution)
        assert match, solution
        assert match[match.lastindex] == question.answer
        values = Counter(numbers_of(question))
        for equation in EQUATION.finditer(solution):
            expression, result = equation[0].rstrip(". ").split(" = ")
            assert eval(expression.replace("/", "//")) == int(result) == eval(expression) <= 999
            values += Counter([int(result)])
            assert values[int(equation[1])] >= 1, "an operand from nowhere"
            assert values[int(equation[3])] >= 1, "an operand from nowhere"
            left, sign, right = int(equation[1]), equation[2], int(equation[3])
            assert is_plain(np.array([left]), sign, np.array([right]))
        assert 1 <= int(question.answer) <= 999


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("steps", STEPS)
def test_no_answer_is_frequent_and_no_shortcut_finds_many(steps, split):
    questions = [question for question, _ in examples(split, steps)]
    trained = Counter(question.answer for question, _ in many_examples("train", steps))
    for guess, count in trained.most_common(5):  # what training can teach, if the steps are known
        assert count < 0.01 * 6000
        assert sum(question.answer == guess for question in questions) < 0.015 * len(questions)
    if steps == 1:
        return
    shortcuts = {
        "last": lambda numbers: numbers[-1],
        "largest": max,
        "sum": sum,
        "sum of two": lambda numbers: numbers[0] + numbers[1],
        "difference of two": lambda numbers: abs(numbers[0] - numbers[1]),
        "product of two": lambda numbers: numbers[0] * numbers[1],
        "product": math.prod,
    }
    for name, shortcut in shortcuts.items():
        right = np.mean([str(shortcut(numbers_of(question))) == question.answer for question in questions])
        assert right < 0.1, name


def test_most_questions_need_a_calculation_that_few_others_need():
    for split, steps in itertools.product(SPLITS, STEPS):
        lists = Counter(tuple(calculations(solution)) for _, solution in examples(split, steps))
        # a tenth of the products and quotients without a carry are for validation
        assert max(lists.values()) <= (0.02 if split == "validation" else 0.01) * 2000
        assert {sign for done in lists for _, sign, _, _ in done} == set("+-*/")


def test_no_calculations_no_names_and_no_sentences_are_in_both_splits():
    lists, words, sentences, texts = [], [], [], []
    for split in SPLITS:
        drawn = [example for steps in STEPS for example in examples(split, steps)]
        done = [calculations(solution) for _, solution in drawn]
        assert all(split_of(one) == split for one in done)
        lists.append(
            {tuple((sign, *sorted((a, b))) if sign in "+*" else (sign, a, b) for a, sign, b, _ in d) for d in done}
        )
        names = set(itertools.chain(*NAMES[split]))
        things = {thing[0] for scene in scenes().values() for thing in scene.things[split]}
        words.append(names | things)
        texts.append({word for question, _ in drawn for word in re.findall(r"\w+", question.prompt)})
        assert words[-1] <= texts[-1], "every name and thing occurs"
        sentences.append(
            {
                sentence
                for scene in scenes().values()
                for part in (scene.beginnings, scene.events, scene.endings)
                for sentences_of in part.values()
                for sentence in sentences_of[split]
            }
        )
    assert lists[0].isdisjoint(lists[1])
    assert words[0].isdisjoint(words[1])
    assert sentences[0].isdisjoint(sentences[1])
    assert texts[0].isdisjoint(words[1])
    assert texts[1].isdisjoint(words[0])


def test_a_tenth_of_the_calculations_is_for_validation_and_the_order_of_factors_does_not_count():
    sums = [[(a, "+", b, a + b)] for a in range(10, 110) for b in range(10, 110)]
    assert np.mean([split_of(done) == "validation" for done in sums]) == pytest.approx(0.1, abs=0.01)
    assert all(split_of([(a, "+", b, r)]) == split_of([(b, "+", a, r)]) for [(a, _, b, r)] in sums)
    assert {split_of([(a, "-", b, 1)]) for a, b in itertools.permutations(range(20), 2)} == set(SPLITS)


@pytest.mark.parametrize(
    ("left", "operator", "right", "plain"),
    [
        *((43, "+", 156, True), (43, "+", 57, False), (950, "+", 60, False), (7, "+", 2, True)),
        *((207, "-", 105, True), (207, "-", 110, False), (15, "-", 207, False)),
        *((4, "*", 122, True), (122, "*", 4, True), (4, "*", 130, False), (12, "*", 11, False)),
        *((488, "/", 4, True), (489, "/", 4, False), (75, "/", 5, False), (132, "/", 12, False)),
    ],
)
def test_a_calculation_is_plain_if_it_is_done_digit_by_digit(left, operator, right, plain):
    assert is_plain(np.array([left]), operator, np.array([right])).tolist() == [plain]
