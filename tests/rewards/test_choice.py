"""Multiple choice: what counts as an option given, and which of several counts."""

from __future__ import annotations

from itertools import cycle

import pyarrow.parquet as pq
import pytest

from exgrpo_orlhf.rewards.answer import Answer
from exgrpo_orlhf.rewards.text import choice

FOUR = ["Paris", "London", "The city of Rome", "12"]


@pytest.mark.parametrize(
    ("gold", "response", "verdict"),
    [
        ("B", "\\boxed{B}", "correct"),
        ("B", "\\boxed{b}", "correct"),
        ("B", "\\boxed{(B)}", "correct"),
        ("B", "\\boxed{\\text{(B)}}", "correct"),
        ("B", "\\boxed{\\textbf{B}}", "correct"),
        ("B", "\\boxed{B. because}", "correct"),
        ("B", "\\boxed{\\text{B) London}}", "correct"),
        ("B", "\\boxed{A} no, \\boxed{B}", "correct"),
        ("B", "\\boxed{B} no, \\boxed{A}", "wrong"),
        ("B", "\\boxed{42}", "wrong"),
        ("B", "\\boxed{Z}", "wrong"),
        ("B", "ANSWER: B", "correct"),
        ("B", "So the last line is\nANSWER: B", "correct"),
        ("B", "Answer: b", "correct"),
        ("B", "The answer is (B).", "correct"),
        ("B", "The answer is **B**", "correct"),
        ("B", "**Answer:** B", "correct"),
        ("B", "**Answer: (B)**", "correct"),
        ("B", "Final answer is B", "correct"),
        ("B", "the correct answer is option B because it is", "correct"),
        ("B", "The correct option is $B$.", "correct"),
        ("B", "I choose B.", "correct"),
        ("B", "Option B is correct.", "correct"),
        ("B", "(B) is the right one", "correct"),
        ("B", "I think it's (B).", "correct"),
        ("B", "B", "correct"),
        ("B", "(b)", "correct"),
        ("B", "B.", "correct"),
        ("B", "B. it can't be A or C", "correct"),
        ("B", "答案是B", "correct"),
        ("B", "<answer>B</answer>", "correct"),
        ("B", "<answer>(B) London</answer>", "correct"),
        ("B", "<think>The answer is A</think>B", "correct"),
        ("B", "<think>The answer is B</think>", "no_answer"),
        ("A", "<think>I think B</think>\n\\boxed{B}", "wrong"),
        ("B", "The answer is A. On reflection, the answer is B.", "correct"),
        ("A", "The answer is A. On reflection, the answer is B.", "wrong"),
        ("A", "The answer is a matter of taste.", "no_answer"),
        ("A", "I am not sure.", "no_answer"),
        ("A", "", "no_answer"),
        ("D", "D) 12\n", "correct"),
        ("\\text{(C)}", "The answer is C.", "correct"),
        ("\\mathrm{E}", "\\boxed{E}", "correct"),
        ("(A) Cecile", "C", "wrong"),
        ("(A) Cecile", "A", "correct"),
        ("(A) Cecile", "\\boxed{Cecile}", "correct"),
        ("2", "\\boxed{2}", "correct"),
        ("2", "The answer is 2.", "correct"),
        ("2", "The answer is 3.", "wrong"),
        ("J", "The answer is J", "correct"),
        ("B", "The answer is not B.", "no_answer"),
        ("C", "It isn't C.", "no_answer"),
        ("B", "The answer is not A but B because of this", "correct"),
        ("A", "It is not B, it is A", "correct"),
        ("C", "B, not C", "wrong"),
        ("B", "B, not C", "correct"),
        ("B", "The answer is B or C.", "wrong"),
        ("C", "The answer is B or C.", "wrong"),
        ("B", "The answer is both A and B", "wrong"),
        ("B", "A and B", "no_answer"),
        ("B", "The answer is B and A is wrong.", "correct"),
        *((gold, f"\\boxed{{{both}}}", "wrong") for gold in "AB" for both in ("(A) or (B)", "(A)(B)", "(A), (B)")),
        ("A", "The answer is (A)(B).", "wrong"),
        ("B", "(A) or (B)", "wrong"),
        ("A", "\\boxed{(A) (A)}", "correct"),
        ("B", "$B$", "correct"),
        ("B", "$\\text{B}$", "correct"),
        ("B", "“B”", "correct"),
        ("B", "answer is “B”", "correct"),
        ("B", "选B", "correct"),
        ("", "A", "error"),
        ("hello", "A", "error"),
    ],
)
def test_without_options(gold, response, verdict):
    assert choice.grade(Answer(gold, response)).verdict == verdict


@pytest.mark.parametrize(
    ("gold", "response", "verdict"),
    [
        ("B", "\\boxed{London}", "correct"),
        ("B", "London", "correct"),
        ("London", "The answer is B.", "correct"),
        ("C", "\\boxed{the city of Rome.}", "correct"),
        ("C", "It is in Italy, I am sure.\nThe city of Rome", "correct"),
        ("D", "\\boxed{12}", "correct"),
        ("A", "\\boxed{12}", "wrong"),
        ("A", "The answer is Paris.", "correct"),
        ("B", "The answer is Paris.", "wrong"),
        ("A", "**Paris**", "correct"),
        ("A", "I think the town is **Paris**.", "correct"),
        ("B", "It is B) London, of course", "correct"),
        ("B", "The answer is not London.", "no_answer"),
        ("B", "The answer is E.", "no_answer"),
        ("B", "The answer is B. The answer is E.", "correct"),
        ("B", "\\boxed{E}", "wrong"),
        ("E", "\\boxed{E}", "error"),
    ],
)
def test_with_options_the_set_is_checked_and_texts_count(gold, response, verdict):
    assert choice.grade(Answer(gold, response, meta={"options": FOUR})).verdict == verdict


def test_options_may_have_labels():
    for response, verdict in (("\\boxed{two}", "correct"), ("The answer is 3", "no_answer")):
        assert choice.grade(Answer("2", response, meta={"options": {"1": "one", "2": "two"}})).verdict == verdict


def test_mmlu_pro_golds(shared_data):
    rows = pq.read_table(shared_data / "mmlu_pro_test.parquet", columns=["options", "answer"]).to_pylist()[::40]
    templates = ("\\boxed{{{}}}", "So the answer is ({}).", "Answer: {}", "{}", "{}. That is it")
    for row, template in zip(rows, cycle(templates)):
        for given, verdict in ((row["answer"], "correct"), ("AB"[row["answer"] == "A"], "wrong")):
            answer = Answer(row["answer"], template.format(given), meta={"options": row["options"]})
            assert choice.grade(answer).verdict == verdict
