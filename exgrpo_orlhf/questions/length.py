"""Leaves questions with too long prompts out of a set."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from ..records import Question
from ..settings import require

logger = logging.getLogger(__name__)

_NO_LIMIT = 1 << 40  # tokens


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

    questions: Any
    model: Any
    prompts: Any

    def __post_init__(self) -> None:
        given = {"questions": "@QuestionFile()", "model": "@PretrainedModel()", "prompts": "@Prompts()"}
        for name, example in given.items():
            bound = getattr(self, name) is not None
            require(bound, f"LengthFilter.{name} must be a reference such as {example}, got None")

    def load(self) -> list[Question]:
        """The questions that fit, in their order. Raises ValueError if none fits, or a prompt cannot be written."""
        from transformers import AutoTokenizer  # seconds; only where prompts are counted

        from .prompts import PromptEncoder

        path = str(self.model.prepare())
        encoder = PromptEncoder(replace(self.prompts, max_tokens=_NO_LIMIT), AutoTokenizer.from_pretrained(path))
        limit = self.prompts.max_tokens
        questions = self.questions.load()
        lengths = [len(encoder.encode(question)) for question in questions]
        kept = [question for question, length in zip(questions, lengths, strict=True) if length <= limit]
        if not kept:
            raise ValueError(
                f"LengthFilter: all {len(questions)} questions are longer than Prompts.max_tokens = {limit} (the "
                f"shortest has {min(lengths)} tokens); raise it"
            )
        logger.info(
            "LengthFilter: %d of %d questions kept, %d longer than Prompts.max_tokens = %d left out (the longest has "
            "%d tokens)",
            *(len(kept), len(questions), len(questions) - len(kept), limit, max(lengths)),
        )
        return kept
