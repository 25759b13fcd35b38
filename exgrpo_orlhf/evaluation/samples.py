"""The samples of a benchmark in `samples.jsonl`: one line each, appended as soon as it is graded."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict

from ..files import replacing

Place = tuple[int, int]  # row of the set, sample
VERDICTS = ("correct", "wrong", "no_answer", "timeout", "error")
UNGRADED = ("timeout", "error")


class SampleError(ValueError):
    """A file of samples that cannot be used. The message names the file and the line."""


class Sample(TypedDict):
    """One line.

    row: of the set, from 0; sample: of the question, from 0; id: of the question; seed: of this response
    question: its text; prompt: the text that the model got; gold: the reference answer
    extracted: the answer in the response
    sound: whether the reasoning holds, None where that is not checked
    plain: the verdict of math-verify's plain recipe, None where it was not requested
    group: of the question, None where the benchmark has no groups
    rewards: by name, where the run has several (Verifier.rewards)
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


class Line(NamedTuple):
    """A sample without its texts. start: offset of its line in bytes; tokens: of the response."""

    start: int
    row: int
    sample: int
    verdict: str
    plain: str | None
    truncated: bool
    tokens: int

    @property
    def disagree(self) -> bool:
        """One grader says that the response is correct, the other does not."""
        return self.plain is not None and (self.plain == "correct") != (self.verdict == "correct")


def read_samples(path: Path) -> Iterator[tuple[int, Sample]]:
    """Each sample with the offset of its line in bytes. Raises SampleError with file and line."""
    if not path.is_file():
        raise SampleError(f"{path} does not exist")
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):  # bytes: lines end at "\n" alone, a text may contain U+2028
            try:
                sample: Sample = json.loads(line)
                if set(Sample.__annotations__) - set(sample) - {"rewards"} or set(sample) - set(Sample.__annotations__):
                    raise ValueError("its fields are not those of a sample")
                if unknown := {sample["verdict"], sample["plain"]} - {*VERDICTS, None}:
                    raise ValueError(f"verdicts are {', '.join(VERDICTS)}, not {unknown.pop()!r}")
            except (ValueError, TypeError) as error:
                raise SampleError(
                    f"{path}, line {number}: not a sample ({error}): {line[:120]!r}; correct or remove it"
                ) from error
            yield start, sample
            start += len(line)


def read_lines(path: Path) -> list[Line]:
    """All samples without their texts, by row and sample. Raises SampleError."""
    return sorted(
        (
            Line(start, s["row"], s["sample"], s["verdict"], s["plain"], s["finish"] == "length", s["response_tokens"])
            for start, s in read_samples(path)
        ),
        key=lambda line: (line.row, line.sample),
    )


def choose(lines: Sequence[Line], count: int) -> list[Line]:
    """At most `count` samples for a reader to look at, in their order, always the same ones.

    First come those on which the graders disagree and those that could not be graded. The room left is divided evenly
    among the verdicts, with truncated responses apart. Each part is spread evenly over the set, which may be sorted by
    subject.
    """
    if len(lines) <= count:
        return list(lines)
    pools = defaultdict(list)
    for line in lines:
        first = line.disagree or line.verdict in UNGRADED
        pools[None if first else (line.verdict, line.truncated)].append(line)
    chosen = _spread(pools.pop(None, []), count)
    for i, pool in enumerate(sorted(pools.values(), key=len)):  # room left by a small one goes on
        chosen += _spread(pool, (count - len(chosen)) // (len(pools) - i))
    return sorted(chosen, key=lambda line: (line.row, line.sample))


def _spread(lines: Sequence[Line], count: int) -> list[Line]:
    count = min(count, len(lines))
    return [lines[i * len(lines) // count] for i in range(count)]


class SampleFile:
    """`samples.jsonl` of one benchmark, to write and read. Opening it removes a torn last line of a killed process."""

    def __init__(self, path: Path) -> None:
        """Raises SampleError for a line that is not a sample, or that is there twice."""
        self.path = path
        self.done: dict[Place, bytes] = {}  # in the file's order, with the hash of seed and prompt
        if path.exists():
            self._cut_torn_line()
            self._scan()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, samples: Sequence[Sample]) -> None:
        """Write whole lines, with the operating system when this returns. If that fails (a full disk), none is left."""
        with self.path.open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            lines = memoryview(b"".join(_line(sample) for sample in samples))
            try:
                while lines:
                    lines = lines[file.write(lines) :]
            except BaseException:
                file.truncate(end)
                raise
        self.done |= {(each["row"], each["sample"]): prompt_hash(each["seed"], each["prompt"]) for each in samples}

    def read(self) -> Iterator[Sample]:
        """Raises SampleError."""
        return (sample for _, sample in read_samples(self.path))

    def sort(self) -> None:
        """By row and sample: equal responses give an equal file, in whatever order they came."""
        if list(self.done) != sorted(self.done):
            self.write(sorted(self.read(), key=lambda sample: (sample["row"], sample["sample"])))

    def write(self, samples: Iterable[Sample]) -> None:
        """Replace all samples. The file is the old one or the new one, never a part."""
        with replacing(self.path) as partial, partial.open("wb") as file:
            file.writelines(_line(sample) for sample in samples)
        self.done.clear()
        self._scan()

    def _scan(self) -> None:
        for number, sample in enumerate(self.read(), 1):
            row, index = place = sample["row"], sample["sample"]
            if place in self.done:
                raise SampleError(
                    f"{self.path}, line {number}: row {row}, sample {index} is there already; remove one of them"
                )
            self.done[place] = prompt_hash(sample["seed"], sample["prompt"])

    def _cut_torn_line(self) -> None:
        with self.path.open("r+b") as file:
            if os.fstat(file.fileno()).st_size:
                with mmap.mmap(file.fileno(), 0) as data:
                    end = data.rfind(b"\n") + 1
                file.truncate(end)


def prompt_hash(seed: int, prompt: str) -> bytes:
    """Of what a response answers: its seed and its prompt."""
    return hashlib.blake2b(f"{seed} {prompt}".encode(errors="surrogatepass"), digest_size=8).digest()


def _line(sample: Sample) -> bytes:
    return json.dumps(sample).encode("ascii") + b"\n"
