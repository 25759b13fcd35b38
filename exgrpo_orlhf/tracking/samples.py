"""Graded responses to the questions of a benchmark or of validation, one line each in `samples.jsonl`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

from ..grader.grade import Grade
from ..grader.options import options_of
from ..io.files import replacing
from ..io.json_lines import JsonLines
from ..questions.text import plain_text
from ..records import Question
from ..rewards import Verifier, Written

SAMPLES = "samples.jsonl"  # in a folder of each benchmark
VERDICTS = ("correct", "wrong", "no_answer", "timeout", "error")
UNGRADED = ("timeout", "error")


class Sample(TypedDict):
    """One line.

    row: of the set, from 0; sample: of the question, from 0; id: of the question; seed: of this response
    question: its text; prompt: the text that the model got; gold: the reference answer
    extracted: the answer in the response
    sound: whether the reasoning holds, None where that is not checked
    plain: the verdict of math-verify's plain recipe, None where it was not requested
    group: of the question, None where the benchmark has no groups
    rewards: by name, where the run has several (Verifier.rewards)
    options: of a question that lists its options, by label
    """

    row: int
    sample: int
    id: str
    seed: int
    question: str
    prompt: str
    gold: str
    response: str
    extracted: str | None
    verdict: str
    sound: bool | None
    plain: str | None
    prompt_tokens: int
    response_tokens: int
    finish: str
    group: str | None
    rewards: NotRequired[dict[str, float]]
    options: NotRequired[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Answered:
    """A response before it is graded. Fields as in `Sample`.

    text: of the response; tokens: their number, with the end token; written: as the verifier gets it
    grade: by the environment in which it was played; None: the verifier gives one
    """

    row: int
    sample: int
    seed: int
    question: Question
    prompt: str
    prompt_tokens: int
    text: str
    tokens: int
    finish: str
    written: Written
    grade: Grade | None = None


def graded(verifier: Verifier, answered: Sequence[Answered], progress: tuple[int, int] = (0, 1)) -> list[Sample]:
    """The samples of responses, in order. progress: as `Answer` has it. Raises GradingError."""
    ungraded = [(one.question, one.written) for one in answered if one.grade is None]
    new_grades = iter(verifier.grade_all(ungraded, progress))
    grades = [one.grade or next(new_grades) for one in answered]
    verifier.check_failed(grades)
    return [_sample(one, grade) for one, grade in zip(answered, grades, strict=True)]


def _sample(answered: Answered, grade: Grade) -> Sample:
    question = answered.question
    sample: Sample = {
        "row": answered.row,
        "sample": answered.sample,
        "id": question.id,
        "seed": answered.seed,
        "question": plain_text(question.prompt),
        "prompt": answered.prompt,
        "gold": question.answer_text,
        "response": answered.text,
        "extracted": grade.extracted,
        "verdict": grade.verdict,
        "sound": grade.sound,
        "plain": None,
        "prompt_tokens": answered.prompt_tokens,
        "response_tokens": answered.tokens,
        "finish": answered.finish,
        "group": question.meta.get("group"),
    }
    if grade.parts:
        sample["rewards"] = dict(grade.parts)
    if options := options_of(question.meta.get("options")):
        sample["options"] = options
    return sample


def grouped(question: Question, by: str | None) -> Question:
    """The question with its group, the value of a field of its meta; as it is if it has no such field."""
    if by is None or by not in question.meta:
        return question
    return replace(question, meta={**question.meta, "group": str(question.meta[by])})


def response_seed(seed: int, test_set: str, row: int, question: Question, sample: int) -> int:
    """The seed of a response, made from that of the evaluation. It does not depend on which other questions or samples
    are evaluated."""
    name = f"{seed} {test_set} {row} {question.id} {sample}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1


class Line(NamedTuple):
    """A sample without its texts. tokens: of the response; prompt: hash of its seed and prompt (`prompt_hash`)"""

    row: int
    sample: int
    verdict: str
    plain: str | None
    truncated: bool
    tokens: int
    prompt: bytes

    @property
    def disagree(self) -> bool:
        """One grader says that the response is correct, the other does not."""
        return self.plain is not None and (self.plain == "correct") != (self.verdict == "correct")


class SampleFile(JsonLines):
    """`samples.jsonl` of one benchmark, to write and read. keys: a `Line` for each sample, in the file's order"""

    ROW = "a sample"

    def __init__(self, path: Path) -> None:
        """Raises ValueError for a line that is not a sample, or that is there twice."""
        super().__init__(path)
        done: set[tuple[int, int]] = set()
        for number, (row, sample, *_) in enumerate(self.keys, 1):
            if (row, sample) in done:
                duplicate = f"row {row}, sample {sample} is there already; remove one of them"
                raise ValueError(f"{self.path}, line {number}: {duplicate}")
            done.add((row, sample))

    def _key(self, row: Any) -> Line:
        fields = set(Sample.__annotations__)
        if fields - set(row) - {"rewards", "options"} or set(row) - fields:
            raise ValueError("its fields are not those of a sample")
        if unknown := {row["verdict"], row["plain"]} - {*VERDICTS, None}:
            raise ValueError(f"verdicts are {', '.join(VERDICTS)}, not {unknown.pop()!r}")
        outcome = row["verdict"], row["plain"], row["finish"] == "length", row["response_tokens"]
        return Line(row["row"], row["sample"], *outcome, prompt_hash(row["seed"], row["prompt"]))

    def append(self, samples: Sequence[Sample]) -> None:
        """Write whole lines, after removing a torn one of a killed process. Raises as `add`."""
        self.cut(len(self.keys))
        self.add(*samples)

    def sort(self) -> None:
        """By row and sample: equal responses give an equal file, in whatever order they came."""
        if self.keys != sorted(self.keys):
            self.write(sorted(self.read(), key=lambda sample: (sample["row"], sample["sample"])))

    def write(self, samples: Iterable[Sample]) -> None:
        """Replace all samples. The file is the old one or the new one, never a part."""
        with replacing(self.path) as partial, partial.open("wb") as file:
            file.writelines(map(self.line, samples))
        self._scan()


def prompt_hash(seed: int, prompt: str) -> bytes:
    """Of what a response answers: its seed and its prompt."""
    return hashlib.blake2b(f"{seed} {prompt}".encode(errors="surrogatepass"), digest_size=8).digest()
