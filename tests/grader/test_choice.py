"""Multiple choice: what counts as an option given, and which of several counts."""

from __future__ import annotations

from itertools import cycle

import pyarrow.parquet as pq
import pytest
from thought_builders import TAGS

from exgrpo_orlhf.grader import choice
from exgrpo_orlhf.grader.answer import Answer
from exgrpo_orlhf.records import Question
from exgrpo_orlhf.rewards import Verifier

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


# By options and verdict: gold and response.
BY_OPTIONS = [
    (["A)125", "B)150", "C)225", "D)250", "E)275"], {
        "correct": (
            ("A", "\\boxed{125}"), ("A", "\\boxed{A}"), ("A", "\\boxed{A)125}"), ("A", "\\boxed{A) 125}"),
            ("A", "A)125"), ("A", "The answer is A)125."), ("125", "\\boxed{A}"), ("A)125", "\\boxed{A}"),
            ("A)125", "\\boxed{125}"), ("A", "\\boxed{(A) 125}"), ("A", "**125**"), ("B", "\\boxed{B: 150}"),
            (1, "\\boxed{150}"),
        ),
        "wrong": (
            ("A", "\\boxed{A)150}"), ("B", "\\boxed{A)150}"), ("A", "\\boxed{150}"), ("A)125", "\\boxed{B}"),
        ),
    }),
    (["(A) 1", "(B) 2", "(C) 3"], {
        "correct": (
            ("B", "\\boxed{2}"),
        ),
    }),
    (["A. 1", "B. 2", "C. 3"], {
        "correct": (
            ("B", "\\boxed{2}"),
        ),
    }),
    (["a) 1", "b) 2", "c) 3"], {
        "correct": (
            ("B", "\\boxed{2}"),
        ),
    }),
    (["A: 1", "B: 2"], {
        "correct": (
            ("B", "\\boxed{2}"),
        ),
    }),
    (["1. cat", "2. dog"], {
        "correct": (
            ("2", "\\boxed{dog}"), ("2", "\\boxed{2}"), (1, "\\boxed{cat}"),
        ),
        "wrong": (
            ("2", "\\boxed{1}"),
        ),
    }),
    (["1.5", "2.5"], {
        "correct": (
            ("A", "\\boxed{1.5}"),
        ),
        "wrong": (
            ("A", "\\boxed{5}"),
        ),
    }),
    ({"A": "A) 3", "B": "B) 4"}, {
        "correct": (
            ("A", "\\boxed{3}"),
        ),
    }),
    (["A) 1", "C) 2"], {
        "correct": (
            ("B", "\\boxed{C) 2}"),
        ),
    }),
    (["8.75", "8.79", "8.75", "8.71", "8.72"], {
        "correct": (
            ("C", "The answer is 8.75."), ("A", "The answer is 8.75."), ("C", "\\boxed{A}"), ("A", "\\boxed{C}"),
            ("C", "\\boxed{8.75}"), ("8.75", "\\boxed{C}"), ("8.75", "\\boxed{A}"),
        ),
        "wrong": (
            ("C", "\\boxed{B}"), ("C", "\\boxed{8.79}"), ("B", "\\boxed{8.75}"),
        ),
    }),
    (["AA", "Aa", "aa", "A or a"], {
        "correct": (
            ("B", "\\boxed{Aa}"), ("C", "\\boxed{aa}"),
        ),
        "wrong": (
            ("A", "\\boxed{Aa}"), ("A", "\\boxed{C}"),
        ),
    }),
    (["£5", "€5", "$5"], {
        "wrong": (
            ("A", "\\boxed{B}"),
        ),
    }),
    (["-5", "5"], {
        "wrong": (
            ("A", "\\boxed{B}"),
        ),
    }),
    (["a-b", "a b"], {
        "wrong": (
            ("A", "\\boxed{B}"),
        ),
    }),
    (["a cat", "two dogs", "three", "four"], {
        "correct": (
            ("C", "The answer might be C. Dog is not an answer for sure."),
            ("C", "The answer might be A, but the answer is C."), ("C", "The answer must be C."),
            ("C", "The answer should be (C)."), ("C", "The correct answer seems to be C"),
        ),
        "wrong": (
            ("A", "The answer might be A. But on second thought, the answer is C."),
            ("C", "The answer could be A or C."), ("A", "The answer would be A if x were 0. So it is (C)."),
            ("B", "The answer may be B or C"),
        ),
        "no_answer": (
            ("A", "The answer cannot be A."), ("A", "The answer might not be A."),
        ),
    }),
    (["a", "b", "c", "d", "A polygenic risk score"], {
        "correct": (
            ("E", "\\boxed{E - A polygenic risk score}"), ("E", "\\boxed{E – A polygenic risk score}"),
            ("E", "\\boxed{E: A polygenic risk score}"), ("E", "\\boxed{E, A polygenic risk score}"),
            ("E", "\\boxed{\\text{E - A polygenic risk score}}"), ("E", "\\boxed{A polygenic risk score}"),
            ("E", "E — A polygenic risk score"),
        ),
        "wrong": (
            ("A", "\\boxed{A - A polygenic risk score}"),
        ),
    }),
    (["Paris", "London", "The city of Rome", "12"], {
        "correct": (
            ("B", "\\boxed{B - London}"), ("C", "\\boxed{C - Rome}"),
        ),
        "wrong": (
            ("B", "\\boxed{A - London}"), ("A", "\\boxed{A - London}"), ("A", "\\boxed{A. London}"),
            ("B", "\\boxed{A. London}"),
        ),
    }),
    (None, {
        "correct": (
            ("B", "\\boxed{B - London}"), ("D", "\\boxed{42}\n\nAnswer: D"), (2, "\\boxed{2}"),
        ),
        "wrong": (
            ("B", "\\boxed{B - x}"), ("B", "\\boxed{B - 5}"), ("E", "The answer is \\boxed{E = mc^2}"),
            ("2", "The answer is 2, \\boxed{42}"),
        ),
        "no_answer": (
            ("E", "The answer is E = mc^2"),
        ),
    }),
    (["p", "q", "r", "s"], {
        "correct": (
            ("D", "Answer: D\n\nwhere \\boxed{x = 2}"), ("D", "**Answer: D**\n\n\\boxed{x = 2}"),
            ("D", "\\boxed{42}\n\nAnswer: D"), ("D", "The energy is \\boxed{E = mc^2}. So the correct option is D."),
            ("D", "\\boxed{x=2}, which is option (D)."), ("D", "Answer: \\boxed{D} since \\boxed{x=2}"),
            ("D", "\\boxed{D} because x=2"), ("D", "<answer>D</answer> with \\boxed{x=2}"),
            ("C", "\\boxed{\\frac{1}{2}}\n**Answer:** C"), ("D", "<D>"), ("D", "[D]"), ("D", "Answer: <D>"),
            ("D", "{D}"), ("D", "【D】"), ("C", "答えはCです。"), ("C", "答案：C"), ("C", "正解は「C」です"),
            ("C", "答案是C。"),
            ("C", "所以选C"), ("C", "故選C。"), ("C", "정답은 C입니다."), ("C", "La réponse est C."),
            ("C", "Réponse : C"),
            ("C", "Die Antwort ist C."), ("C", "La respuesta correcta es C"), ("C", "Respuesta: C"),
            ("C", "A resposta é C."), ("C", "Ответ: C"), ("C", "正确答案是 (C)。"), ("C", "Cが正解です。"),
            ("C", "选项C正确"),
        ),
        "wrong": (
            ("A", "The energy is \\boxed{E = mc^2}. So the correct option is D."), ("D", "\\boxed{E}\n\nAnswer: D"),
            ("A", "Answer: D\n\nwhere \\boxed{x = 2}"), ("D", "Option D gives 3. \\boxed{0.5}"),
            ("A", "The answer is A. Hence \\boxed{(A) or (B)}"), ("D", "The answer is not D. \\boxed{x=2}"),
            ("B", "\\boxed{x=2} so the answer is B or C"), ("D", "<B>"), ("C", "答えはBです。"), ("B", "答案是A或B"),
            ("A", "答案是A或B"), ("B", "选项B说的是错的，答案是C"), ("A", "La réponse est A ou B"),
        ),
        "no_answer": (
            ("B", "答えはBではなくCです。"), ("C", "答案不是C"), ("C", "C不正确"), ("B", "La réponse n'est pas B"),
            ("B", "Die Antwort ist nicht B"),
        ),
    }),
    (["E = mc^2", "F = ma", "p = mv", "E = hf"], {
        "correct": (
            ("A", "\\boxed{E = mc^2}"), ("A", "\\boxed{E=mc^2}"), ("C", "\\boxed{p=mv}"),
        ),
        "wrong": (
            ("D", "\\boxed{E = mc^2}"), ("D", "\\boxed{E=mc^2}"),
        ),
    }),
    (["2", "3", "4", "5"], {
        "wrong": (
            (2, "\\boxed{A}"), (2, "\\boxed{2}"),
        ),
        "correct": (
            (2, "\\boxed{C}"), (2, "\\boxed{4}"), ("2", "\\boxed{A}"),
        ),
    }),
    (["cat", "dog", "cow", "hen"], {
        "correct": (
            (2, "\\boxed{C}"), (2, "\\boxed{cow}"), (0, "\\boxed{A}"), (3, "The answer is D"), (2.0, "\\boxed{C}"),
        ),
        "wrong": (
            (2, "\\boxed{B}"),
        ),
        "error": (
            (4, "\\boxed{C}"), ("2", "\\boxed{C}"), (-1, "\\boxed{D}"), (True, "\\boxed{B}"),
        ),
    }),
    ({"1": "one", "2": "two"}, {
        "correct": (
            (2, "\\boxed{two}"),
        ),
    }),
    (["8", "9"], {
        "correct": (
            (8, "\\boxed{A}"),
        ),
    }),
]  # fmt: skip


@pytest.mark.parametrize(("options", "cases"), BY_OPTIONS)
def test_options_with_labels_or_one_text_and_an_answer_beside_a_formula_or_in_another_language(options, cases):
    rows = [(gold, response, verdict) for verdict, pairs in cases.items() for gold, response in pairs]
    verdicts = [choice.grade(Answer(gold, response, meta={"options": options})).verdict for gold, response, _ in rows]
    assert [(*row, verdict) for row, verdict in zip(rows, verdicts, strict=True) if row[2] != verdict] == []


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


def test_a_gold_that_is_a_number_reaches_the_grader_as_one():
    question = Question.make("test", "", 2, {"options": ["2", "3", "4", "5"]})
    assert [Verifier("choice").grade(question, f"\\boxed{{{text}}}").correct for text in "CA4"] == [True, False, True]
