"""What the sets of all tasks share: splits, seeds, refused settings, and graders that take any text."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from exgrpo_orlhf.records import Question
from exgrpo_orlhf.rewards import Verifier
from exgrpo_orlhf.tasks import modular_chains
from exgrpo_orlhf.tasks.modular_chains import Beliefs, ModularChains
from exgrpo_orlhf.tasks.word_problems import WordProblems


@pytest.mark.parametrize(("made", "count"), [(ModularChains, 2000), (WordProblems, 700)])
def test_train_and_validation_never_overlap(made, count):
    train = {q.id for seed in range(3) for q in made(count, (3,), seed=seed).load()}
    validation = {q.id for seed in range(3) for q in made(count // 10, (3,), seed=seed, split="validation").load()}
    assert train.isdisjoint(validation)
    assert len(train) > count  # other seeds draw other questions of the same split
    assert len(validation) > count // 10


@pytest.mark.parametrize(
    ("made", "prompt", "question_id"),
    [
        (ModularChains, "1+6+7=", "c7871b35c5ac6ede1cedf085c405832a"),
        (
            WordProblems,
            "On Sunday Kenji cycles 153 kilometres of a tour. On each of the next 2 days he cycles 21 "
            "kilometres. How many kilometres does Kenji cycle altogether?",
            "15f425b3c8e3aed65b2148a3327ffb34",
        ),
    ],
)
def test_the_same_seed_gives_the_same_questions_in_every_process(made, prompt, question_id):
    script = (
        f"from {made.__module__} import {made.__name__}\n"
        f"print(*[q.id for q in {made.__name__}(count=50, seed=3).load()])"
    )
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert other == [q.id for q in made(count=50, seed=3).load()]
    assert other != [q.id for q in made(count=50, seed=4).load()]
    first = made(count=50, seed=3).load()[0]
    assert (first.prompt, first.id) == (prompt, question_id)  # and on every machine


def test_questions_are_distinct_balanced_and_say_how_many_operands_they_have():
    operands, shares = (3, 4, 5, 6, 7), (129, 129, 128, 128, 128)
    questions = ModularChains(count=sum(shares), operands=operands).load()
    assert len({q.id for q in questions}) == len({q.prompt for q in questions}) == sum(shares)
    assert Counter(q.meta["operands"] for q in questions) == dict(zip(operands, shares, strict=True))
    assert [q.meta["operands"] for q in questions[:8]] != [3] * 8  # shuffled
    assert {len(re.findall(r"\d+", q.prompt)) - q.meta["operands"] for q in questions} == {0}


@pytest.mark.parametrize("made", [ModularChains, WordProblems])
def test_every_set_gives_its_questions_with_a_right_response(made):
    kind = {ModularChains: "modular_chain", WordProblems: "word_problem"}[made]
    examples = made(count=60).examples()
    assert [question for question, _ in examples] == made(count=60).load()
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


@pytest.mark.parametrize("prompt", ["", "7=", "7+5", "7+5=\n", "17+5=", "7/5=", "٧+5=", (("user", "7+5="),)])
def test_a_question_of_another_kind_is_named_in_the_error(prompt):
    with pytest.raises(ValueError, match="not a modular chain"):
        modular_chains.grade(Question.make("made", prompt, "2"), "#2")


SHARED = [
    (dict(count=0), r"count .* at least 1, got 0"),
    (dict(count=2.0), r"count .* integer .* got 2\.0"),
    (dict(count=True), r"count .* got True"),
    (dict(seed=-1), r"seed .* at least 0, got -1"),
    (dict(split="test"), r"split .* 'train', 'validation'; got 'test'"),
]
OPERANDS = [
    (dict(operands=()), r"operands .* got \(\)"),
    (dict(operands=(1, 3)), r"operands .* at least 2.* got \(1, 3\)"),
    (dict(operands=(3, 3)), r"operands .* distinct .* got \(3, 3\)"),
    (dict(operands=[3, 4]), r"operands .* tuple .* got \[3, 4\]"),
    (dict(operands=3), r"operands .* got 3"),
]


@pytest.mark.parametrize(
    ("made", "fields", "message"),
    [
        *((ModularChains, *case) for case in SHARED + OPERANDS),
        *((WordProblems, *case) for case in SHARED),
        (ModularChains, dict(together=0), r"together must be an integer of at least 1, got 0"),
        (ModularChains, dict(count=136, operands=(2,)), r"count .* at most 135 distinct train .* got 136"),
        (ModularChains, dict(count=16, operands=(2,), split="validation"), r"count .* at most 15 distinct validation"),
    ],
)
def test_a_field_out_of_range_is_named_with_what_is_allowed(made, fields, message):
    with pytest.raises(ValueError, match=rf"^{made.__name__}\.{message}"):
        made(**fields)


@pytest.mark.parametrize("name", ["false_share", "strength", "slip"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "0.5", None, True])
def test_a_share_out_of_range_is_named_with_what_is_allowed(name, value):
    with pytest.raises(ValueError, match=rf"^Beliefs\.{name} must be a number from 0 to 1, got "):
        Beliefs(**dict(false_share=0.1, strength=0.1, slip=0.1) | {name: value})
