"""Multiple choice: what counts as an option given, and which of several counts."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from verdict_suite import Suite

from exgrpo_orlhf.grader import choice
from exgrpo_orlhf.grader.answer import Answer
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.rewards import Verifier

SUITE = Suite(Path(__file__).with_name("choice_suite.jsonl"))


@pytest.mark.parametrize("category", SUITE.categories)
def test_what_an_option_is_and_which_of_several_counts(category):
    """With options, the set is checked and their texts count; a sign makes another option."""
    assert SUITE.misjudged(category, choice.grade) == []


def test_mmlu_pro_golds(shared_data):
    rows = pq.read_table(shared_data / "mmlu_pro_test.parquet", columns=["options", "answer"]).to_pylist()[::40]
    templates = ("\\boxed{{{}}}", "So the answer is ({}).", "Answer: {}", "{}", "{}. That is it")
    for row, template in zip(rows, cycle(templates)):
        for letter, verdict in ((row["answer"], "correct"), ("AB"[row["answer"] == "A"], "wrong")):
            answer = Answer(row["answer"], template.format(letter), meta={"options": row["options"]})
            assert choice.grade(answer).verdict == verdict


def test_a_gold_that_is_a_number_reaches_the_grader_as_one():
    question = Question.make("test", "", 2, {"options": ["2", "3", "4", "5"]})
    assert [Verifier("choice").grade(question, f"\\boxed{{{text}}}").correct for text in "CA4"] == [True, False, True]
