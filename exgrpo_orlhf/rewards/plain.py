"""math-verify as it is commonly called: the recipe that most published scores were graded with.

The gold is parsed as boxed LaTeX, the response as LaTeX or a plain expression, the first pair that math-verify finds
equal counts. Its own timeouts, which fail outside the main thread, are off: the pool kills what takes too long.
"""

from __future__ import annotations

import logging

from math_verify import parse, verify
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

from .answer import Answer, Graded
from .math import gold_texts

for _name in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def grade(answer: Answer) -> Graded:
    golds = gold_texts(answer.gold)
    if not golds:
        return Graded("error", None, reason=f"the gold answer {answer.gold!r} says nothing")
    given = parse(
        answer.response, extraction_config=[ExprExtractionConfig(), LatexExtractionConfig()], parsing_timeout=None
    )
    if not given:
        return Graded("no_answer", 0.0)
    shown = str(given[-1])  # the text that was parsed, beside the expression
    for gold in golds:
        parsed = parse(f"\\boxed{{{gold}}}", extraction_config=[LatexExtractionConfig()], parsing_timeout=None)
        if verify(parsed, given, timeout_seconds=None):
            return Graded("correct", 1.0, shown)
    return Graded("wrong", 0.0, shown)
