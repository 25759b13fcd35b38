"""The verifier's settings: a format asked for, and values out of range."""

from __future__ import annotations

import math

import pytest

from exgrpo_orlhf.records import Question
from exgrpo_orlhf.rewards import Verifier

URL = r"Verifier\.url \(an address, or a tuple of several\) must be set"


@pytest.mark.parametrize(
    ("response", "fits"),
    [
        ("<think>a</think><answer>\\boxed{42}</answer>", True),
        ("a</think>\n<answer>42</answer>\n", True),
        ("<think>a</think>\\boxed{42}", False),
        ("<answer>42</answer>", False),
        ("<think>a</think><answer>42</answer> and more", False),
    ],
)
def test_a_format_can_be_asked_for(response, fits):
    question = Question.make("test", "", "42")
    assert Verifier("math").grade(question, response).correct
    grade = Verifier("math", format="think_answer").grade(question, response)
    assert (grade.verdict, grade.reward) == (("correct", 1.0) if fits else ("wrong", 0.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "maths"}, "Verifier.kind must be one of"),
        ({"kind": "function"}, "Verifier.function"),
        ({"kind": "math", "function": "x.py"}, "Verifier.function"),
        ({"timeout": 0.0}, "Verifier.timeout"),
        ({"memory": 1}, "Verifier.memory"),
        ({"workers": -1}, "Verifier.workers"),
        ({"max_failed_share": 2.0}, "Verifier.max_failed_share"),
        ({"format": "xml"}, "Verifier.format"),
        *(
            ({"success_at": value}, "Verifier.success_at must be a finite number")
            for value in (math.nan, math.inf, "1", None)
        ),
        *(
            ({"kind": "http", "url": url}, URL)
            for url in ("localhost:5000", "", ("http://a/b", 3), ("ftp://a/b",), None)
        ),
        ({"url": "http://a/b"}, r"got 'http://a/b' with Verifier\.kind = 'exact'"),
    ],
)
def test_a_setting_out_of_range_names_its_binding(settings, message):
    with pytest.raises(ValueError, match=message):
        Verifier(**settings)
