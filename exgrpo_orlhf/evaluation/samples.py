"""The samples of a benchmark in `samples.jsonl`: one line each, appended as soon as it is graded."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

from ..io.files import replacing
from ..io.json_lines import JsonLines

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
    return sorted(chosen)


def _spread(lines: Sequence[Line], count: int) -> list[Line]:
    count = min(count, len(lines))
    return [lines[i * len(lines) // count] for i in range(count)]


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
        if fields - set(row) - {"rewards"} or set(row) - fields:
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
