"""Multiple choice: what counts as an option given, and which of several counts."""

from __future__ import annotations

from itertools import cycle

import pyarrow.parquet as pq
import pytest
from thought_builders import TAGS

from exgrpo_orlhf.rewards.answer import Answer
from exgrpo_orlhf.rewards.text import choice

FOUR = ["Paris", "London", "The city of Rome", "12"]
# By verdict: gold and response.
WITHOUT_OPTIONS = {
    "correct": (
        ("B", "\\boxed{B}"), ("B", "\\boxed{b}"), ("B", "\\boxed{(B)}"), ("B", "\\boxed{\\text{(B)}}"),
        ("B", "\\boxed{\\textbf{B}}"), ("B", "\\boxed{B. because}"), ("B", "\\boxed{\\text{B) London}}"),
        ("B", "\\boxed{A} no, \\boxed{B}"), ("B", "ANSWER: B"), ("B", "So the last line is\nANSWER: B"),
        ("B", "Answer: b"), ("B", "The answer is (B)."), ("B", "The answer is **B**"), ("B", "**Answer:** B"),
        ("B", "**Answer: (B)**"), ("B", "Final answer is B"), ("B", "the correct answer is option B because it is"),
        ("B", "The correct option is $B$."), ("B", "I choose B."), ("B", "Option B is correct."),
        ("B", "(B) is the right one"), ("B", "I think it's (B)."), ("B", "B"), ("B", "(b)"), ("B", "B."),
        ("B", "B. it can't be A or C"), ("B", "答案是B"), ("B", "<answer>B</answer>"),
        ("B", "<answer>(B) London</answer>"), ("B", "<think>The answer is A</think>B"),
        *(("B", f"{begin}The answer is A{end}B") for begin, end in TAGS),
        ("B", "The answer is A. On reflection, the answer is B."), ("D", "D) 12\n"),
        ("\\text{(C)}", "The answer is C."), ("\\mathrm{E}", "\\boxed{E}"), ("(A) Cecile", "A"),
        ("(A) Cecile", "\\boxed{Cecile}"), ("2", "\\boxed{2}"), ("2", "The answer is 2."), ("J", "The answer is J"),
        ("B", "The answer is not A but B because of this"), ("A", "It is not B, it is A"), ("B", "B, not C"),
        ("B", "The answer is B and A is wrong."), ("A", "\\boxed{(A) (A)}"), ("B", "$B$"), ("B", "$\\text{B}$"),
        ("B", "“B”"), ("B", "answer is “B”"), ("B", "选B"), ("B", "The answer is A. No, the answer is B."),
        ("B", "I choose A. Answer: B"), ("C", "C. Option D is incorrect."), ("C", "C. Option (D) isn't right."),
        ("C", "The correct answer is C. Option A is incorrect. Option **B** was wrong. Option D is not."),
        ("B", "Option B is correct. Option C is not correct."),
        ("B", "The answer is B. In contrast, choice C is ruled out."),
        ("D", "The answer is D. Option B says the opposite."), ("D", "The answer is D, option (B) is too small."),
        ("C", "Option C seems best here."), ("C", "The answer is A. Wait, no: option C."),
        ("C", "The answer is A. On reflection I choose option C as the best."),
    ),
    "wrong": (
        ("B", "\\boxed{B} no, \\boxed{A}"), ("B", "\\boxed{42}"), ("B", "\\boxed{Z}"),
        ("A", "<think>I think B</think>\n\\boxed{B}"), ("A", "The answer is A. On reflection, the answer is B."),
        ("(A) Cecile", "C"), ("2", "The answer is 3."), ("C", "B, not C"), ("B", "The answer is B or C."),
        ("C", "The answer is B or C."), ("B", "The answer is both A and B"), ("A", "The answer is (A)(B)."),
        ("B", "(A) or (B)"), ("A", "\\boxed{(A) or (B)}"), ("A", "\\boxed{(A)(B)}"), ("A", "\\boxed{(A), (B)}"),
        ("B", "\\boxed{(A) or (B)}"), ("B", "\\boxed{(A)(B)}"), ("B", "\\boxed{(A), (B)}"),
    ),
    "no_answer": (
        ("B", "<think>The answer is B</think>"), *(("B", f"{begin}The answer is B") for begin, _ in TAGS),
        ("A", "The answer is a matter of taste."), ("A", "I am not sure."),
        ("A", ""), ("B", "The answer is not B."), ("C", "It isn't C."), ("B", "A and B"),
        ("C", "Option C is incorrect."),
    ),
    "error": (
        ("", "A"), ("hello", "A"),
    ),
}  # fmt: skip
WITH_OPTIONS = {
    "correct": (
        ("B", "\\boxed{London}"), ("B", "London"), ("London", "The answer is B."),
        ("C", "\\boxed{the city of Rome.}"), ("C", "It is in Italy, I am sure.\nThe city of Rome"),
        ("D", "\\boxed{12}"), ("A", "The answer is Paris."), ("A", "**Paris**"),
        ("A", "I think the town is **Paris**."), ("B", "It is B) London, of course"),
        ("B", "The answer is B. The answer is E."),
    ),
    "wrong": (
        ("A", "\\boxed{12}"), ("B", "The answer is Paris."), ("B", "\\boxed{E}"),
    ),
    "no_answer": (
        ("B", "The answer is not London."), ("B", "The answer is E."),
    ),
    "error": (
        ("E", "\\boxed{E}"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("cases", "meta"), [(WITHOUT_OPTIONS, {}), (WITH_OPTIONS, {"options": FOUR})])
def test_what_an_option_is_and_which_of_several_counts(cases, meta):
    """With options, the set is checked and their texts count."""
    rows = [(gold, response, verdict) for verdict, pairs in cases.items() for gold, response in pairs]
    verdicts = [choice.grade(Answer(gold, response, meta=meta)).verdict for gold, response, _ in rows]
    assert [(*row, verdict) for row, verdict in zip(rows, verdicts, strict=True) if row[2] != verdict] == []


@pytest.mark.parametrize(
    ("options", "gold", "response", "verdict"),
    [
        (("-5", "3"), "A", "\\boxed{5}", "wrong"),
        (("5", "-5"), "B", "\\boxed{-5}", "correct"),
        (("5", "-5"), "-5", "\\boxed{B}", "correct"),
        (("5", "-5"), "A", "\\boxed{(A) -5}", "wrong"),
        (("-x", "2x"), "A", "\\boxed{x}", "wrong"),
        (("0.5", "5"), "B", "\\boxed{.5}", "wrong"),
        (("5!", "24"), "A", "\\boxed{5}", "wrong"),
        (("Stop!", "Go"), "A", "\\boxed{stop}", "correct"),
        (("x-ray", "10-20"), "B", "\\boxed{10 - 20}", "correct"),
    ],
)
def test_a_sign_makes_another_option(options, gold, response, verdict):
    assert choice.grade(Answer(gold, response, meta={"options": options})).verdict == verdict


def test_options_may_have_labels():
    for response, verdict in (("\\boxed{two}", "correct"), ("The answer is 3", "no_answer")):
        assert choice.grade(Answer("2", response, meta={"options": {"1": "one", "2": "two"}})).verdict == verdict


def test_mmlu_pro_golds(shared_data):
    rows = pq.read_table(shared_data / "mmlu_pro_test.parquet", columns=["options", "answer"]).to_pylist()[::40]
    templates = ("\\boxed{{{}}}", "So the answer is ({}).", "Answer: {}", "{}", "{}. That is it")
    for row, template in zip(rows, cycle(templates)):
        for letter, verdict in ((row["answer"], "correct"), ("AB"[row["answer"] == "A"], "wrong")):
            answer = Answer(row["answer"], template.format(letter), meta={"options": row["options"]})
            assert choice.grade(answer).verdict == verdict
