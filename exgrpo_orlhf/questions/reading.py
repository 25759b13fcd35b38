"""Reads distinct questions from records of any source. Errors name the place and the gin binding.

A question that occurs again with the same answer is merged into the first, also where it is typeset differently
(text.py). The very same prompt with another answer is an error, because one of the two answers is wrong. Prompts that
only look alike and have different answers both stay: "reverse Ab" is not "reverse aB".
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..records import Question
from ..settings import require
from .text import Prompt, normalised, normalised_answer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where records are: in what, how one is called ("row"), and the number of the first one."""

    name: str
    unit: str
    first: int

    def of(self, row: int) -> str:
        return f"{self.name}, {self.unit} {row + self.first}"


@dataclass(frozen=True, kw_only=True)
class QuestionRecords:
    """Base of the sources whose records have a question each: which fields hold what a question needs.

    prompt: field of the question: text, or chat messages [{"role": …, "content": …}, …]; in CSV text alone
    answer: field of the gold answer: text; whole numbers too, and in JSONL any number, as it is written; or a list of
        these, any of which is right (Verifier.kind 'math', 'math_verify'; 'function', 'code' and 'http' get the list)
    source: field of the data set's name; None, a JSONL row without that field, or a table without a column
        'data_source' where no other is named: the source's own name
    limit: load only this many distinct questions, the first ones; None: all
    held_out, part: so many of them, chosen by their ids, are kept apart for validation: 'train' are the others,
        'validation' these. 'all' with held_out = 0: nothing is kept apart
    meta: further fields that a verifier needs, such as ('options',) for 'choice' or ('tests',) for 'code'; they are
        kept in Question.meta under the last part of their path

    A field is a name or a dotted path into nested records ("reward_model.ground_truth").
    """

    prompt: str = "prompt"
    answer: str = "reward_model.ground_truth"
    source: str | None = "data_source"
    limit: int | None = None
    meta: tuple[str, ...] = ()
    held_out: int = 0
    part: str = "all"

    def __post_init__(self) -> None:
        sound = self.limit is None or self.limit >= 1
        require(sound, f"{self._owner}.limit must be at least 1, or None for all; got {self.limit!r}")
        require(
            self.part in ("all", "train", "validation")
            and isinstance(self.held_out, int)
            and (self.held_out == 0 if self.part == "all" else self.held_out >= 1),
            f"{self._owner}.part is 'train' or 'validation' with {self._owner}.held_out of at least 1, or 'all' with "
            f"0; got {self.part!r} with {self.held_out!r}",
        )

    @property
    def _owner(self) -> str:
        """Whose gin bindings these are."""
        return type(self).__name__

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that are bound."""
        return (self.prompt, self.answer, *([] if self.source is None else [self.source]), *self.meta)

    def check_columns(self, present: list[str], where: str) -> None:
        """present: the columns there are, nested ones as dotted paths. Raises ValueError for one that is missing."""
        bindings = {self.prompt: "prompt", self.answer: "answer", self.source: "source (None: the set's own name)"}
        for name in self.columns:
            if name not in present and name != QuestionRecords.source:  # which nobody has named
                raise ValueError(
                    f"{where}: no column {name!r}, there are {', '.join(present)}; set "
                    f"{self._owner}.{bindings.get(name, 'meta')}"
                )

    def distinct_questions(self, rows: Iterable[Mapping[str, Any]], place: Place, own_name: str) -> list[Question]:
        """The distinct questions in their order; meta["row"] is the first row (from 0) that asks each.

        own_name: the source of questions whose record does not say it
        Raises ValueError for a record that cannot be used, for an answer that contradicts an earlier one, and if there
        are no questions.
        """
        questions: list[Question] = []
        alike: dict[str, list[Question]] = defaultdict(list)
        repeated = respelled = 0
        for row, record in enumerate(rows):
            question = self._question(record, row, place.of(row), own_name)
            group = alike[normalised(question.prompt)]
            if first := _repeated(question, group, place):
                repeated += 1
                respelled += first.prompt != question.prompt
            else:
                group.append(question)
                questions.append(question)
            if len(questions) == self.limit:
                break
        if not questions:
            raise ValueError(f"{place.name} holds no questions; was it written to the end?")
        if repeated:
            typeset = f" ({respelled} of them typeset differently)" if respelled else ""
            logger.info("%s: %d questions, %d repetitions merged%s", place.name, len(questions), repeated, typeset)
        if self.held_out >= len(questions):
            raise ValueError(
                f"{place.name} holds {len(questions)} questions; {self._owner}.held_out = {self.held_out} leaves none "
                "to train on"
            )
        # Ids are hashes, so that the smallest ones are a random part, the same in every process.
        apart = {question.id for question in sorted(questions, key=lambda question: question.id)[: self.held_out]}
        return [one for one in questions if self.part == "all" or (one.id in apart) == (self.part == "validation")]

    def _question(self, record: Mapping[str, Any], row: int, where: str, own_name: str) -> Question:
        prompt = read_prompt(record, where, f"{self._owner}.prompt", self.prompt)
        answer = present(record, self.answer, where, f"{self._owner}.answer")
        several = isinstance(answer, list)
        answers = [str(each) if type(each) is int else each for each in (answer if several else [answer])]
        if not answers or not all(isinstance(each, str) and each.strip() for each in answers):
            raise ValueError(
                f"{where}: field {self.answer!r} is {answer!r:.80}; a gold answer is text that is not empty (write "
                "a decimal number in parquet as text too, in the form that a grader should read)"
            )
        source = own_name
        if self.source is not None and not missing_in(record, self.source):
            source = field_value(record, self.source)
        if type(source) is not str or not source:
            raise ValueError(f"{where}: field {self.source!r} is {source!r:.80}; a source is the data set's name")
        meta = {name.rpartition(".")[2]: present(record, name, where, f"{self._owner}.meta") for name in self.meta}
        meta = {"row": row, **meta}
        if several:
            meta["answers"] = [*map(str, answers)]
        return Question.make(source, prompt, json.dumps(meta["answers"]) if several else str(answers[0]), meta)


def fingerprint(questions: Iterable[Question]) -> str:
    """Hash of the questions' ids in their order, 32 hexadecimal digits: equal for equal sets in equal order."""
    return hashlib.blake2b("\n".join(question.id for question in questions).encode(), digest_size=16).hexdigest()


