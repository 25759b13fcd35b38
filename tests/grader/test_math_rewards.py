"""Grading of mathematical answers: a suite of our own by category, the public cases, golds against themselves."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from run_builders import rows
from thought_builders import TAGS
from verdict_suite import Suite

from exgrpo_orlhf.grader import math
from exgrpo_orlhf.grader.answer import Answer
from exgrpo_orlhf.grader.boxes import last_box
from exgrpo_orlhf.grader.symbolic import computable
from exgrpo_orlhf.grader.thoughts import visible
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.rewards import Verifier

SUITE = Suite(Path(__file__).with_name("math_suite.jsonl"))


@pytest.mark.parametrize("category", SUITE.categories)
def test_suite(category):
    assert SUITE.misjudged(category, math.grade) == []


NOTATIONS = [  # gold, the same, others
    ("2023-05-01", ("2023-5-1", "2023/05/01", "May 1, 2023", "1 May 2023"), ("2023-01-05", "2017", "May 1, 2024")),
    ("5/1/2023", ("05/01/2023",), ("10/2/2023", "1/5/2023")),
    ("8:15", ("08:15", "8:15 AM"), ("16:30", "8:16")),
    ("12:30", ("12{:}30", "12\\text{:}30", "12:30 \\text{ p.m.}"), ("12:31", "24:60")),
    ("4:30 PM", ("16:30", "4:30", "4:30 \\text{ p.m.}"), ("4:30 AM", "5:30 PM")),
    ("3:2", ("3 : 2", "\\frac{3}{2}"), ("6:4", "2:3")),
    ("3-1", ("3 - 1", "3–1"), ("2-0", "1-3", "2")),
    ("1914-1918", ("1914–1918", "1914--1918", "1914 \\text{ to } 1918"), ("1939-1943", "-4")),
    ("10-20 \\text{ km}", ("10-20", "10\\text{-}20 \\text{ km}"), ("20-30", "10-20 \\text{ miles}")),
    ("6 - 5i", ("-5i + 6",), ("6 - 4i",)),
    ("H_2O", ("\\text{H}_2\\text{O}", "\\mathrm{H_2O}", "H₂O"), ("OH_2",)),
    ("P_1V_1", ("V_1P_1",), ("P_1V_2",)),
]


@pytest.mark.parametrize(("gold", "right", "wrong"), NOTATIONS)
def test_dates_times_scores_ranges_and_formulas_are_no_arithmetic(gold, right, wrong):
    for grade in (math.grade, math.grade_by_math_verify):
        for verdict, texts in (("correct", right), ("wrong", wrong)):
            graded = {text: grade(Answer(gold, f"\\boxed{{{text}}}")).verdict for text in texts}
            assert graded == dict.fromkeys(texts, verdict)


def test_public_cases(shared_data):
    cases = rows(shared_data / "grader_cases.jsonl")
    verdicts = [math.grade(Answer(case["gold"], case["response"])).verdict == "correct" for case in cases]
    wrong = [case["id"] for case, correct in zip(cases, verdicts, strict=True) if correct != case["label"]]
    assert len(wrong) <= 0.03 * len(cases), wrong


def test_public_reports(shared_data):
    cases = [*rows(shared_data / "verdicts_reports3.jsonl")]
    wrong = []
    for case in cases:
        meta = {name: case[name] for name in ("options", "tests") if name in case}
        grade = Verifier(case["kind"]).grade(Question.make("reports", "?", case["gold"], meta), case["response"])
        wrong += [case] if (grade.verdict == "correct") != case["correct"] else []
    assert (len(cases), wrong) == (58, [])


@pytest.fixture(scope="module")
def golds(shared_data) -> dict[str, list[str]]:
    fields = {"math500": "answer", "aime24": "expected_answer", "aime25": "expected_answer", "amc23": "answer"}
    fields |= {"minerva": "solution", "gsm8k": "answer"}
    texts = {
        name: [math.gold_texts(row[field])[0] for row in rows(shared_data / f"{name}_test.jsonl")]
        for name, field in fields.items()
    }
    valid = pq.read_table(shared_data / "exgrpo_valid.parquet", columns=["reward_model"]).to_pylist()
    return {**texts, "exgrpo_valid": [row["reward_model"]["ground_truth"] for row in valid]}


def test_a_gold_is_right_when_it_is_given(golds):
    for name, answers in golds.items():
        pairs = [(gold, f"So the final answer is $\\boxed{{{gold}}}$.") for gold in answers]
        missed = [gold for gold, response in pairs if math.grade(Answer(gold, response)).verdict != "correct"]
        assert len(missed) <= 0.005 * len(answers), (name, missed)


def test_another_question_s_gold_is_wrong(golds):
    """Not lenient by accident: golds of MATH-500 against the gold of the next question."""
    answers = golds["math500"]
    others = [pair for pair in zip(answers, [*answers[1:], answers[0]], strict=True) if pair[0] != pair[1]]
    same = [pair for pair in others if math.grade(Answer(pair[0], f"\\boxed{{{pair[1]}}}")).verdict == "correct"]
    assert same in ([], [("5", "x=5")])


def test_a_number_is_right_within_its_sentence_and_a_neighbour_is_not(golds):
    answers = golds["gsm8k"][:300]
    others = [str(int(gold.replace(",", "")) + 1) for gold in answers]
    for template in ("Therefore the answer is {}.", "<answer>{}</answer>", "Adding up, she has {} dollars", "#### {}"):
        for numbers, verdict in ((answers, "correct"), (others, "wrong")):
            graded = [math.grade(Answer(g, template.format(o))) for g, o in zip(answers, numbers, strict=True)]
            assert {each.verdict for each in graded} == {verdict}, template


@pytest.mark.parametrize(
    ("gold", "response", "verdict"),
    [
        (42, "\\boxed{42}", "correct"),
        (42.0, "\\boxed{42}", "correct"),
        (0.1, "\\boxed{\\frac{1}{10}}", "correct"),
        (-7, "\\boxed{7}", "wrong"),
        (["41", "42"], "\\boxed{42}", "correct"),
        (["41", 42], "\\boxed{43}", "wrong"),
        (True, "\\boxed{True}", "correct"),
        (None, "\\boxed{None}", "error"),
        ("", "\\boxed{42}", "error"),
        ("  ", "", "error"),
        ([], "\\boxed{42}", "error"),
        ({"a": 1}, "\\boxed{1}", "error"),
        (float("nan"), "\\boxed{nan}", "error"),
        ("\\boxed{}", "\\boxed{}", "error"),
    ],
)
def test_golds_that_are_not_text(gold, response, verdict):
    assert math.grade(Answer(gold, response)).verdict == verdict


@pytest.mark.parametrize(("begin", "end"), TAGS)
def test_thoughts_are_not_seen(begin, end):
    thoughts = (f"{begin}a{end}b", f"a{end}b", f"b{begin}a", f"b{begin}a{end}", f"{begin}c{end}b{begin}a")
    inner = ("[THINK]", "[/THINK]") if begin != "[THINK]" else ("<think>", "</think>")
    nested = (f"{begin}a{begin}b{end}c{end}b", f"{begin}a{inner[0]}b{inner[1]}c{end}b", f"{begin}a{inner[1]}c{end}b")
    for response in (*thoughts, *nested):
        assert visible(response) == "b", response
    cut = (f"{begin}a", f"{begin}a{inner[0]}b{inner[1]}c", f"{begin}a{inner[1]}c")
    for response in (*cut, f"{begin}a{end}", f"a{end}"):
        assert visible(response) == "", response


def test_the_last_box_with_something_in_it():
    assert last_box("\\boxed{1} \\boxed{ } \\boxed{2") == "1"
    assert last_box("\\boxed{\\boxed{3}}") == "3"
    assert last_box("\\boxed{x = \\boxed{3} + 1}") == "x = \\boxed{3} + 1"
    assert last_box("\\boxed{\\{1\\}}") == "\\{1\\}"
    assert last_box("none") is None
    text = r"So $\boxed{\frac{1}{2}}$, not $\boxed{3}$. Really \boxed{\text{(A) } \{1,2\}}."
    assert last_box(text) == r"\text{(A) } \{1,2\}"
    assert last_box(r"\fbox{7}") == "7"
    assert last_box(r"$\boxed 9$ it is") == "9"
    assert not last_box(r"no primes: $\boxed{}$")
    assert not last_box(r"\boxed{open")


NEVER = (
    "9^{9^{9^9}}", "9**9**9**9", "9^9^9^9", "999999999!", "((9!)!)!", "\\binom{10^{9}}{5}", "\\prod_{k=1}^{10^{8}} k",
    "(10^{9999})^{9999}", "2^{10^{10}}", "(x+1)^{5000}", "1" * 500, "(" * 50 + "1" + ")" * 50, "\\Gamma(10^{9})",
    "__import__", '"a"',
)  # fmt: skip
ORDINARY = (
    "x^{2024}+1", "2^{2024}", "3 \\cdot 10^{35}", "100!", "\\binom{100}{50}", "x^{2^{3}}", "e^{-x^2}", "(x+1)^{10}",
)  # fmt: skip


@pytest.mark.parametrize(("text", "begun"), [*((text, False) for text in NEVER), *((text, True) for text in ORDINARY)])
def test_what_would_never_end_is_not_begun(text, begun):
    assert computable(text) == begun


@pytest.mark.parametrize(
    ("response", "fits"),
    [
        ("<think>a</think><answer>\\boxed{42}</answer>", True),
        ("a</think>\n<answer>42</answer>\n", True),
        ("<think>a</think>\\boxed{42}", False),
        ("<answer>42</answer>", False),
        ("<think>a</think><answer>42</answer> and more", False),
        *(
            (f"{begin}a{end}<answer>42</answer>", "solution" not in end and "RESPONSE" not in end)
            for begin, end in TAGS
        ),
        ("<think>the <reasoning></think><answer>42</answer>", True),
        ("[THINK]a</think>[/THINK]<answer>42</answer>", True),
        ("[THINK]a[/THINK][THINK]b[/THINK]<answer>42</answer>", False),
    ],
)
def test_a_format_can_be_asked_for(response, fits):
    question = Question.make("test", "", "42")
    assert Verifier("math").grade(question, response).correct
    grade = Verifier("math", format="think_answer").grade(question, response)
    assert (grade.verdict, grade.reward) == (("correct", 1.0) if fits else ("wrong", 0.0))
