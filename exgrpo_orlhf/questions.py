"""Question sets from files: parquet in verl's layout, or JSONL. What is wrong is said at once, with file and row.

A question that occurs again with the same answer is merged into the first; with another answer it is an error, since
one of the two is wrong and training on it would teach that.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .replay.trajectory import Message, Question

logger = logging.getLogger(__name__)


class _Number(str):
    """A JSON number as it is written: 27.0 stays "27.0"."""

    __repr__ = str.__str__


class _Missing:
    """What a field without a value gives, told from null. names: the fields that are there."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = ", ".join(names)


@dataclass(frozen=True)
class QuestionFile:
    """A file of questions with verifiable answers.

    path: .parquet or .jsonl (one object a line)
    prompt: field of the question: text, or chat messages [{"role": …, "content": …}, …]
    answer: field of the gold answer: text; whole numbers too, and in JSONL any number, as it is written
    source: field of the data set's name; None, or a JSONL row without that field: the file's name without its suffix
    limit: load the first so many distinct questions; what comes after is not looked at

    A field is a name or a dotted path into nested records ("reward_model.ground_truth").
    """

    path: str
    prompt: str = "prompt"
    answer: str = "reward_model.ground_truth"
    source: str | None = "data_source"
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"QuestionFile.limit = {self.limit}; allowed: at least 1, or None for all")

    def load(self) -> list[Question]:
        """The distinct questions in the file's order; meta["row"] is the first row (from 0) that asks each.

        FileNotFoundError, or ValueError that names the file, the row or line, and the field.
        """
        path = Path(self.path)
        if not path.is_file():
            raise FileNotFoundError(f"{path.absolute()}: no such file of questions (QuestionFile.path)")
        readers = {".parquet": self._parquet_rows, ".jsonl": self._jsonl_rows}
        if path.suffix not in readers:
            raise ValueError(f"{path}: a file of questions ends in .parquet or .jsonl, not {path.suffix!r}")
        unit, first = ("line", 1) if path.suffix == ".jsonl" else ("row", 0)

        questions: dict[str | tuple[Message, ...], Question] = {}
        repeated = 0
        for row, record in enumerate(readers[path.suffix](path)):
            question = self._question(record, row, f"{path}, {unit} {row + first}", path.stem)
            known = questions.setdefault(question.prompt, question)
            if known.answer != question.answer:
                raise ValueError(
                    f"{path}: {unit}s {known.meta['row'] + first} and {row + first} ask the same question with the "
                    f"answers {known.answer!r} and {question.answer!r}; remove the wrong one: {question.prompt!r:.300}"
                )
            repeated += known is not question
            if len(questions) == self.limit:
                break
        if not questions:
            raise ValueError(f"{path} holds no questions; was it written to the end?")
        if repeated:
            logger.info("%s: %d questions, %d repetitions merged", path, len(questions), repeated)
        return list(questions.values())

    def _parquet_rows(self, path: Path) -> Iterator[Mapping[str, Any]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        fields = {"prompt": self.prompt, "answer": self.answer, "source": self.source}
        try:
            with pq.ParquetFile(path) as file:
                present = list(_columns(file.schema_arrow))
                for knob, name in fields.items():
                    if name is not None and name not in present:
                        raise ValueError(
                            f"{path}: no column {name!r}, there are {', '.join(present)}; set "
                            f"QuestionFile.{knob}" + (" (None: the file's name)" if knob == "source" else "")
                        )
                columns = [name for name in fields.values() if name is not None]
                for batch in file.iter_batches(columns=columns, batch_size=1024):
                    yield from batch.to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"{path}: cannot be read as parquet ({' '.join(str(error).split())}); copy or make it again"
            ) from error

    def _jsonl_rows(self, path: Path) -> Iterator[Mapping[str, Any]]:
        with path.open("rb") as file:  # bytes: lines end at "\n" alone, not at the U+2028 inside a question
            for number, line in enumerate(file, 1):
                try:
                    record = json.loads(
                        line.decode(), parse_float=_Number, parse_int=_Number, parse_constant=_refuse_constant
                    )
                except ValueError as error:
                    torn = "" if line.endswith(b"\n") else "; the file ends here, was it written to the end?"
                    raise ValueError(f"{path}, line {number}: not JSON: {error}{torn}") from error
                if not isinstance(record, dict):
                    raise ValueError(f"{path}, line {number}: a row is an object {{…}}, not {record!r:.80}")
                yield record

    def _question(self, record: Mapping[str, Any], row: int, where: str, stem: str) -> Question:
        prompt = _field(record, self.prompt)
        answer = _field(record, self.answer)
        for knob, name, value in (("prompt", self.prompt, prompt), ("answer", self.answer, answer)):
            if isinstance(value, _Missing):
                raise ValueError(f"{where}: no field {name!r}, there are {value.names}; set QuestionFile.{knob}")
        if type(answer) is int:
            answer = str(answer)
        if not isinstance(answer, str) or not answer.strip():
            raise ValueError(
                f"{where}: field {self.answer!r} is {answer!r:.80}; a gold answer is text that is not empty (a decimal "
                "number in parquet too: write it as text, as a grader should read it)"
            )
        source = stem if self.source is None else _field(record, self.source)
        if isinstance(source, _Missing):
            source = stem
        if type(source) is not str or not source:
            raise ValueError(f"{where}: field {self.source!r} is {source!r:.80}; a source is the data set's name")
        return Question.make(source, _prompt(prompt, f"{where}: field {self.prompt!r}"), str(answer), {"row": row})


def fingerprint(questions: Iterable[Question]) -> str:
    """Hash of the questions' ids in their order, 32 hexadecimal digits: equal for equal sets in equal order."""
    return hashlib.blake2b("\n".join(question.id for question in questions).encode(), digest_size=16).hexdigest()


def _prompt(value: Any, where: str) -> str | tuple[Message, ...]:
    """The prompt as a question keeps it: its text, or (role, content) pairs. ValueError begins with `where`."""
    if type(value) is str:  # and no number
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


def _field(record: Mapping[str, Any], name: str) -> Any:
    """The value at a dotted path, `_Missing` where the path ends early."""
    if name in record:  # a dot may be part of a plain name
        return record[name]
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return _Missing(value if isinstance(value, dict) else record)
        value = value[part]
    return value


def _columns(fields: Iterable[Any]) -> Iterator[str]:
    """The dotted paths of arrow fields, nested records included."""
    for field in fields:
        yield field.name
        if str(field.type).startswith("struct<"):
            yield from (f"{field.name}.{path}" for path in _columns(field.type))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