def field_value(record: Mapping[str, Any], name: str) -> Any:
    """The value at a dotted path. Raises KeyError with the names there are, where the path ends early."""
    if name in record:  # a dot may be part of a plain name
        return record[name]
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise KeyError(", ".join(value if isinstance(value, dict) else record))
        value = value[part]
    return value


def missing_in(record: Mapping[str, Any], name: str) -> bool:
    """Whether a dotted path ends early."""
    try:
        field_value(record, name)
    except KeyError:
        return True
    return False


def read_prompt(record: Mapping[str, Any], where: str, binding: str, name: str) -> Prompt:
    """The prompt as a question keeps it: its text, or (role, content) pairs.

    binding: what the user sets to name another field
    Raises ValueError that begins with `where`.
    """
    value = present(record, name, where, binding)
    where = f"{where}: field {name!r}"
    if type(value) is str:  # not a JSON number, which is a subclass of str (files.py)
        if not value.strip():
            raise ValueError(f"{where} is empty; remove the row")
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f'{where} is {value!r:.80}; a prompt is text or a list of {{"role": …, "content": …}}')
    messages = []
    for message in value:
        parts = {key: part for key, part in message.items() if part is not None} if isinstance(message, dict) else {}
        if set(parts) != {"role", "content"} or not all(type(part) is str for part in parts.values()):
            raise ValueError(f'{where} has the message {message!r:.80}; a message is {{"role": text, "content": text}}')
        messages.append((parts["role"], parts["content"]))
    if not messages[-1][1].strip():
        raise ValueError(f"{where} ends in an empty message; remove the row")
    return tuple(messages)


def present(record: Mapping[str, Any], name: str, where: str, binding: str) -> Any:
    """The field's value. Raises ValueError if the record lacks the field."""
    try:
        return field_value(record, name)
    except KeyError as error:
        raise ValueError(f"{where}: no field {name!r}, there are {error.args[0]}; set {binding}") from None


def _repeated(question: Question, group: list[Question], place: Place) -> Question | None:
    """The question of the group that this one repeats."""
    for other in group:
        if other.prompt == question.prompt and other.answer != question.answer:
            rows = " and ".join(str(q.meta["row"] + place.first) for q in (other, question))
            raise ValueError(
                f"{place.name}: {place.unit}s {rows} ask the same question with the answers {other.answer!r} and "
                f"{question.answer!r}; remove the wrong one: {question.prompt!r:.300}"
            )
    answer = normalised_answer(question.answer)
    return next((other for other in group if normalised_answer(other.answer) == answer), None)
