"""The samples of a benchmark on the disk: one line each, appended as they come, so that nothing is lost."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypedDict

from ..files import replacing

Place = tuple[int, int]  # row of the set, sample


class SampleError(ValueError):
    """A file of samples that cannot be used: names the file and the line."""


class Sample(TypedDict):
    """One line.

    row: of the set, from 0; sample: from 0; id: the question's; seed: of this response
    question: its text, for graders that look at it; prompt: as rendered; gold: the answer
    extracted: what was taken for the response's answer
    sound: whether the reasoning holds, where that is checked; plain: the verdict of math-verify's plain recipe
    group: of the question, where the benchmark has groups
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


class SampleFile:
    """`samples.jsonl` of one benchmark. A torn last line, of a process that was killed, is taken away on opening."""

    def __init__(self, path: Path) -> None:
        """Raises SampleError for a line that is not a sample, or is there twice."""
        self.path = path
        self.done: dict[Place, bytes] = {}  # with what was asked
        self._ordered = True
        if path.exists():
            self._cut_torn_line()
            self._scan()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, samples: Sequence[Sample]) -> None:
        """Whole lines, handed to the system before this returns; where that fails (a full disk), none of them."""
        with self.path.open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            lines = memoryview(b"".join(_line(sample) for sample in samples))
            try:
                while lines:
                    lines = lines[file.write(lines) :]
            except BaseException:
                file.truncate(end)
                raise
        for sample in samples:
            self._note(sample)

    def read(self) -> Iterator[Sample]:
        """Raises SampleError."""
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):  # bytes: lines end at "\n" alone
                try:
                    sample = json.loads(line)
                    whole = set(Sample.__annotations__) == set(sample)
                except (ValueError, TypeError):
                    whole = False
                if not whole:
                    raise SampleError(f"{self.path}, line {number}: not a sample: {line[:120]!r}; mend or remove it")
                yield sample

    def sort(self) -> None:
        """By row and sample: two runs that gave the same responses have the same file, in whatever order they came."""
        if not self._ordered:
            self.write(sorted(self.read(), key=lambda sample: (sample["row"], sample["sample"])))

    def write(self, samples: Iterable[Sample]) -> None:
        """All samples anew: the file is as before or as wanted, never half of it."""
        with replacing(self.path) as partial, partial.open("wb") as file:
            file.writelines(_line(sample) for sample in samples)
        self.done.clear()
        self._ordered = True
        self._scan()

    def _scan(self) -> None:
        for number, sample in enumerate(self.read(), 1):
            if (sample["row"], sample["sample"]) in self.done:
                raise SampleError(
                    f"{self.path}, line {number}: row {sample['row']}, sample {sample['sample']} is there already; "
                    "remove one of them"
                )
            self._note(sample)

    def _note(self, sample: Sample) -> None:
        place = (sample["row"], sample["sample"])
        self._ordered = self._ordered and (not self.done or place > self._last)
        self._last = place
        self.done[place] = asked(sample["seed"], sample["prompt"])

    def _cut_torn_line(self) -> None:
        with self.path.open("r+b") as file:
            data = file.seek(0, os.SEEK_END)
            while data:
                start = max(0, data - 65536)
                file.seek(start)
                found = file.read(data - start).rfind(b"\n")
                if found >= 0:
                    file.truncate(start + found + 1)
                    return
                data = start
            file.truncate(0)


def asked(seed: int, prompt: str) -> bytes:
    """A response belongs to this and to no other."""
    return hashlib.blake2b(f"{seed} {prompt}".encode(errors="surrogatepass"), digest_size=8).digest()


def _line(sample: Sample) -> bytes:
    return json.dumps(sample).encode("ascii") + b"\n"
