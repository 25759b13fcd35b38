#!/usr/bin/env python
"""Prepare public question sets, and check training questions against test sets.

    python scripts/prepare_data.py --list
    python scripts/prepare_data.py --only openr1 math500 aime24
    python scripts/prepare_data.py                                  # all of them
    python scripts/prepare_data.py --check-overlap openr1 math500 aime24 my_test.jsonl:question \\
        --json overlap.json --write-clean datasets/openr1_clean.parquet

Sets come from the Hugging Face hub into datasets/ (one parquet file each, all in one layout, and manifest.json). A
second run prepares only the sets that are missing, damaged or changed.

A set for --check-overlap is the name of a prepared one, or a file (.parquet, .jsonl, .csv), with :FIELD if its
questions are not in the field "prompt".
Exit status: 0; 1 if a set could not be prepared or checked; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from exgrpo_orlhf import terminal
from exgrpo_orlhf.files import write_json
from exgrpo_orlhf.paths import WORKPLACE
from exgrpo_orlhf.questions.catalogue import PUBLIC_SETS
from exgrpo_orlhf.questions.overlap import PromptColumn, check_written, compare, write_without
from exgrpo_orlhf.questions.prepare import prepare, read_manifest


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    if arguments.check_overlap is None and (arguments.json or arguments.write_clean):
        parser.error("--json and --write-clean belong to --check-overlap")
    if arguments.check_overlap is not None and len(arguments.check_overlap) < 2:
        parser.error("--check-overlap takes a training set and at least one test set")
    action = _list if arguments.list else _prepare if arguments.check_overlap is None else _check_overlap
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
        if arguments.json.exists() and not arguments.json.is_file():  # /dev/stdout, a pipe
            arguments.json.write_text(json.dumps(report.as_json(), indent=1) + "\n", "ascii")
        else:
            write_json(arguments.json.resolve(), report.as_json())
    if arguments.write_clean and len(report.train_rows) == report.rows:
        raise ValueError(f"every row of {train.path} overlaps: {arguments.write_clean} would be empty, and is not made")
    if arguments.write_clean:
        write_without(train.path, report.train_rows, arguments.write_clean)
        print(f"{report.rows - len(report.train_rows):,} rows written to {arguments.write_clean}")
    return 0


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
    return parser


if __name__ == "__main__":
    sys.exit(main())
