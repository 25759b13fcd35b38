"""Prompts with responses to learn: read from a file, and encoded as the policy sees prompts and writes responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..engines.rows import ForwardRow
from ..questions.prompts import PromptEncoder
from ..questions.question_files import place_of, read_rows
from ..questions.reading import present, read_prompt
from ..records import Question

Example = tuple[Question, str]  # the response without end token


@dataclass(frozen=True)
class SupervisedFile:
    """A file of prompts and responses, in any form of `QuestionFile`: {"prompt": …, "response": …} is a line of JSONL.

    path: .jsonl, .parquet or .csv
    prompt: field of the prompt: text, or chat messages [{"role": …, "content": …}, …]
    response: field of the response: text without end token
    """

    path: str
    prompt: str = "prompt"
    response: str = "response"

    def examples(self) -> list[Example]:
        """As many as there are rows, in their order; the questions have no answers.

        Raises FileNotFoundError, or ValueError that names the file, the row or line, and the field.
        """
        path = Path(self.path)
        place, examples = place_of(path), []
        columns = (self.prompt, self.response)
        for row, record in enumerate(read_rows(path, lambda names: None, columns, "SupervisedFile.path")):
            where = place.of(row)
            prompt = read_prompt(record, where, "SupervisedFile.prompt", self.prompt)
            response = present(record, self.response, where, "SupervisedFile.response")
            if type(response) is not str or not response.strip():  # a JSON number is a subclass of str
                raise ValueError(f"{where}: field {self.response!r} is {response!r:.80}; a response is text, not empty")
            examples.append((Question.make(path.stem, prompt, "", {"place": where}), response))
        return examples


def encode(examples: Sequence[Example], prompts: PromptEncoder, max_response_tokens: int) -> list[ForwardRow]:
    """Prompts as those of the run's questions; responses closed with the token that closes the policy's own.

    Raises ValueError that names the place of an example whose prompt or response is too long, is empty, or cannot be
    written.
    """
    rows = []
    for number, (question, response) in enumerate(examples, 1):
        try:
            if not response.strip():
                raise ValueError(f"the response to {question.prompt!r:.80} is empty")
            ids = prompts.encode_response(response, max_response_tokens)
            rows.append(ForwardRow(prompts.encode(question), np.array(ids, np.int32)))
        except ValueError as error:
            place = question.meta.get("place", f"example {number}")
            raise ValueError(f"{place}: {error}") from None
    return rows
