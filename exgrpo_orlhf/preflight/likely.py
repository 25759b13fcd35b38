"""Settings that are allowed and likely not what is meant, by the questions and the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..experiment import Experiment
from ..questions import QuestionFile
from ..questions.question_files import column_names
from ..questions.reading import QuestionRecords
from ..records import Question

_LONG = 200  # characters of a gold answer, which are rather a worked solution
# A list that was written as text, or an answer with words around it.
_NO_GOLD = re.compile(
    r"""\[['"].*\]$|array\(|<answer>|(?:the\s)?(?:final\s)?answer(?:\sis\b|:)""", re.IGNORECASE | re.DOTALL
)
_LARGE, _HIGH = 100e6, 5e-5  # parameters; a rate for all of them. Published runs are at 1e-7 to 1e-5
_LOW = 5e-6  # a rate for LoRA, which needs about ten times the other (docs/training.md)


def likely_wrong(
    experiment: Experiment, questions: Sequence[Question], parameters: tuple[int, int] | None
) -> Iterator[str]:
    """Which setting, why, and what is meant more often. parameters: of the model, all and trained; None: not known"""
    source, rate, kind = experiment.questions, experiment.optimizer.learning_rate, experiment.verifier.kind
    if experiment.validation is None and isinstance(source, QuestionRecords):
        name = type(source).__name__
        yield f"{name}.held_out = 0: without validation, progress on new questions does not show; 0.05 is a share"
    golds = [question.answer_text.strip() for question in questions]
    if golds and kind.startswith("math") and experiment.verifier.rewards is None:
        letters = sum(len(gold) == 1 and gold.isalpha() and gold.isupper() for gold in golds)
        if letters > len(golds) / 2:
            counts = f"{letters:,} of {len(golds):,}"
            yield f"Verifier.kind = {kind!r}: {counts} answers are one capital letter; 'choice' grades options"
        long = sum(len(gold) > _LONG and "boxed" not in gold for gold in golds)
        if long > len(golds) / 2:
            counts = f"{long:,} of {len(golds):,}"
            yield f"QuestionFile.answer: {counts} answers have more than {_LONG} characters, as worked solutions do"
    if golds and kind == "choice" and isinstance(source, QuestionFile):
        kept = {name.rpartition(".")[2] for name in source.meta}
        if "options" in column_names(source.file) and "options" not in kept:
            yield "QuestionFile.meta lacks 'options', a column of the file: 'choice' grades no option's text"
    if odd := next((gold for gold in golds if _NO_GOLD.match(gold)), None):
        yield f"QuestionFile.answer: an answer is {odd!r:.60}; give the answer alone, several as a list of JSON"
    if experiment.lora.rank is not None and rate < _LOW:
        yield f"Optimizer.learning_rate = {rate:g} with LoRA.rank: LoRA needs about ten times the rate of all weights"
    if experiment.lora.rank is None and parameters is not None and parameters[0] > _LARGE and rate > _HIGH:
        size = f"{parameters[0] / 1e6:,.0f} million parameters"
        yield f"Optimizer.learning_rate = {rate:g} for all of {size}: published runs are at 1e-7 to 1e-5"
