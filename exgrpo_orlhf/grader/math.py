"""Mathematical answers: the answer that a response gives, compared with the gold answer.

Two graders: ours, and math-verify as it is commonly called (`grade_by_math_verify`).
"""

from __future__ import annotations

import math
import re
from typing import Any

from math_verify import parse, verify
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

from . import choice
from .answer import Answer, Grader
from .boxes import last_box
from .equality import is_words, same, says_nothing
from .extraction import OTHER_LANGUAGES, Extracted, answer_in
from .grade import Grade
from .latex import clean
from .notations import same_notation
from .thoughts import visible

_PROSE_NUMBER = re.compile(
    r"(?<![\w.^_])[-−]?(?:\\?\$)?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?:\s?/\s?\d+)?\s?(?:\\?%|percent\b)?"
)
# Behind a number: it begins a calculation (48 + 24 = 72 clips, 3 times 4), a range, a time, a larger or a mixed number.
_GOES_ON = re.compile(
    r"\s*(?:[=+×÷^]|\*(?!\*)|:\s?\d|[-−–x]\s?\d|times\s+\d|(?:minus|plus|squared|cubed)\b|(?:hundred|[mb]illion|thousand)\b"
    r"|and a (?:half|quarter)\b|\s\d)"
)
_NEGATIVE = re.compile(r"\b(?:minus|negative)\s*$", re.IGNORECASE)  # before it
_NOT_IT = re.compile(r"\b(?:(?:less|more|fewer|greater) than|not)\s*$", re.IGNORECASE)
_COMMA_LANGUAGE = re.compile(rf"\b(?:{OTHER_LANGUAGES})\b", re.IGNORECASE)
_LATEX = LatexExtractionConfig()
_WARM = (
    (r"\frac{x+1}{2}", r"\frac{1}{2} + \frac{x}{2}"),
    (r"\sin^2 x + \sqrt{2}", r"\sqrt{2} + 1 - \cos^2 x"),
    (r"n(n+1)/2", r"\frac{n^2+n}{3}"),
    (r"2x + y = 1", r"4x + 2y = 3"),
    (r"e^{2x} \ln 3", r"\pi y"),
    (r"\frac{\sqrt{2}}{4} \cos(t-\pi/4)", r"\frac{1}{2} \sin^{2}(2t) + \tan \alpha"),
    (r"\sqrt[3]{a^{2}} + |b_{1}| - 3!", r"x_{0} e^{-\zeta \omega t} \left[1 - \lambda \right]"),
    (r"\binom{5}{2} \cdot 3^{n+1}", r"\log_{2}(x) \times 10^{-4}"),
    (r"a < 3 x^{2}", r"\frac{d y}{d x} = 3 y \ge 1"),
    (r"\begin{pmatrix} 1 & x \\ y & 2 \end{pmatrix} \cdot 2", r"3 + 5 i + (4 - i)^{2}"),
    (r"3 + 4 - 5", r"-2 \cdot 7 / 5"),
)


def warm_grader() -> Grader:
    """`grade`, after grading a few answers: sympy builds much at its first use, which no answer should wait for."""
    for gold, text in _WARM:
        grade(Answer(gold, f"\\boxed{{{text}}}"))
    return grade


def plain_grader() -> Grader:
    return grade_by_math_verify


def grade(answer: Answer) -> Grade:
    """A gold that is a single option letter is graded as a choice. A list of golds: any of them."""
    graded = [_grade(gold, answer) for gold in gold_texts(answer.gold)]
    return next((g for g in graded if g.verdict == "correct"), graded[0] if graded else _no_gold(answer))


