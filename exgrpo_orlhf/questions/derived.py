"""Sources made of other sources: a mix of several by weight, and one without its long prompts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np

from ..checks import Constraint, Natural, check_settings, reference, require
from ..io import tokenizer_file
from ..records import Question
from .prompts import PromptEncoder, Prompts
from .reading import QuestionRecords, text_key, with_own_id
from .text import normalised, normalised_answer

logger = logging.getLogger(__name__)
_SOURCE = reference("load", "@QuestionFile()")
_SOURCES = Constraint(
    "must be a tuple of references such as (@a/QuestionFile(), @b/QuestionHub())",
    lambda sources: isinstance(sources, tuple) and len(sources) > 0 and all(map(_SOURCE.holds, sources)),
)


@dataclass(frozen=True)
class QuestionMix:
    """A set drawn once from several sources; training then goes through it epoch by epoch like any other set.

    An epoch has each of the mix's questions once. Its shares equal the weights to within one question, and a batch has
    these shares on average. No question is drawn twice: a source gives at most what it has, and a question that an
    earlier source has too (the same text and columns) is left out of the later one.

    sources: references such as (@a/QuestionFile(), @b/QuestionHub())
    weights: one number for each source, its share of the mix; None: every question of every source
    size: questions in the mix; None: as many as the weights allow before a source runs out
    seed: decides which questions of a source are drawn; separate from train.seed, so that runs with different seeds
        have the same set
    """

    sources: Annotated[Any, _SOURCES]
    weights: tuple[float, ...] | None = None
    size: int | None = None
    seed: Natural = 0

    def __post_init__(self) -> None:
        check_settings(QuestionMix, vars(self))
        n = len(self.sources)
        if self.weights is None:
            require(self.size is None, f"QuestionMix.size = {self.size} needs QuestionMix.weights")
            return
        numbers = len(self.weights)
        require(numbers == n, f"QuestionMix.weights has {numbers} numbers for {n} QuestionMix.sources")
        positive = all(0 < weight < float("inf") for weight in self.weights)
        require(positive, f"QuestionMix.weights must be positive numbers, got {self.weights!r}")
        enough = self.size is None or self.size >= n
        require(enough, f"QuestionMix.size must be at least 1 for each source, got {self.size!r}")

    def load(self) -> list[Question]:
        """The questions source by source, each in its own order.

        Raises ValueError if a source has fewer questions than its share.
        """
        sets = _without_repetitions([source.load() for source in self.sources])
        if held_out := held_out_of(self):  # by one source, while another has them too
            apart = {normalised(question.prompt) for question in held_out.load()}
            kept = [[each for each in questions if normalised(each.prompt) not in apart] for questions in sets]
            if fewer := sum(map(len, sets)) - sum(map(len, kept)):
                logger.info("QuestionMix: %d questions that another source holds out are left out", fewer)
            sets = kept
        counts = [len(questions) for questions in sets]
        if self.weights is not None:
            counts = _shares(self.weights, counts, self.size)
        mix: list[Question] = []
        for i, (questions, count) in enumerate(zip(sets, counts, strict=True)):
            order = np.random.default_rng([self.seed, i]).permutation(len(questions))
            mix += [questions[position] for position in sorted(order[:count].tolist())]
            logger.info(
                "QuestionMix: %d of %d questions of source %d (%s), %.1f %% of the mix",
                *(count, len(questions), i, ", ".join(sorted({q.source for q in questions})[:3])),
                100 * count / sum(counts),
            )
        return mix


@dataclass(frozen=True)
class LengthFilter:
    """Leaves out questions whose prompt, written by the template, is longer than Prompts.max_tokens.

    Without this filter such a question stops the run before it starts. The filter counts with the model's tokenizer, so
    it needs the model and the prompts:

        Work.questions = @LengthFilter()
        LengthFilter.questions = @QuestionFile()
        LengthFilter.model = @PretrainedModel()     # as Work.model
        LengthFilter.prompts = @Prompts()

    questions: the source; model: whose tokenizer counts; prompts: the template, and max_tokens
    """

    questions: Annotated[Any, _SOURCE]
    model: Annotated[Any, reference("prepare", "@PretrainedModel()")]
    prompts: Prompts

    def __post_init__(self) -> None:
        check_settings(LengthFilter, vars(self))

    def load(self) -> list[Question]:
        """The questions that fit, in their order. Raises ValueError if none fits, or a prompt cannot be written."""
        encoder = PromptEncoder(self.prompts, tokenizer_file.load(self.model.prepare()))
        limit = self.prompts.max_tokens
        questions = self.questions.load()
        lengths = [len(encoder.token_ids(question)) for question in questions]
        short_enough = [question for question, length in zip(questions, lengths, strict=True) if length <= limit]
        if not short_enough:
            raise ValueError(
                f"LengthFilter: all {len(questions)} questions are longer than Prompts.max_tokens = {limit} (the "
                f"shortest has {min(lengths)} tokens); raise it"
            )
        logger.info(
            "LengthFilter: %d of %d questions kept, %d longer than Prompts.max_tokens = %d left out (the longest has "
            "%d tokens)",
            *(len(short_enough), len(questions), len(questions) - len(short_enough), limit, max(lengths)),
        )
        return short_enough


def held_out_of(source: Any) -> Any:
    """The source of the questions that a source, or one that it is made of, holds out (`held_out`); None if none."""
    if isinstance(source, QuestionRecords):
        return replace(source, part="validation") if source.held_out and source.part == "all" else None
    if isinstance(source, LengthFilter):
        inner = held_out_of(source.questions)
        return inner and replace(source, questions=inner)
    sources = tuple(filter(None, map(held_out_of, source.sources))) if isinstance(source, QuestionMix) else ()
    return QuestionMix(sources) if sources else None


def validation_of(questions: Any, validation: Any) -> Any:
    """The source of a run's validation: the one that is bound, or else what its questions hold out. Raises ValueError
    for both."""
    held_out = held_out_of(questions)
    require(
        held_out is None or validation is None,
        "Work.validation is bound, and Work.questions holds questions out to validate on (held_out): set "
        "Work.validation = None, or QuestionFile.held_out = 0",
    )
    return validation or held_out


def _without_repetitions(sets: Sequence[list[Question]]) -> list[list[Question]]:
    """Each set without the questions that an earlier one has."""
    earlier: dict[str, Question] = {}
    ids: set[str] = set()
    distinct = []
    for i, questions in enumerate(sets):
        by_text = [(text_key(question), question) for question in questions]
        new = [(text, with_own_id(question, ids)) for text, question in by_text if text not in earlier]
        answers = [(question.answer_text, earlier[text].answer_text) for text, question in by_text if text in earlier]
        other = [pair for pair in answers if normalised_answer(pair[0]) != normalised_answer(pair[1])]
        if answers:
            logger.info("QuestionMix: source %d repeats %d questions of earlier sources: left out", i, len(answers))
        if other:
            logger.warning(
                "QuestionMix: %d of them have an answer that is written differently there, such as %r and %r",
                *(len(other), *other[0]),
            )
        if not new:
            raise ValueError(
                f"QuestionMix: source {i} holds no question that the sources before it do not hold; take it out"
            )
        earlier |= dict(new)
        ids |= {question.id for _, question in new}
        distinct.append([question for _, question in new])
    return distinct


def _shares(weights: tuple[float, ...], available: list[int], size: int | None) -> list[int]:
    """The number of questions of each source: the weights' shares of the size, rounded by largest remainder."""
    total = sum(weights)
    most = min(int(n * total / weight + 1e-9) for n, weight in zip(available, weights, strict=True))
    wanted = most if size is None else size
    exact = [weight / total * wanted for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: wanted - sum(counts)]:
        counts[i] += 1
    short = [i for i, (count, n) in enumerate(zip(counts, available, strict=True)) if count > n]
    if short and size is None:  # rounding alone: one question less
        return _shares(weights, available, most - 1)
    if short:
        i = short[0]
        raise ValueError(
            f"QuestionMix.size = {size} asks source {i} for {counts[i]} questions by its weight, and it has "
            f"{available[i]}; with these QuestionMix.weights the size can be {most} at most"
        )
    if 0 in counts:
        raise ValueError(
            f"QuestionMix: source {counts.index(0)} would give no question: its share of {sum(counts)} is below one; "
            "raise its number in QuestionMix.weights, or QuestionMix.size"
        )
    return counts
