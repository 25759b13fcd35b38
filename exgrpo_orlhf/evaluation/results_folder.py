"""A results folder as the report reads it: results.json whole, samples.jsonl without its texts until they are shown."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .tables import Results

VERDICTS = ("correct", "wrong", "no_answer", "timeout", "error")
UNGRADED = ("timeout", "error")


class Line(NamedTuple):
    """A sample without its texts. start: where its line begins, in bytes; tokens: of the response."""

    start: int
    row: int
    sample: int
    verdict: str
    plain: str | None
    truncated: bool
    tokens: int

    @property
    def disagree(self) -> bool:
        """One grader says that it is correct, the other does not."""
        return self.plain is not None and (self.plain == "correct") != (self.verdict == "correct")


@dataclass(frozen=True)
class ResultsFolder:
    """lines: benchmark -> its samples in the order of (row, sample)"""

    path: Path
    results: Results
    lines: dict[str, list[Line]]

    @classmethod
    def read(cls, path: Path) -> ResultsFolder:
        """Raises ValueError for a folder without results.json, or whose samples are not those that it counts."""
        file = path / "results.json"
        if not file.is_file():
            raise ValueError(f"{path}: no results.json; is this the folder of an evaluation that came to its end?")
        try:
            results = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as bad:
            raise ValueError(f"{file}: not JSON ({bad})") from None
        if results.get("format") != 1:
            raise ValueError(f"{file}: format {results.get('format')!r}; this version reads format 1")
        lines = {}
        for key, benchmark in results["benchmarks"].items():
            lines[key] = _lines(path / key / "samples.jsonl")
            counted = benchmark["questions"] * benchmark["samples"]
            if len(lines[key]) != counted:
                raise ValueError(
                    f"{path / key / 'samples.jsonl'} holds {len(lines[key]):,} samples, {file} counts {counted:,}: "
                    "run or regrade the evaluation to its end first"
                )
        return cls(path, results, lines)

    def samples(self, benchmark: str, lines: Sequence[Line]) -> list[dict[str, Any]]:
        """These samples with their texts."""
        with (self.path / benchmark / "samples.jsonl").open("rb") as file:
            found = []
            for line in lines:
                file.seek(line.start)
                found.append(json.loads(file.readline()))
        return found


def _lines(path: Path) -> list[Line]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist, and results.json counts its samples")
    found, start = [], 0
    with path.open("rb") as file:  # bytes end lines at \n alone; U+2028 may stand in a text
        for number, raw in enumerate(file, 1):
            try:
                sample = json.loads(raw)
                line = Line(
                    start,
                    sample["row"],
                    sample["sample"],
                    sample["verdict"],
                    sample["plain"],
                    sample["finish"] == "length",
                    sample["response_tokens"],
                )
                if not {line.verdict, line.plain} <= {*VERDICTS, None}:
                    raise ValueError(f"verdicts are {', '.join(VERDICTS)}, not {line.verdict!r}, {line.plain!r}")
            except (ValueError, KeyError, TypeError) as bad:
                raise ValueError(f"{path}, line {number}: not a sample ({bad})") from None
            found.append(line)
            start += len(raw)
    return sorted(found, key=lambda line: (line.row, line.sample))


def choose(lines: Sequence[Line], count: int) -> list[Line]:
    """At most `count` samples to look at, in their order, always the same ones.

    First those on which the graders disagree and those that could not be graded; what room is left goes evenly to the
    verdicts, truncated ones apart, and within each to samples spread evenly over the set, which may be sorted by
    subject.
    """
    if len(lines) <= count:
        return list(lines)
    first = [line for line in lines if line.disagree or line.verdict in UNGRADED]
    chosen = _spread(first, min(count, len(first)))
    pools = defaultdict(list)
    for line in lines:
        if not (line.disagree or line.verdict in UNGRADED):
            pools[line.verdict, line.truncated].append(line)
    for done, pool in enumerate(sorted(pools.values(), key=len)):  # what a small one leaves goes to the larger ones
        chosen += _spread(pool, min(len(pool), (count - len(chosen)) // (len(pools) - done)))
    return sorted(chosen, key=lambda line: (line.row, line.sample))


def _spread(lines: Sequence[Line], count: int) -> list[Line]:
    return [lines[i * len(lines) // count] for i in range(count)]
