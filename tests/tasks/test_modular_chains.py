from collections import Counter
from itertools import product

import numpy as np
import pytest

from exgrpo_orlhf.records import Question
from exgrpo_orlhf.tasks.modular_chains import (
    FACTS,
    PRESETS,
    Beliefs,
    ModularChains,
    grade,
    result,
    right_reasoning,
    split_of,
    write_reasoning,
)

ALPHABET = "0123456789+-*=;#"


def chain(prompt: str) -> Question:
    return Question.make("modular_chains", prompt, right_reasoning(prompt)[-1])


def steps_of(reasoning: str) -> list[tuple[tuple[int, str, int], int]]:
    return [((int(s[0]), s[1], int(s[2])), int(s[4])) for s in reasoning.split(";")[:-1]]


def test_all_300_facts_are_arithmetic_mod_10():
    assert len(set(FACTS)) == 300
    for left, operator, right in FACTS:
        python = eval(f"({left} {operator} {right}) % 10")
        assert result((left, operator, right)) == python
        assert right_reasoning(f"{left}{operator}{right}=") == f"{left}{operator}{right}={python};#{python}"


def test_a_chain_is_evaluated_left_to_right():
    assert right_reasoning("7+5*3=") == "7+5=2;2*3=6;#6"
    assert right_reasoning("1-9*3+4=") == "1-9=2;2*3=6;6+4=0;#0"


def test_right_reasoning_is_correct_and_sound_and_what_a_teacher_without_errors_writes():
    rng = np.random.default_rng(0)
    for question in ModularChains(count=300, operands=(2, 3, 8)).load():
        right = right_reasoning(question.prompt)
        said = grade(question, right)
        assert (said.verdict, said.reward, said.sound) == ("correct", 1.0, True)
        assert write_reasoning(rng, question, Beliefs(false_share=0, strength=0, slip=0)) == right
        assert question.source == "modular_chains"


@pytest.mark.parametrize("prompt", ["7+5*3=", "0*0-0=", "9-8=", "1+2-3*4+5="])
def test_no_edit_of_one_character_is_sound_and_only_an_untouched_answer_is_correct(prompt):
    question, right = chain(prompt), right_reasoning(prompt)
    last = len(right) - 1
    edits = set()
    for i in range(len(right) + 1):
        edits |= {right[:i] + c + right[i:] for c in ALPHABET + " \n"}
        edits |= {right[:i] + c + right[i + 1 :] for c in ALPHABET + " \n" if i <= last}
        edits.add(right[:i] + right[i + 1 :])
    edits.discard(right)
    for edit in edits:
        said = grade(question, edit)
        assert said.sound is False, edit
        assert said.correct == edit.endswith(f"#{question.answer}"), edit
        assert said.reward == float(said.correct)


@pytest.mark.parametrize(
    ("response", "verdict"),
    [
        # A right answer without right reasoning is a lucky guess.
        ("#6", "correct"),  # no step
        ("2*3=6;#6", "correct"),  # a step is missing
        ("7+5=2;2*3=6;6+0=6;#6", "correct"),  # one too many
        ("7+5=2;5*3=6;#6", "correct"),  # not the value carried over
        ("7+5=4;4*3=6;#6", "correct"),  # false facts that end in the right answer
        ("7+5=2;2+3=6;#6", "correct"),  # another operator
        ("7+5=2;2*3=8;#6", "correct"),  # not the last step's value
        ("#7+5=2;2*3=6;#6", "correct"),
        # Only the exact answer after the last mark counts.
        ("", "no_answer"),
        ("7+5=2;2*3=6;", "no_answer"),
        ("7+5=2;2*3=6;#", "no_answer"),
        ("7+5=2;2*3=6;#6#", "no_answer"),
        ("7+5=2;2*3=6;#6 ", "wrong"),
        ("7+5=2;2*3=6;#06", "wrong"),
        ("7+5=2;2*3=6;#-6", "wrong"),
        ("7+5=2;2*3=6;#６", "wrong"),
        ("7+5=2;2*3=6;#6#5", "wrong"),
    ],
)
def test_the_answer_after_the_last_mark_decides_and_no_other_reasoning_is_sound(response, verdict):
    said = grade(chain("7+5*3="), response)
    assert (said.verdict, said.reward, said.sound) == (verdict, float(verdict == "correct"), False)


def test_every_question_is_in_one_split_a_tenth_of_them_in_validation():
    prompts = ["".join(chain) for chain in product("0123456789", "+-*", "0123456789", "+-*", "0123456789", "=")]
    splits = Counter(split_of(prompt) for prompt in prompts)
    assert splits.total() == 9000
    assert splits["validation"] == pytest.approx(900, abs=90)


def test_the_most_that_may_be_asked_for_can_be_drawn():
    assert len(ModularChains(count=135, operands=(2,)).load()) == 135
    assert len(ModularChains(count=15, operands=(2,), split="validation").load()) == 15


def test_false_facts_are_as_many_as_said_fixed_and_wrong():
    beliefs = Beliefs(false_share=0.3, strength=0.7, slip=0.03, seed=5)
    assert len(beliefs.false_facts) == 90
    assert all(value in range(10) and value != result(fact) for fact, value in beliefs.false_facts.items())
    assert beliefs.false_facts == Beliefs(0.3, 0.1, 0.5, seed=5).false_facts
    assert beliefs.false_facts != Beliefs(0.3, 0.7, 0.03, seed=6).false_facts
    assert len(Beliefs(1.0, 1.0, 0.0).false_facts) == 300


def test_flawed_reasoning_carries_on_from_the_wrong_value():
    rng = np.random.default_rng(0)
    for question in ModularChains(count=200).load():
        reasoning = write_reasoning(rng, question, Beliefs(0.5, 0.5, 0.5))
        value = int(question.prompt[0])
        for (left, operator, right), after in steps_of(reasoning):
            assert left == value
            assert f"{operator}{right}" in question.prompt
            value = after
        assert reasoning.endswith(f";#{value}")
        assert len(reasoning) == 6 * (question.meta["operands"] - 1) + 2


def test_beliefs_are_written_as_often_as_said():
    rng, beliefs = np.random.default_rng(0), Beliefs(false_share=0.4, strength=0.7, slip=0.1)
    false, true = [], []
    for question in ModularChains(count=3000).load():
        for fact, after in steps_of(write_reasoning(rng, question, beliefs)):
            believed = beliefs.false_facts.get(fact, result(fact))
            (false if fact in beliefs.false_facts else true).append(after == believed)
    assert np.mean(false) == pytest.approx(0.9 * 0.7 + 0.1 * 0.1, abs=0.02)
    assert np.mean(true) == pytest.approx(0.9 + 0.1 * 0.1, abs=0.02)


def test_presets_hold_what_their_names_say():
    assert {name: (b.false_share, b.strength, b.slip) for name, b in PRESETS.items()} == {
        "normal": (0.30, 0.7, 0.03),
        "weak": (0.45, 0.965, 0.03),
        "slips": (0.0, 0.0, 0.2),
    }
