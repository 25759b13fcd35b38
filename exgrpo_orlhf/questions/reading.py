"""Reads distinct questions from records of any source. Errors name the place and the gin binding.

A question that occurs again with the same answer is merged into the first, also where it is typeset differently
(text.py). The very same prompt with another answer is an error, because one of the two answers is wrong. Prompts that
only look alike and have different answers both stay: "reverse Ab" is not "reverse aB".
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..records import Question
from ..settings import require
from .text import Prompt, normalised, normalised_answer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fields:
    """Where a record has its question, gold answer and source: names, or dotted paths into nested records.

    owner: the class whose gin bindings these are; meta: fields kept in Question.meta, under the last part of their path
    """

    owner: str
    prompt: str
    answer: str
    source: str | None
    meta: tuple[str, ...] = ()

    @property
    def needed(self) -> list[tuple[str, str]]:
        """(binding, field) of those that are bound"""
        given = [("prompt", self.prompt), ("answer", self.answer), ("source", self.source)]
        return [(binding, name) for binding, name in given if name is not None] + [("meta", name) for name in self.meta]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for _, name in self.needed)

    def check(self, present: list[str], where: str) -> None:
        """present: the columns there are, nested ones as dotted paths. Raises ValueError for one that is missing."""
        for binding, name in self.needed:
            if name not in present:
                raise ValueError(
                    f"{where}: no column {name!r}, there are {', '.join(present)}; set {self.owner}.{binding}"
                    + (" (None: the set's own name)" if binding == "source" else "")
                )


@dataclass(frozen=True)
class Place:
    """Where records are: in what, how one is called ("row"), and the number of the first one."""

    name: str
    unit: str
    first: int

    def of(self, row: int) -> str:
        return f"{self.name}, {self.unit} {row + self.first}"


class _Missing:
    """The value of a field that a record lacks, which differs from null. names: the fields that it has."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = ", ".join(names)


def distinct_questions(
    records: Iterable[Mapping[str, Any]], fields: Fields, place: Place, default_source: str, limit: int | None
) -> list[Question]:
    """The distinct questions in the records' order; meta["row"] is the first row (from 0) that asks each.

    limit: read only until there are this many; None: read all
    Raises ValueError that names the place and the field.
    """
    questions: list[Question] = []
    alike: dict[str, list[Question]] = {}
    repeated = respelled = 0
    for row, record in enumerate(records):
        question = _question(record, row, place.of(row), fields, default_source)
        group = alike.setdefault(normalised(question.prompt), [])
        known = _known(question, group, place)
        if known:
            repeated += 1
            respelled += known.prompt != question.prompt
        else:
            group.append(question)
            questions.append(question)
        if len(questions) == limit:
            break
    if not questions:
        raise ValueError(f"{place.name} holds no questions; was it written to the end?")
    if repeated:
        told = f" ({respelled} of them typeset differently)" if respelled else ""
        logger.info("%s: %d questions, %d repetitions merged%s", place.name, len(questions), repeated, told)
    return questions


def fingerprint(questions: Iterable[Question]) -> str:
    """Hash of the questions' ids in their order, 32 hexadecimal digits: equal for equal sets in equal order."""
    return hashlib.blake2b("\n".join(question.id for question in questions).encode(), digest_size=16).hexdigest()


def require_limit(owner: str, limit: int | None) -> None:
    """Raises ValueError for a limit below 1."""
    require(limit is None or limit >= 1, f"{owner}.limit must be at least 1, or None for all; got {limit!r}")


def field_value(record: Mapping[str, Any], name: str) -> Any:
    """The value at a dotted path, `_Missing` where the path ends early."""
    if name in record:  # a dot may be part of a plain name
        return record[name]
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return _Missing(value if isinstance(value, dict) else record)
        value = value[part]
    return value


def missing_in(record: Mapping[str, Any], name: str) -> bool:
    """Whether a dotted path ends early."""
    return isinstance(field_value(record, name), _Missing)


def read_prompt(record: Mapping[str, Any], where: str, binding: str, name: str) -> Prompt:
    """The prompt as a question keeps it: its text, or (role, content) pairs.

    binding: what the user sets to name another field
    Raises ValueError that begins with `where`.
    """
    return _prompt(_present(record, name, where, binding), f"{where}: field {name!r}")


def _present(record: Mapping[str, Any], name: str, where: str, binding: str) -> Any:
    """The field's value. Raises ValueError if the record lacks the field."""
    value = field_value(record, name)
    if isinstance(value, _Missing):
        raise ValueError(f"{where}: no field {name!r}, there are {value.names}; set {binding}")
    return value


def _known(question: Question, group: list[Question], place: Place) -> Question | None:
    """The question of the group that this one repeats."""
    for known in group:
        if known.prompt == question.prompt and known.answer != question.answer:
            rows = " and ".join(str(q.meta["row"] + place.first) for q in (known, question))
            raise ValueError(
                f"{place.name}: {place.unit}s {rows} ask the same question with the answers {known.answer!r} and "
                f"{question.answer!r}; remove the wrong one: {question.prompt!r:.300}"
            )
    answer = normalised_answer(question.answer)
    return next((known for known in group if normalised_answer(known.answer) == answer), None)


def _question(record: Mapping[str, Any], row: int, where: str, fields: Fields, default_source: str) -> Question:
    prompt = read_prompt(record, where, f"{fields.owner}.prompt", fields.prompt)
    answer = _present(record, fields.answer, where, f"{fields.owner}.answer")
    if type(answer) is int:
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError(
            f"{where}: field {fields.answer!r} is {answer!r:.80}; a gold answer is text that is not empty (write "
            "a decimal number in parquet as text too, in the form that a grader should read)"
        )
    source = default_source if fields.source is None else field_value(record, fields.source)
    if isinstance(source, _Missing):
        source = default_source
    if type(source) is not str or not source:
        raise ValueError(f"{where}: field {fields.source!r} is {source!r:.80}; a source is the data set's name")
    meta: dict[str, Any] = {"row": row}
    for name in fields.meta:
        meta[name.rpartition(".")[2]] = _present(record, name, where, f"{fields.owner}.meta")
    return Question.make(source, prompt, str(answer), meta)


def _prompt(value: Any, where: str) -> Prompt:
    if type(value) is str:  # not a JSON number, which is a subclass of str (files.py)
        if not value.strip():
            raise ValueError(f"{where} is empty; remove the row")
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f'{where} is {value!r:.80}; a prompt is text or a list of {{"role": …, "content": …}}')
    messages = []
    for message in value:
        given = {name: part for name, part in message.items() if part is not None} if isinstance(message, dict) else {}
        if set(given) != {"role", "content"} or not all(type(part) is str for part in given.values()):
            raise ValueError(f'{where} has the message {message!r:.80}; a message is {{"role": text, "content": text}}')
        messages.append((given["role"], given["content"]))
    if not messages[-1][1].strip():
        raise ValueError(f"{where} ends in an empty message; remove the row")
    return tuple(messages)
