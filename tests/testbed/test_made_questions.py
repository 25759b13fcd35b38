"""What the sets of all tasks share: splits, seeds, and graders that take any text."""

from __future__ import annotations

import random
import re
from collections import Counter

import numpy as np
import pytest
from run_builders import python

from exgrpo_orlhf.records import Question
from exgrpo_orlhf.rewards import Verifier
from exgrpo_orlhf.testbed import modular_chains, word_problems
from exgrpo_orlhf.testbed.modular_chains import ModularChains
from exgrpo_orlhf.testbed.word_problems import WordProblems

STORY = "On Sunday Kenji cycles 153 kilometres of a tour. On each of the next 2 days he cycles 21 kilometres. How many \
kilometres does Kenji cycle altogether?"
FIRST = [
    (ModularChains, "1+6+7=", "c7871b35c5ac6ede1cedf085c405832a"),
    (WordProblems, STORY, "15f425b3c8e3aed65b2148a3327ffb34"),
]


@pytest.mark.parametrize(("made", "prompt", "question_id"), FIRST)
def test_the_same_seed_gives_the_same_questions_in_every_process(made, prompt, question_id):
    name = made.__name__
    script = f"from {made.__module__} import {name}; print(*[q.id for q in {name}(count=50, seed=3).load()])"
    other = python("-c", script).stdout.split()
    assert other == [q.id for q in made(count=50, seed=3).load()]
    assert other != [q.id for q in made(count=50, seed=4).load()]
    first = made(count=50, seed=3).load()[0]
    assert (first.prompt, first.id) == (prompt, question_id)  # and on every machine


@pytest.mark.parametrize(
    ("made", "levels", "meta"), [(ModularChains, (3, 4, 5, 6, 7), "operands"), (WordProblems, (1, 2, 4), "steps")]
)
def test_questions_are_distinct_balanced_shuffled_and_say_their_level(made, levels, meta):
    shares = [129, 129, *[128] * (len(levels) - 2)]
    questions = made(sum(shares), levels).load()
    assert len({q.id for q in questions}) == len({q.prompt for q in questions}) == sum(shares)
    assert Counter(q.meta[meta] for q in questions) == dict(zip(levels, shares, strict=True))
    assert [q.meta[meta] for q in questions[:8]] != [levels[0]] * 8
    if made is ModularChains:
        assert {len(re.findall(r"\d+", q.prompt)) - q.meta["operands"] for q in questions} == {0}


@pytest.mark.parametrize(
    ("made", "levels", "kind"),
    [(ModularChains, (3, 4, 5), "modular_chain"), (WordProblems, (1, 2, 3, 4), "word_problem")],
)
def test_every_set_gives_its_questions_with_a_right_response(made, levels, kind):
    for split in ("train", "validation"):
        examples = made(200, levels, split=split).examples()
        assert [question for question, _ in examples] == made(200, levels, split=split).load()
        assert all(Verifier(kind).grade(question, response).sound for question, response in examples)


@pytest.mark.parametrize("made", [ModularChains, WordProblems])
def test_loading_leaves_the_global_generators_alone(made):
    before = np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    made(count=20).load()
    assert (np.random.get_state()[1] == before[0]).all()  # noqa: NPY002
    assert random.getstate() == before[1]


def test_no_text_makes_the_checker_raise():
    letters, question = random.Random(0), Question.make("modular_chains", "7+5*3=", "6")
    for _ in range(3000):
        text = "".join(chr(letters.choice([*b"+-*237=#", 0, 10, 0xD800, 0x0663, 0x2028, 0x1F600])) for _ in range(11))
        assert modular_chains.grade(question, text).reward in (0.0, 1.0)


NO_CHAINS = ("", "7=", "7+5", "7+5=\n", "17+5=", "7/5=", "٧+5=", (("user", "7+5="),))
NO_PROBLEMS = [("How many?", "39"), ((("user", "4 and 5?"),), "9")]
NO_PROBLEMS += [("4 and 5?", answer) for answer in ("39.5", "", "٣")]


@pytest.mark.parametrize(
    ("grade", "message", "prompt", "answer"),
    [(modular_chains.grade, "not a modular chain", prompt, "2") for prompt in NO_CHAINS]
    + [(word_problems.grade, "^not a word problem", *row) for row in NO_PROBLEMS],
)
def test_a_question_of_another_kind_is_named_in_the_error(grade, message, prompt, answer):
    with pytest.raises(ValueError, match=message):
        grade(Question.make("made", prompt, answer), "#2. The answer is 39.")