def grade_by_math_verify(answer: Answer) -> Grade:
    """math-verify as it is commonly called, by which most published scores were graded.

    The gold is parsed as boxed LaTeX, the response as LaTeX or a plain expression; the answer is correct if math-verify
    finds any pair equal. Its own timeouts do not work outside the main thread and are off: the pool has the limit.
    """
    golds = gold_texts(answer.gold)
    if not golds:
        return _no_gold(answer)
    parsed_answer = parse(answer.response, extraction_config=[ExprExtractionConfig(), _LATEX], parsing_timeout=None)
    if not parsed_answer:
        return Grade("no_answer", 0.0)
    extracted = str(parsed_answer[-1])  # the text that was parsed, beside the expression
    for gold in golds:
        verdicts = [same_notation(gold, candidate.text) for candidate in answer_in(answer.response)]
        if any(verdicts):
            return Grade("correct", 1.0, extracted=extracted)
        if False in verdicts:
            continue
        parsed = parse(f"\\boxed{{{gold}}}", extraction_config=[_LATEX], parsing_timeout=None)
        if verify(parsed, parsed_answer, timeout_seconds=None):
            return Grade("correct", 1.0, extracted=extracted)
    return Grade("wrong", 0.0, extracted=extracted)


def _no_gold(answer: Answer) -> Grade:
    return Grade("error", None, reason=f"the gold answer {answer.gold!r} is empty or no text, number or list of these")


def gold_texts(gold: Any) -> list[str]:
    """The texts of a gold answer: text, a number, or a list of alternatives. [] where it holds no answer."""
    if isinstance(gold, list | tuple):
        return [text for alternative in gold for text in gold_texts(alternative)]
    if isinstance(gold, float) and not math.isfinite(gold):
        return []
    if isinstance(gold, int | float) and not isinstance(gold, bool):
        return [str(int(gold)) if gold == int(gold) and abs(gold) < 1e15 else repr(gold)]
    if isinstance(gold, bool):
        return [str(gold)]
    if not isinstance(gold, str):
        return []
    text = visible(gold).rpartition("####")[2]  # GSM8K: the solution, then the answer
    box = last_box(text)
    if box is None and "\\boxed" in text:
        return []
    text = text if box is None else box
    return [text.strip()] if clean(text) else []


def _grade(gold: str, answer: Answer) -> Grade:
    if choice.gold_option(gold):
        return choice.grade(answer._replace(gold=gold))
    candidates = [found for found in answer_in(answer.response) if _says_something(found, gold)]
    if says_nothing(clean(gold)) and not any(found.marked for found in candidates):
        last = re.split(r"[.!?:\n]", visible(answer.response).strip(" .!*\n"))[-1]  # the last sentence
        candidates += [Extracted(last, False, True)] if says_nothing(clean(last)) else []
    if not candidates:
        return Grade("no_answer", 0.0)
    for candidate in candidates:
        for text in _readings(candidate, gold, answer.response):
            if same(gold, text):
                return Grade("correct", 1.0, extracted=text)
    return Grade("wrong", 0.0, extracted=candidates[0].text)


def _says_something(candidate: Extracted, gold: str) -> bool:
    """Whether this may be an answer. A sentence is one if the gold is in words, or if it holds a number or symbols."""
    if not re.search(r"\w|\\[A-Za-z{]|∅|∞", candidate.text):
        return False
    if not candidate.prose or candidate.marked or is_words(clean(gold)):
        return True
    return bool(re.search(r"[\d\\^=<>$]", candidate.text)) or len(re.findall(r"[^\W\d_]{2,}", candidate.text)) < 2


def _readings(candidate: Extracted, gold: str, response: str) -> list[str]:
    """The text itself and, where a statement has words around its number ("42 apples, by the way"), the number. Of a
    language that writes 3,5 for 3.5, that number."""
    text = candidate.text
    if "." in gold and _COMMA_LANGUAGE.search(response) and len(re.findall(r"\d,\d", text)) == 1:
        text = re.sub(r"(?<=\d),(?=\d)", ".", text)
    has_words = candidate.prose and candidate.marked and "\\" not in text and re.search(r"[A-Za-z]{2}", text)
    if not has_words or is_words(clean(gold)):
        return [text]
    numbers = [match for match in _PROSE_NUMBER.finditer(text) if match[0].strip()]
    if not numbers or re.match(r"\s*(?:,|or\b|and\b|to\b|/)\s*[-\d]", text[numbers[0].end() :]):
        return [text]  # several numbers are no answer
    found, number = numbers[0], numbers[0][0].rstrip()
    before = text[: found.start()]
    if _GOES_ON.match(text, found.start() + len(number)) or _NOT_IT.search(before):
        return [text]
    return [text, f"-{number}" if _NEGATIVE.search(before) else number]
