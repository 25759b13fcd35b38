"""Reads distinct questions from records of any source. Errors name the place and the gin binding.

A row that repeats prompt (white space around it aside), answer, source and the other columns of an earlier one is
merged into it. The same prompt and columns with another answer are an error, because one of the two answers is wrong.
Prompts that only look alike both stay: "reverse Ab" is not "reverse aB", and the indentation of code counts.
"""

# No postponed annotations: those of inherited fields would be looked up in the module of the class that inherits them.
import hashlib
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from ..checks import Constraint, Count, check_settings, require
from ..records import EXTRA_INFO, Question
from .solutions import refuse_solutions
from .text import Prompt, normalised, without_thousands

logger = logging.getLogger(__name__)
# Names of columns that need no binding where one of them alone is there.
_COMMON = {
    "prompt": ("question", "problem", "prompt", "input"),
    "answer": ("answer", "solution", "final_answer", "expected_answer", "ground_truth", "gold"),
}
_WORKED = "solution"  # beside an answer it is how that is found
_NUMBER_OR_SHARE = Constraint(
    "must be a number of questions, or a share below 1", lambda value: 0 <= value < 1 or value == value // 1 > 0
)
Layout = tuple[str, str]  # the columns of question and answer
_HASHES = re.compile(r"\n####[ \t]*([^\n]*\S)\s*\Z")  # GSM8K: the solution, then the answer


@dataclass(frozen=True)
class Place:
    """Where records are: in what, how one is called ("row"), the number of the first one, and their fields."""

    name: str
    unit: str
    first: int
    fields: Container[str] = ()

    def of(self, row: int) -> str:
        return f"{self.name}, {self.unit} {row + self.first}"


