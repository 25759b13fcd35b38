#!/usr/bin/env python
"""Prepare public question sets, check training questions against test sets, and leave out what teaches nothing.

    python scripts/prepare_data.py --list
    python scripts/prepare_data.py --only openr1 math500 aime24
    python scripts/prepare_data.py                                  # all of them
    python scripts/prepare_data.py --check-overlap openr1 math500 aime24 my_test.jsonl:question \\
        --json overlap.json --write-clean datasets/openr1_clean.parquet
    python scripts/prepare_data.py --measure MODEL --questions mine.jsonl:question:answer --keep 0.1:0.9 \\
        --write-kept datasets/mine_kept.jsonl -- --max-tokens 2048

Sets come from the Hugging Face hub into datasets/ (one parquet file each, all in one layout, and manifest.json). A
second run prepares only the sets that are missing, damaged or changed.

--measure samples responses of a model to every question (evals/run_bench.py, which gets what stands behind --, prompts
too) and writes the rows whose share of right ones lies in --keep, with that share in the column `pass_rate`. After a
stop the same command goes on.

A set for --check-overlap is the name of a prepared one, or a file (.parquet, .jsonl, .csv), with :FIELD if its
questions are not in the field "prompt".
Exit status: 0; 1 if a set could not be prepared or checked; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from exgrpo_orlhf.io import terminal
from exgrpo_orlhf.io.files import locked, sha256, write, write_json
from exgrpo_orlhf.io.paths import PROJECT, WORKPLACE
from exgrpo_orlhf.questions.catalogue import PUBLIC_SETS
from exgrpo_orlhf.questions.overlap import PromptColumn, check_written, compare, write_rows
from exgrpo_orlhf.questions.prepare import prepare, read_manifest
from exgrpo_orlhf.questions.question_files import RATE, column_names


def main() -> int:
    parser = _parser()
    words = sys.argv[1:]
    own = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:own])
    arguments.bench = words[own + 1 :]
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    if arguments.check_overlap is None and (arguments.json or arguments.write_clean):
        parser.error("--json and --write-clean belong to --check-overlap")
    if arguments.check_overlap is not None and len(arguments.check_overlap) < 2:
        parser.error("--check-overlap takes a training set and at least one test set")
    measured = (arguments.measure, arguments.questions, arguments.keep, arguments.write_kept)
    if any(measured) and not all(measured):
        parser.error("--measure, --questions, --keep and --write-kept belong together")
    if arguments.bench and not arguments.measure:
        parser.error("what stands behind -- is for --measure")
    if arguments.measure and (arguments.list or arguments.only or arguments.check_overlap):
        parser.error("--measure goes without --list, --only and --check-overlap")
    ours = {"--out", "--model", "--definitions", "--benchmarks", "--suite", "--data", "--limit", "--samples"}
    if taken := ours & {word.partition("=")[0] for word in arguments.bench}:
        parser.error(f"{', '.join(sorted(taken))} behind --: --measure sets that, and measures every question")
    action = _list if arguments.list else _prepare if arguments.check_overlap is None else _check_overlap
    action = _measure if arguments.measure else action
    try:
        return action(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _list(arguments: argparse.Namespace) -> int:
    manifest = read_manifest(arguments.out)
    print(f"{'name':12} {'use':5} {'rows':>16} {'':8} {'hub':58} licence")
    for public in PUBLIC_SETS.values():
        here = "prepared" if public.name in manifest else ""
        where = " ".join(filter(None, (public.id, public.subset, public.split)))
        print(f"{public.name:12} {public.role:5} {public.rows_text:>16} {here:8} {where:58} {public.licence}")
    return 0


def _prepare(arguments: argparse.Namespace) -> int:
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        with locked(arguments.out / ".lock", wait=False):  # the sets share a manifest
            return _prepare_each(arguments)
    except BlockingIOError:
        raise ValueError(f"another process prepares sets in {arguments.out}: wait for it") from None


def _prepare_each(arguments: argparse.Namespace) -> int:
    failed = []
    for name in arguments.only or PUBLIC_SETS:
        print(f"{name}: ", end="", flush=True)
        try:
            line, _ = prepare(
                PUBLIC_SETS[name], arguments.out, arguments.copies, arguments.any_rows, arguments.drop_system
            )
        except (ValueError, OSError) as error:
            failed.append(name)
            line = f"error: {error}"
        print(line, flush=True)
    if failed:
        print(f"{len(failed)} not prepared: {' '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _check_overlap(arguments: argparse.Namespace) -> int:
    train, *tests = (_column(text, arguments.out) for text in arguments.check_overlap)
    check_written(train.path, [test.path for test in tests], arguments.write_clean, arguments.json)
    report = compare(train, tests)
    print(report.table())
    if arguments.json:
        write_json(arguments.json, report.as_json())
    if arguments.write_clean and len(report.train_rows) == report.rows:
        raise ValueError(f"every row of {train.path} overlaps: {arguments.write_clean} would be empty, and is not made")
    if arguments.write_clean:
        clean = [row for row in range(report.rows) if row not in report.train_rows]
        write_rows(train.path, clean, arguments.write_clean)
        print(f"{len(clean):,} rows written to {arguments.write_clean}")
    return 0


def _measure(arguments: argparse.Namespace) -> int:
    path, *fields = [arguments.questions] if Path(arguments.questions).exists() else arguments.questions.split(":")
    file = (arguments.out / f"{path}.parquet" if path in PUBLIC_SETS else Path(path)).absolute()
    check_written(file, [], arguments.write_kept, None)
    present = column_names(file)
    convert = {"convert": "verl"} if not fields and "reward_model" in present else {"convert": "columns"}
    if convert["convert"] == "columns":
        names = fields or ["question", "answer"]
        if len(names) != 2 or not {*names} <= {*present}:
            raise ValueError(
                f"{file} has the columns {', '.join(present)}: --questions {path}:QUESTION:ANSWER names two"
            )
        convert |= dict(zip(("question", "answer"), names, strict=True))
    model = "-".join(Path(arguments.measure).parts[-2:])  # of checkpoints the run's name too
    whole = Path(arguments.measure).absolute() if Path(arguments.measure).exists() else arguments.measure
    digest = hashlib.blake2b(f"{whole} {convert}".encode(), digest_size=4).hexdigest()
    results = WORKPLACE / "results" / f"{RATE}-{file.stem}-{sha256(file)[:8]}-{arguments.kind}-{model}-{digest}"
    block = {"title": RATE, "verifier": arguments.kind, "ask": "", "samples": arguments.samples, "temperature": 1.0}
    lines = [f"{name} = {json.dumps(value)}" for name, value in block.items()]
    one = ", ".join(f"{name} = {json.dumps(value)}" for name, value in {"name": file.name, **convert}.items())
    results.mkdir(parents=True, exist_ok=True)
    write(results / f"{RATE}.toml", "\n".join([f"[{RATE}]", *lines, f"files = [{{ {one} }}]", ""]))
    command = [sys.executable, PROJECT / "evals" / "run_bench.py", "--model", arguments.measure, "--no-mlflow"]
    command += ["--definitions", results / f"{RATE}.toml", "--benchmarks", RATE, "--data", file.parent]
    if status := subprocess.run([*map(str, command), "--out", str(results), *arguments.bench]).returncode:
        return status
    right = defaultdict(list)
    with (results / RATE / "samples.jsonl").open(encoding="utf-8") as samples:
        for sample in map(json.loads, samples):
            right[sample["row"]].append(sample["verdict"] == "correct")
    rates = {row: sum(each) / len(each) for row, each in right.items()}
    low, high = arguments.keep
    kept = {row: rate for row, rate in rates.items() if low <= rate <= high}
    never, always = (sum(rate == end for rate in rates.values()) for end in (0, 1))
    print(
        f"{len(rates):,} rows measured: {never:,} never solved, {always:,} always; {len(kept):,} in {low:g} to {high:g}"
    )
    if not kept:
        raise ValueError(f"no row of {file} is in {low:g} to {high:g}: {arguments.write_kept} is not made")
    rows = sorted(kept)
    write_rows(file, rows, arguments.write_kept, RATE, [kept[row] for row in rows])
    print(f"{len(kept):,} rows written to {arguments.write_kept}, each with its {RATE}")
    return 0


def _range(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    if not 0 <= float(low) <= float(high) <= 1:
        raise ValueError(text)
    return float(low), float(high)


_range.__name__ = "LOW:HIGH"  # as argparse names it


def _column(text: str, out: Path) -> PromptColumn:
    """A prepared set by its name, a file, or a file with its field."""
    if text in PUBLIC_SETS:
        path = out / f"{text}.parquet"
        if not path.exists():
            raise ValueError(f"{path}: not prepared yet; run scripts/prepare_data.py --only {text}")
        return PromptColumn(path, "prompt")
    file, colon, field = text.rpartition(":")
    return PromptColumn(Path(file), field) if colon and not Path(text).exists() else PromptColumn(Path(text), "prompt")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the sets, and which are prepared")
    parser.add_argument("--only", nargs="+", choices=PUBLIC_SETS, metavar="NAME", help="these sets (default: all)")
    parser.add_argument("--out", type=Path, default=WORKPLACE / "datasets", help="folder to write (default: datasets/)")
    parser.add_argument(
        "--from",
        dest="copies",
        type=Path,
        metavar="FOLDER",
        help="read copies of the hub's sets, FOLDER/<owner>/<name>, on a machine without a network",
    )
    parser.add_argument("--any-rows", action="store_true", help="accept another number of rows than expected")
    parser.add_argument(
        "--drop-system", action="store_true", help="leave out the system messages that rows of a set bring along"
    )
    parser.add_argument("--check-overlap", nargs="+", metavar="SET", help="TRAIN TEST…: find shared questions")
    parser.add_argument("--json", type=terminal.output_file, metavar="FILE", help="write the overlap with every hit")
    parser.add_argument(
        "--write-clean", type=terminal.output_file, metavar="FILE", help="write TRAIN without overlapping rows"
    )
    measured = parser.add_argument_group("measured on a model")
    measured.add_argument("--measure", metavar="MODEL", help="as evals/run_bench.py --model")
    measured.add_argument("--questions", metavar="FILE[:PROMPT:ANSWER]", help="a file, or a prepared set by its name")
    measured.add_argument("--keep", type=_range, metavar="LOW:HIGH", help="shares of right responses, 0.1:0.9")
    measured.add_argument(
        "--write-kept", type=terminal.output_file, metavar="FILE", help="of the format of --questions"
    )
    measured.add_argument("--samples", type=terminal.positive, default=8, help="responses to each question (default 8)")
    measured.add_argument("--kind", default="math", help="as Verifier.kind (default math)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
