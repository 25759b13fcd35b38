import re
from collections import Counter
from itertools import product

import numpy as np
import pytest

from exgrpo_orlhf.records import Question
from exgrpo_orlhf.testbed.modular_chains import (
    FACTS,
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
    return Question.make("modular_chains", prompt, right_reasoning(prompt).rpartition("#")[2])


def steps_of(reasoning: str) -> list[tuple[tuple[int, str, int], int]]:
    return [((int(s[0]), s[1], int(s[2])), int(s[4])) for s in reasoning.split(";")[:-1]]


def test_all_300_facts_are_arithmetic_mod_10():
    assert len(set(FACTS)) == 300
    for left, operator, right in FACTS:
        python = eval(f"({left} {operator} {right}) % 10")
        assert result((left, operator, right)) == python
        assert right_reasoning(f"{left}{operator}{right}=") == f"{left}{operator}{right}={python};#{python}"


def test_chains_asked_together_are_reasoned_one_by_one_and_answered_together():
    assert right_reasoning("1-9*3+4=") == "1-9=2;2*3=6;6+4=0;#0"
    assert right_reasoning("7+5;2*3-9=") == "7+5=2;#2;2*3=6;6-9=7;#7;#27"
    for question in ModularChains(count=50, operands=(2, 4), together=3).load():
        parts = [right_reasoning(f"{part}=") for part in question.prompt[:-1].split(";")]
        assert len(parts) == 3
        assert right_reasoning(question.prompt) == ";".join([*parts, f"#{question.answer}"])
        assert question.answer == "".join(part[-1] for part in parts)
    for prompt in ("7+5;=", ";7+5=", "7+5=;2*3=", "7+5,2*3="):
        with pytest.raises(ValueError, match="not a modular chain"):
            right_reasoning(prompt)


@pytest.mark.parametrize("together", [1, 3])
def test_right_reasoning_is_correct_and_sound_and_what_a_teacher_without_errors_writes(together):
    rng = np.random.default_rng(0)
    for question in ModularChains(count=60, operands=(2, 3, 8), together=together).load():
        right = right_reasoning(question.prompt)
        mark = grade(question, right)
        assert (mark.verdict, mark.reward, mark.sound) == ("correct", 1.0, True)
        assert write_reasoning(rng, question, Beliefs(false_share=0, strength=0, slip=0)) == right
        assert question.source == "modular_chains"


@pytest.mark.parametrize("prompt", ["7+5*3=", "0*0-0=", "9-8=", "1+2-3*4+5=", "7+5;2*3=", "7+5*3;9-8;0*0-0="])
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
        mark = grade(question, edit)
        assert mark.sound is False, edit
        assert mark.correct == edit.endswith(f"#{question.answer}"), edit
        assert mark.reward == float(mark.correct)


# Each right answer here is a lucky guess. Only the exact answer after the last mark counts.
RESPONSES = {
    "7+5*3=": {
        # Steps that are missing, one too many, false, of another value or operator.
        "correct": [
            *("#6", "2*3=6;#6", "7+5=2;2*3=6;6+0=6;#6", "7+5=2;5*3=6;#6", "7+5=4;4*3=6;#6", "7+5=2;2+3=6;#6"),
            *("7+5=2;2*3=8;#6", "#7+5=2;2*3=6;#6"),
        ],
        "no_answer": ["", "7+5=2;2*3=6;", "7+5=2;2*3=6;#", "7+5=2;2*3=6;#6#"],
        "wrong": [f"7+5=2;2*3=6;#{answer}" for answer in ("6 ", "06", "-6", "６", "6#5")],
    },
    "7+5;2*3-9=": {
        # No reasoning, a result that is missing, false facts in one chain, another order.
        "correct": [
            *("#27", "7+5=2;#2;2*3=6;6-9=7;#27", "7+5=2;#2;2*3=5;5-9=7;#7;#27", "2*3=6;6-9=7;#7;7+5=2;#2;#27"),
        ],
        "wrong": [f"7+5=2;#2;2*3=6;6-9=7;#7{end}" for end in ("", ";#2", ";#72", ";#2;7")],
        "no_answer": ["7+5=2;#2;2*3=6;6-9=7;#7;#"],
    },
}


@pytest.mark.parametrize("prompt", RESPONSES)
def test_the_answer_after_the_last_mark_decides_and_no_other_reasoning_is_sound(prompt):
    for verdict, responses in RESPONSES[prompt].items():
        for response in responses:
            mark = grade(chain(prompt), response)
            assert (mark.verdict, mark.reward, mark.sound) == (verdict, float(verdict == "correct"), False), response


@pytest.mark.parametrize(("together", "share"), [(3, 0.01), (4, 0.005)])
def test_together_no_fixed_answer_is_right_for_one_question_in_a_hundred(together, share):
    answers = Counter(q.answer for q in ModularChains(count=4000, operands=(2, 3), together=together).load())
    assert answers.most_common(1)[0][1] / answers.total() < share


def test_a_validation_question_has_no_chain_of_a_training_question():
    for split in ("train", "validation"):
        for question in ModularChains(count=60, operands=(2, 3), together=4, split=split).load():
            assert {split_of(f"{part}=") for part in question.prompt[:-1].split(";")} == {split}


def test_every_question_is_in_one_split_a_tenth_of_them_in_validation():
    prompts = ["".join(chain) for chain in product("0123456789", "+-*", "0123456789", "+-*", "0123456789", "=")]
    splits = Counter(split_of(prompt) for prompt in prompts)
    assert splits.total() == 9000
    assert splits["validation"] == pytest.approx(900, abs=90)


def test_the_most_that_may_be_asked_for_can_be_drawn():
    assert len(ModularChains(count=135, operands=(2,)).load()) == 135
    assert len(ModularChains(count=15, operands=(2,), split="validation").load()) == 15
    assert len(ModularChains(count=450, operands=(2,), split="validation", together=2).load()) == 450


def test_false_facts_are_as_many_as_said_fixed_and_wrong():
    beliefs = Beliefs(false_share=0.3, strength=0.7, slip=0.03, seed=5)
    assert len(beliefs.false_facts) == 90
    assert all(value in range(10) and value != result(fact) for fact, value in beliefs.false_facts.items())
    assert beliefs.false_facts == Beliefs(0.3, 0.1, 0.5, seed=5).false_facts
    assert beliefs.false_facts != Beliefs(0.3, 0.7, 0.03, seed=6).false_facts
    assert len(Beliefs(1.0, 1.0, 0.0).false_facts) == 300


@pytest.mark.parametrize("together", [1, 4])
def test_flawed_reasoning_carries_on_from_the_wrong_value_to_its_answer(together):
    rng = np.random.default_rng(0)
    for question in ModularChains(count=200, operands=(2, 3, 5), together=together).load():
        reasoning = write_reasoning(rng, question, Beliefs(0.5, 0.5, 0.5))
        parts = re.split("(?<=#[0-9]);", reasoning)
        if together > 1:
            assert parts.pop() == "#" + "".join(part[-1] for part in parts)
        for part, prompt in zip(parts, question.prompt[:-1].split(";"), strict=True):
            value = int(prompt[0])
            for (left, operator, right), after in steps_of(part):
                assert left == value
                assert f"{operator}{right}" in prompt
                value = after
            assert part.endswith(f";#{value}")
            assert len(part) == 6 * (question.meta["operands"] - 1) + 2


def test_beliefs_are_written_as_often_as_said():
    rng, beliefs = np.random.default_rng(0), Beliefs(false_share=0.4, strength=0.7, slip=0.1)
    false, true = [], []
    for question in ModularChains(count=3000).load():
        for fact, after in steps_of(write_reasoning(rng, question, beliefs)):
            believed = beliefs.false_facts.get(fact, result(fact))
            (false if fact in beliefs.false_facts else true).append(after == believed)
    assert np.mean(false) == pytest.approx(0.9 * 0.7 + 0.1 * 0.1, abs=0.02)
    assert np.mean(true) == pytest.approx(0.9 + 0.1 * 0.1, abs=0.02)