@dataclass(frozen=True, kw_only=True)
class QuestionRecords:
    """Base of the sources whose records have a question each: which fields hold what a question needs.

    prompt: field of the question: text, or chat messages [{"role": …, "content": …}, …]; in CSV text alone
    answer: field of the gold answer: text or a number; or a list of these, any of which is right (Verifier.kind 'math',
        'math_verify'). 'function', 'code', 'http' and 'choice' get it as is, the others as text. Where a set lacks the
        column of the default, here or for `prompt`, its one column with a common name, in small or capital letters, is
        taken (question, problem or input; answer, final_answer, expected_answer, ground_truth or gold, or else
        solution; of GSM8K what follows ####)
    source: field of the data set's name; None, a JSONL row without that field, or a table without a column
        'data_source' where no other is named: the source's own name
    limit: load only this many distinct questions, the first ones; None: all
    held_out: so many of them, or this share if it is below 1, are kept apart, chosen by their ids, whatever the order
        of the rows. Of the source of Work.questions they are the run's validation, where Work.validation is None
    part: 'train' are the others, 'validation' the ones held out, for a source that is bound in several places; 'all':
        'train', or everything with held_out = 0
    meta: further fields that a verifier needs, such as ('options',) for 'choice' or ('tests',) for 'code'; they are
        kept in Question.meta, with their types, under the last part of their path. A function written for verl gets the
        column 'extra_info' without asking

    A field is a name or a dotted path into nested records ("reward_model.ground_truth").
    """

    prompt: str = "prompt"
    answer: str = "reward_model.ground_truth"
    source: str | None = "data_source"
    limit: Count | None = None
    meta: tuple[str, ...] = ()
    held_out: Annotated[float, _NUMBER_OR_SHARE] = 0
    part: Literal["all", "train", "validation"] = "all"

    def __post_init__(self) -> None:
        check_settings(type(self), vars(self))
        require(
            self.held_out > 0 or self.part == "all",
            f"{self._owner}.part is 'train' or 'validation' with {self._owner}.held_out above 0; got {self.part!r} "
            f"with {self.held_out!r}",
        )
        names = ["row", *(name.rpartition(".")[2] for name in self.meta)]  # "row" is the row's number
        twice = [name for name, count in Counter(names).items() if count > 1]
        require(not twice, f"{self._owner}.meta: fields are kept under the last part of their path; {twice} is taken")

    @property
    def _owner(self) -> str:
        """Whose gin bindings these are."""
        return type(self).__name__

    def columns(self, layout: Layout) -> tuple[str, ...]:
        """The fields that are read."""
        return (*layout, *([] if self.source is None else [self.source]), *self.meta, "extra_info")

    def layout(self, present: list[str], where: str) -> Layout:
        """The columns of question and answer. present: the columns there are, nested ones as dotted paths; [] without a
        row. Raises ValueError that names all that are missing."""
        chosen, missing = {"prompt": self.prompt, "answer": self.answer}, []
        for binding, names in _COMMON.items():
            default = chosen[binding] == getattr(QuestionRecords, binding)
            common = [name for name in present if default and name.lower() in names]
            common = [name for name in common if name.lower() != _WORKED] or common
            if chosen[binding] not in present and len(common) == 1:
                chosen[binding] = common[0]
            elif chosen[binding] not in present:
                missing.append((chosen[binding], binding + (f" ({' or '.join(common)})" if common else "")))
        if self.source is not None and self.source not in (QuestionRecords.source, *present):  # the default may lack
            missing.append((self.source, "source (None: the set's own name)"))
        missing += [(name, "meta") for name in self.meta if name not in present]
        if present and missing:
            there = ", ".join(name if name == name.strip() else repr(name) for name in present)
            raise ValueError(
                f"{where}: no column {' and no '.join(repr(name) for name, _ in missing)}, there are {there}; "
                f"set {' and '.join(f'{self._owner}.{binding}' for _, binding in missing)}"
            )
        return chosen["prompt"], chosen["answer"]

    def distinct_questions(
        self, rows: Iterable[Mapping[str, Any]], place: Place, own_name: str, layout: Layout
    ) -> list[Question]:
        """The distinct questions in their order; meta["row"] is the first row (from 0) that asks each.

        own_name: the source of questions whose record does not say it
        Raises ValueError for a record that cannot be used, for an answer that contradicts an earlier one, for prompts
        that hold their solution, and if there are no questions.
        """
        questions: dict[str, Question] = {}
        by_text: dict[str, Question] = {}
        sources: set[tuple[str, str]] = set()  # of each text
        repeated = 0
        for row, record in enumerate(rows):
            question = self._question(record, row, place.of(row), own_name, layout)
            try:
                key = text_key(question)
                question.answer_text.encode()
            except UnicodeEncodeError as error:
                half = error.object[error.start]
                raise ValueError(f"{place.of(row)}: {half!r} is half a character; write it whole") from None
            first = by_text.setdefault(key, question)
            if first.answer_text != question.answer_text:
                rows_of = " and ".join(str(q.meta["row"] + place.first) for q in (first, question))
                raise ValueError(
                    f"{place.name}: {place.unit}s {rows_of} ask the same question with the answers {first.answer!r} "
                    f"and {question.answer!r}; remove the wrong one: {question.prompt!r:.300}"
                )
            if (key, question.source) in sources:
                repeated += 1
                continue
            sources.add((key, question.source))
            question = with_own_id(question, questions)
            questions[question.id] = question
            if len(questions) == self.limit:
                break
        if not questions:
            raise ValueError(f"{place.name} holds no questions; was it written to the end?")
        others = [name for name in _COMMON["prompt"] if name in place.fields and name != layout[0]]
        remedy = f"set {self._owner}.prompt = {others[0]!r}, or " if others else ""
        remedy += f"leave that part of {layout[0]!r} out of the rows"
        refuse_solutions([*questions.values()], lambda question: place.of(question.meta["row"]), remedy)
        if layout != (self.prompt, self.answer):
            text = "%s: questions are read from column %r and answers from %r; %s.prompt and .answer name others"
            logger.info(text, place.name, *layout, self._owner)
        if repeated:
            logger.info("%s: %d questions, %d repetitions merged", place.name, len(questions), repeated)
        return self._part_of([*questions.values()], place.name)

    def _part_of(self, questions: list[Question], name: str) -> list[Question]:
        """Those of this part. name: of the source"""
        if not self.held_out:
            return questions
        # Ids are hashes, so that the smallest ones are a random part, the same in every process. A question that looks
        # like another one is not held out: the other would be trained on.
        looks = Counter(normalised(question.prompt) for question in questions)
        alone = sorted(question.id for question in questions if looks[normalised(question.prompt)] == 1)
        count = int(self.held_out) if self.held_out >= 1 else max(1, round(self.held_out * len(questions)))
        if count >= len(alone):
            raise ValueError(
                f"{name} holds {len(alone)} questions; {self._owner}.held_out = {self.held_out} leaves none to "
                "train on (questions that differ in typesetting alone do not count)"
            )
        apart = {*alone[:count]}
        return [kept for kept in questions if (kept.id in apart) == (self.part == "validation")]

    def _question(self, record: Mapping[str, Any], row: int, where: str, own_name: str, layout: Layout) -> Question:
        prompt = read_prompt(record, where, f"{self._owner}.prompt", layout[0])
        answer = present(record, layout[1], where, f"{self._owner}.answer")
        answers = answer if isinstance(answer, list) else [answer]
        if not answers or not all(map(_is_gold, answers)):
            raise ValueError(
                f"{where}: field {layout[1]!r} is {answer!r:.80}; a gold answer is text that is not empty, a finite"
                " number, or a list of these"
            )
        if layout[1] != self.answer and isinstance(answer, str) and (match := _HASHES.search(answer)):
            answer = without_thousands(match[1])
        source = own_name
        if self.source is not None and not missing_in(record, self.source):
            source = field_value(record, self.source)
        if type(source) is not str or not source:
            raise ValueError(f"{where}: field {self.source!r} is {source!r:.80}; a source is the data set's name")
        meta = {name.rpartition(".")[2]: present(record, name, where, f"{self._owner}.meta") for name in self.meta}
        if isinstance(record.get("extra_info"), dict) and "extra_info" not in meta:
            meta[EXTRA_INFO] = record["extra_info"]
        answer = tuple(answer) if isinstance(answer, list) else answer
        return Question.make(source, prompt, answer, {"row": row, **meta})


