"""docs/rewards.md rule by rule: the sentence, and answers that it decides."""

from __future__ import annotations

import pytest
from run_builders import ROOT

from exgrpo_orlhf.grader import choice, math
from exgrpo_orlhf.grader.answer import Answer
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.rewards import Verifier

PAGE = " ".join((ROOT / "docs/rewards.md").read_text().split())
MATH = [
    ("the last closed box, else", "6", "\\boxed{5} \\boxed{6} \\boxed{7", "correct"),
    ("else `<answer>…</answer>`, else the last statement", "5", "The answer is 6. <answer>5</answer>", "correct"),
    ("else the last statement", "6", "The answer is 5. No, the answer is 6.", "correct"),
    ("never inside `<think>…</think>`", "5", "<think>\\boxed{5}</think> no idea", "no_answer"),
    ("nothing before a thought's end counts", "5", "[THINK]\\boxed{6}[/THINK]The answer is 5.", "correct"),
    ("a thought that is cut off hides the rest", "5", "◁think▷So \\boxed{5}", "no_answer"),
    ("before it opens a thought counts if nothing follows", "5", "\\boxed{5}<thought>Is it \\boxed{6}?", "correct"),
    ("`analysis… assistantfinal…` | gpt-oss", "5", "<|channel|>analysis<|message|>\\boxed{5}<|end|>", "no_answer"),
    ("ends a thought of its own family alone", "5", "<think>\\boxed{5}</reasoning>5", "no_answer"),
    ("Compared as text, number, tuple, set, interval, matrix", "(1, 2)", "\\boxed{(1,2)}", "correct"),
    ("Compared as text, number, tuple, set, interval, matrix", "(1, 2)", "\\boxed{(2,1)}", "wrong"),
    ("Compared as text, number, tuple, set, interval, matrix", "\\{1, 2\\}", "\\boxed{\\{2,1\\}}", "correct"),
    ("Compared as text, number, tuple, set, interval, matrix", "[1, 2)", "\\boxed{[1, 2]}", "wrong"),
    ("and by math-verify where these do not decide", "\\frac{x+1}{2}", "\\boxed{\\frac12 + \\frac x2}", "correct"),
    ("A gold answer that is a single option letter is graded as a choice", "B", "The answer is (B).", "correct"),
    ("any of them is accepted", ["2", "-2"], "\\boxed{-2}", "correct"),
    ("any of them is accepted", ["2", "-2"], "\\boxed{3}", "wrong"),
    ("the other kinds as text, as it is written", 27.0, "\\boxed{27}", "correct"),
    ('"not B" and "not 5" are no answer', "B", "The answer is not B.", "no_answer"),
    ('"B or C", `\\boxed{(A) or (B)}` and `\\boxed{(A)(B)}` are wrong', "B", "The answer is B or C.", "wrong"),
    ('"not B" and "not 5" are no answer', "5", "The answer is not 5.", "no_answer"),
    ('"B or C", `\\boxed{(A) or (B)}` and `\\boxed{(A)(B)}` are wrong', "A", "\\boxed{(A) or (B)}", "wrong"),
    ('"B or C", `\\boxed{(A) or (B)}` and `\\boxed{(A)(B)}` are wrong', "A", "\\boxed{(A)(B)}", "wrong"),
    ("a box counts before the content of `<answer>`", "6", "<answer>5</answer> \\boxed{6}", "correct"),
    ("a box counts before the content of `<answer>`", "5", "<answer>5</answer> \\boxed{6}", "wrong"),
    ("a box counts before the content of `<answer>`", "6", "\\boxed{6} <answer>5</answer>", "correct"),
    ("an equation is asked for (`2x + y = 3`), its right side alone is wrong", "2x + y = 3", "\\boxed{3}", "wrong"),
    ("for an assignment such as `x = 5`, the value is enough", "x = 5", "\\boxed{5}", "correct"),
    ("value is enough, also for `y = 2x + 1`", "y = 2x + 1", "\\boxed{2x + 1}", "correct"),
    ("8:15 is not 16:30", "8:15", "\\boxed{16:30}", "wrong"),
    ("10-20 is not -10", "10-20", "\\boxed{-10}", "wrong"),
    ("`H_2O` is not `OH_2`", "H_2O", "\\boxed{OH_2}", "wrong"),
    ("a missing am or pm is accepted", "8:15 pm", "\\boxed{8:15}", "correct"),
    ("`\\sqrt{g}/\\sqrt{l}` is `\\sqrt{g/l}`", "\\sqrt{g/l}", "\\boxed{\\sqrt{g}/\\sqrt{l}}", "correct"),
    ("unless one of the answers has a modulus", "\\ln |x|", "\\boxed{\\ln x}", "wrong"),
    ("spacing, size and color commands are ignored", "5", "\\boxed{\\large 5\\,}", "correct"),
    ("`{1, 2}` is the set `\\{1, 2\\}`", "\\{1, 2\\}", "\\boxed{{2, 1}}", "correct"),
    ("however small they are", "2^{-99}", "\\boxed{2^{-98}}", "wrong"),
    ("a calculation with a wrong result is wrong", "5", "\\boxed{2 + 2 = 5}", "wrong"),
    ("a calculation with a wrong result is wrong", "5", "\\boxed{7 = 5}", "wrong"),
    ("a calculation with a wrong result is wrong", "5", "\\boxed{x = 2 + 3 = 5}", "correct"),
    ("Two per cent are allowed for rounding", "1.41", "\\boxed{\\sqrt{2} = 1.41}", "correct"),
    ("a different known unit is wrong", "5 \\text{ cm}", "\\boxed{5 \\text{ m}}", "wrong"),
    ("a missing unit is accepted", "5 \\text{ cm}", "\\boxed{5}", "correct"),
    ("a different number base is wrong", "204_5", "\\boxed{204_6}", "wrong"),
    ("also where the gold answer has none (`101_2` for 101)", "101", "\\boxed{101_2}", "wrong"),
    ("a base that the response leaves out is accepted", "101_2", "\\boxed{101}", "correct"),
    ("accepts any number that rounds to it", "4.5e33", "\\boxed{4.52 \\cdot 10^{33}}", "correct"),
    ("accepts any number that rounds to it", "4.5e33", "\\boxed{4.6 \\cdot 10^{33}}", "wrong"),
    ("accepts a fraction or an integer that rounds to it", "0.3333", "\\boxed{1/3}", "correct"),
    ("other numbers are compared to six digits", "0.33", "\\boxed{1/3}", "wrong"),
    ("other numbers are compared to six digits", "0.3333", "\\boxed{0.33333}", "wrong"),
    ("accepts any number that rounds to it", "6.67e-11", "\\boxed{6.674e-11}", "correct"),
    ("accepts any number that rounds to it", "6.67e-11", "\\boxed{6.7e-11}", "wrong"),
    ("large factorials and similar expressions are never evaluated", "5", "\\boxed{9^{9^{9^9}}}", "wrong"),
    ("large factorials and similar expressions are never evaluated", "5", "\\boxed{999999!}", "wrong"),
    ("number words (*seven*)", "7", "\\boxed{seven}", "wrong"),
    ("other units of the same quantity", "3 \\text{ hours}", "\\boxed{180 \\text{ minutes}}", "wrong"),
    ("decimals of irrational numbers (3.1416 for π)", "\\pi", "\\boxed{3.1416}", "wrong"),
    ("500 % for 5 is graded correct though it is wrong", "5", "\\boxed{500\\%}", "correct"),
]
OPTIONS = {"options": ["Paris", "London"]}
CHOICE = [
    ("the letter or digit of an option, boxed or stated", "B", "\\boxed{B}", {}, "correct"),
    ("the letter or digit of an option, boxed or stated", "2", "The answer is 2.", {}, "correct"),
    ("the last statement", "B", "The answer is A. On reflection, the answer is B.", {}, "correct"),
    ("also the option's text if the question has `options`", "B", "\\boxed{London}", OPTIONS, "correct"),
    ("also the option's text if the question has `options`", "A", "\\boxed{London}", OPTIONS, "wrong"),
]
HERE = [
    ("the whole response, compared character by character", "exact", "", "a b", "a b", "correct"),
    ("the whole response, compared character by character", "exact", "", "a b", "a  b", "wrong"),
    ("the text after `#`", "modular_chain", "7+5*3=", "6", "7+5=2;2*3=6;#6", "correct"),
    ("the text after `#`", "modular_chain", "7+5*3=", "6", "7+5=2;2*3=6;#7", "wrong"),
]


def test_every_rule_of_the_table_is_on_the_page():
    rules = {row[0] for row in (*MATH, *CHOICE, *HERE)}
    assert sorted(rule for rule in rules if rule not in PAGE) == []


@pytest.mark.parametrize(
    ("grade", "rule", "gold", "response", "meta", "verdict"),
    [
        *((math.grade, rule, gold, response, {}, verdict) for rule, gold, response, verdict in MATH),
        *((choice.grade, *row) for row in CHOICE),
    ],
)
def test_math_and_choice(grade, rule, gold, response, meta, verdict):
    assert grade(Answer(gold, response, meta=meta)).verdict == verdict, rule


@pytest.mark.parametrize(("rule", "kind", "prompt", "gold", "response", "verdict"), HERE)
def test_kinds_that_are_graded_in_this_process(rule, kind, prompt, gold, response, verdict):
    assert Verifier(kind).grade(Question.make("t", prompt, gold), response).verdict == verdict, rule
