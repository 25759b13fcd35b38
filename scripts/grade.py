#!/usr/bin/env python
"""Grade responses against gold answers, without a model: test cases of a grader, or saved generations again.

    python scripts/grade.py --kind math --in cases.jsonl --out verdicts.jsonl

Rows are {"gold": …, "response": …}; kinds that need them also read "prompt", "options" (kind choice) and "tests" (kind
code). Writes one row for each row read, in order, with all its keys and "verdict" (correct, wrong, no_answer, timeout,
error) and "extracted". A second run continues where the first one stopped; it refuses to if the rows or the settings
(kept in OUT.settings.json) have changed, and it never writes to a file that is not its own.
Exit status: 0 when all rows are graded (whatever the verdicts), 2 for files or settings that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from exgrpo_orlhf import terminal

ADDED = ("verdict", "extracted")
SETTINGS = ("kind", "function", "timeout", "memory")  # verdicts depend on these
BATCH = 256  # rows between two writes


class BadFile(ValueError):
    """A file cannot be used. The message names the file and the line."""


def main() -> int:
    arguments = _parser().parse_args()
    from exgrpo_orlhf.rewards import Verifier, close_pools

    settings = {name: getattr(arguments, name) for name in SETTINGS}
    try:
        verifier = Verifier(**settings, workers=arguments.workers, max_failed_share=1.0)
        counts = grade(verifier, arguments.rows, arguments.out, settings)
    except (ValueError, OSError) as error:  # BadFile and GradingError among them
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        close_pools()
    verdicts = [f"{n} {verdict}" for verdict, n in counts.most_common()]
    print(f"{arguments.out}: {counts.total()} rows", *verdicts, sep=", ")
    return 0


def grade(verifier: Any, source: Path, out: Path, settings: dict[str, Any]) -> Counter[str]:
    """Append the verdicts that `out` lacks. Returns the number of each verdict in it now."""
    kept = out.with_name(f"{out.name}.settings.json")
    for written in (out, kept):
        if written.exists() and written.samefile(source):
            raise BadFile(f"{written} is the input itself; give --out another name")
    total = sum(1 for _ in read(source, check=True))
    counts = _done(source, out)
    _keep(settings, kept, out, counts.total())
    earlier, start, reported = counts.total(), time.monotonic(), 0.0
    if earlier:
        print(f"{out}: {earlier} rows are graded already", file=sys.stderr)
    rows = islice(read(source), earlier, None)
    with out.open("ab+") as file:
        file.seek(0)
        # The incomplete line that an earlier run was writing when it ended goes.
        file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
        while batch := list(islice(rows, BATCH)):
            grades = verifier.grade_all([(_question(row), row["response"]) for row in batch])
            for row, each in zip(batch, grades, strict=True):
                counts[each.verdict] += 1
                line = json.dumps({**row, "verdict": each.verdict, "extracted": each.extracted})
                file.write(line.encode("ascii") + b"\n")
            file.flush()
            now = time.monotonic()
            if now - reported > 2 or counts.total() == total:
                rate = (counts.total() - earlier) / (now - start)
                print(f"{counts.total()}/{total} rows, {rate:.0f} a second", file=sys.stderr, flush=True)
                reported = now
    return counts


def read(path: Path, check: bool = False, complete: bool = False) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file; only "\\n" ends a line. Raises BadFile.

    check: also check that each row can be graded; complete: leave out a last line without its end
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if complete and not line.endswith(b"\n"):
                return
            where = f"{path}, line {number}"
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError as error:
                raise BadFile(f"{where}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise BadFile(f"{where}: a row is an object {{…}}, not {row!r:.80}")
            if check:
                if missing := {"gold", "response"} - set(row):
                    raise BadFile(f"{where}: no {' and no '.join(sorted(missing))}; there are {', '.join(row)}")
                if not isinstance(row["response"], str):
                    raise BadFile(f"{where}: a response is text, not {row['response']!r:.80}")
            yield row


def _done(source: Path, out: Path) -> Counter[str]:
    """Count the verdicts of an earlier run; changes nothing. Raises BadFile for a file that is not this script's."""
    counts: Counter[str] = Counter()
    if not out.exists():
        return counts
    originals = read(source)
    for number, row in enumerate(read(out, complete=True), 1):
        original = next(originals, None)
        if original is None:
            raise BadFile(f"{out}, line {number}: {source} has fewer rows; it belongs to another file")
        if _rest(row) != _rest(original) or row.get("verdict") is None:
            raise BadFile(f"{out}, line {number}: not the row of {source}, line {number}; remove it to begin again")
        counts[row["verdict"]] += 1
    if not counts and out.stat().st_size:
        raise BadFile(f"{out}: not one whole line of it is a graded row of {source}; remove it to begin again")
    return counts


def _keep(settings: dict[str, Any], kept: Path, out: Path, rows: int) -> None:
    """Write the settings beside the output. Raises BadFile if rows were graded with other settings."""
    old: dict[str, Any] = {}
    if kept.exists():
        old = next(read(kept), {})
        if set(old) != set(settings):
            raise BadFile(f"{kept}: not the settings of an earlier run; remove it to begin again")
    elif rows:
        raise BadFile(f"{kept} is missing: how the {rows} rows of {out} were graded is unknown; remove {out}")
    if rows and old != settings:
        other = [f"--{name} {old[name]} and not {new}" for name, new in settings.items() if old[name] != new]
        raise BadFile(f"{out}: graded so far with {', '.join(other)}; give the same, or another --out")
    if old != settings:
        from exgrpo_orlhf.files import write_json

        write_json(kept, settings, indent=None)


def _rest(row: dict[str, Any]) -> str:
    """The row without the added keys, as text: NaN is not equal to itself."""
    return json.dumps({key: value for key, value in row.items() if key not in ADDED}, sort_keys=True)


def _question(row: dict[str, Any]) -> Any:
    from exgrpo_orlhf.records import Question

    gold, prompt = row["gold"], row.get("prompt")
    if gold is None or isinstance(gold, list):
        gold = "" if gold is None else tuple(each for each in gold if each is not None)
    meta = {key: row[key] for key in ("options", "tests") if key in row}
    return Question("", prompt if isinstance(prompt, str) else "", gold, "", meta)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kind", default="math", help="math (default), choice, code, function, exact, modular_chain: as Verifier.kind"
    )
    parser.add_argument(
        "--in", dest="rows", type=Path, required=True, metavar="FILE", help="JSONL with gold and response"
    )
    parser.add_argument(
        "--out", type=terminal.output_file, required=True, metavar="FILE", help="JSONL to write, or to continue"
    )
    parser.add_argument("--function", help="with --kind function: file.py or file.py:name")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds for each answer (default 5)")
    parser.add_argument("--memory", type=int, default=1024, help="MiB for each answer (default 1024)")
    parser.add_argument("--workers", type=int, default=0, help="grading processes (default: one a core)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