def text_key(question: Question) -> str:
    """A hash of what is asked, to the letter: the prompt without white space around it, and the columns in its meta
    that a binding asks for."""
    prompt = (("user", question.prompt),) if isinstance(question.prompt, str) else question.prompt
    *before, (role, content) = prompt
    columns = {name: value for name, value in question.meta.items() if name not in ("row", EXTRA_INFO)}
    asked = json.dumps([*before, role, content.strip(), columns], sort_keys=True, default=repr, ensure_ascii=False)
    return hashlib.blake2b(asked.encode(), digest_size=16).hexdigest()


def with_own_id(question: Question, ids: Container[str]) -> Question:
    """The question, with an id that is made of its columns too if its own is taken: other options, or other tests."""
    if question.id not in ids:
        return question
    return replace(question, id=f"{int(question.id, 16) ^ int(text_key(question), 16):032x}")


def fingerprint(questions: Iterable[Question]) -> str:
    """Hash of the questions' ids in their order, 32 hexadecimal digits: equal for equal sets in equal order."""
    return hashlib.blake2b("\n".join(question.id for question in questions).encode(), digest_size=16).hexdigest()


def content_hash(questions: Iterable[Question]) -> str:
    """As `fingerprint`, also of the columns that questions keep (`Question.meta`), without their rows' numbers.

    A value is taken by its repr, for a task's may be none that JSON has, without an address in it.
    """
    total = hashlib.blake2b(digest_size=16)
    for question in questions:
        columns = sorted((str(name), repr(value)) for name, value in question.meta.items() if name != "row")
        total.update(re.sub(r" at 0x[0-9a-f]+", "", repr((question.id, columns))).encode(errors="replace"))
    return total.hexdigest()


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
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{where} is empty; remove the row")
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f'{where} is {value!r:.80}; a prompt is text or a list of {{"role": …, "content": …}}')
    messages = []
    for message in value:
        parts = {key: part for key, part in message.items() if part is not None} if isinstance(message, dict) else {}
        if set(parts) != {"role", "content"} or not all(isinstance(part, str) for part in parts.values()):
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


def _is_gold(answer: Any) -> bool:
    if isinstance(answer, float):
        return math.isfinite(answer)
    return type(answer) is int or (isinstance(answer, str) and bool(answer.strip()))
