"""Writes public sets from the hub into one folder: in verl's parquet layout, with a manifest that describes each file.

A file is written whole or not at all, and its manifest entry after it, so an interrupted preparation is done again. A
set whose file matches its manifest entry is left as it is, without a request to the hub.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..io.files import replacing, sha256, write
from ..records import Question
from .catalogue import PublicSet
from .conversions import own_system, verl_messages
from .hub import commit, load_table
from .question_files import QuestionFile
from .reading import fingerprint

MANIFEST = "manifest.json"
LAYOUT = 1  # raise it when the same rows would be written differently
WITH_SYSTEM = 2  # of rows that have a system message of their own, which is kept
_DROPPED_AT_MOST = 0.01  # of the rows; if more must be dropped, a column is probably wrong
_CATALOGUE = "exgrpo_orlhf/questions/catalogue.py"


def prepare(
    public: PublicSet, out: Path, copies: Path | None = None, any_rows: bool = False, drop_system: bool = False
) -> tuple[str, bool]:
    """Make <out>/<name>.parquet, unless it is there and matches the manifest.

    copies: a folder that holds the sets as <owner>/<name>, in place of the hub
    any_rows: accept a number of rows other than the catalogue's
    drop_system: leave out the system messages of the set's own rows
    Returns a line for the user, and whether the file was made. Raises ValueError that says why, and the fix.
    """
    previous = read_manifest(out).get(public.name)
    path = out / f"{public.name}.parquet"
    layout = WITH_SYSTEM if public.convert is verl_messages and not drop_system else LAYOUT
    if previous and _is_current(previous, path, public, layout):
        return f"{previous['rows']:,} rows, as in {MANIFEST}: nothing to do", False

    where, revision = _place(public, copies, public.revision or (previous or {}).get("revision"))
    table = _checked_table(public, where, revision, any_rows)
    rows, dropped = convert(public, table.select_columns(list(public.convert.columns)), drop_system)
    questions = _written(public, rows, path)
    entry = {
        "file": path.name,
        "role": public.role,
        "source": public.id,
        "subset": public.subset,
        "split": public.split,
        "revision": revision,
        "copied_from": where if copies else None,
        "rows": len(table),
        "dropped": dict(dropped),
        "distinct_questions": len(questions),
        "licence": public.licence,
        "layout": layout,
        "sha256": sha256(path),
        "fingerprint": fingerprint(questions),
    }
    manifest = {**read_manifest(out), public.name: entry}
    write(out / MANIFEST, json.dumps(dict(sorted(manifest.items())), indent=2, ensure_ascii=False) + "\n")
    lost = "".join(f", {count} {why}" for why, count in dropped.items())
    return f"{len(table):,} rows, {len(questions):,} distinct questions{lost} → {path} ({public.licence})", True


def _place(public: PublicSet, copies: Path | None, bound_revision: str | None) -> tuple[str, str | None]:
    """The folder of the set's copy without a revision, or its name on the hub and the commit."""
    if copies:
        folder = copies / public.id
        if not folder.is_dir():
            raise ValueError(
                f"{folder}: no such folder; copy the set there: hf download --repo-type dataset {public.id} "
                f"--local-dir {folder}" + (f" --revision {bound_revision}" if bound_revision else "")
            )
        return str(folder), None
    return public.id, commit(public.id, bound_revision, _CATALOGUE)


def _checked_table(public: PublicSet, where: str, revision: str | None, any_rows: bool) -> Any:
    """The set's table, with the columns and the number of rows that its entry in the catalogue expects."""
    table = load_table(where, public.subset, public.split, revision, _CATALOGUE)
    names = table.column_names
    if missing := [column for column in public.convert.columns if column not in names]:
        raise ValueError(
            f"{public.id} has no column {' and no '.join(map(repr, missing))}, there are {', '.join(names)}: it has "
            f"changed since its entry {public.name!r} in {_CATALOGUE} was written; fix the entry, or pin an earlier "
            "revision there"
        )
    low, high = public.rows
    if not low <= len(table) <= high and not any_rows:
        raise ValueError(
            f"{public.id}, split {public.split!r}, has {len(table):,} rows, and {public.rows_text} are expected: the "
            f"set has changed, or the copy is incomplete; look at it, then accept it with --any-rows"
        )
    return table


def _written(public: PublicSet, rows: Sequence[Mapping[str, Any]], path: Path) -> list[Question]:
    """The questions of the file of these rows, which is written only if it is a question set."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with replacing(path) as partial:
        pq.write_table(pa.Table.from_pylist(rows), partial)
        try:
            return QuestionFile(str(partial)).load()
        except ValueError as error:
            raise ValueError(f"{public.id}, by the entry {public.name!r} in {_CATALOGUE}: {error}") from error


def convert(
    public: PublicSet, table: Iterable[Mapping[str, Any]], drop_system: bool = False
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Rows in verl's layout, and how many rows were left out by reason: no answer, or contradicting another row.

    Raises ValueError if a row does not have the form that the conversion expects, or if too many are left out.
    """
    pairs: list[tuple[int, str, str, list[Any]]] = []
    answers: dict[str, set[str]] = defaultdict(set)
    dropped: Counter[str] = Counter()
    for index, row in enumerate(table):
        try:
            question, answer = public.convert(row)
            system = [] if drop_system else own_system(row)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise ValueError(
                f"{public.id}, row {index}: not of the form expected of {', '.join(public.convert.columns)} "
                f"({type(error).__name__}: {error}): {str(dict(row))[:200]}"
            ) from error
        if question.strip() and answer.strip():
            pairs.append((index, question, answer, system))
            answers[question].add(answer)
        else:
            dropped["without question or answer"] += 1
    consistent = [pair for pair in pairs if len(answers[pair[1]]) == 1]
    dropped += Counter({"contradicting each other": len(pairs) - len(consistent)})  # 0 adds no key
    n_dropped = dropped.total()
    if n_dropped > max(_DROPPED_AT_MOST * (len(consistent) + n_dropped), 1) or not consistent:
        left_out = ", ".join(f"{n} {why}" for why, n in dropped.items())
        raise ValueError(
            f"{public.id}: of {len(consistent) + n_dropped:,} rows {left_out or 'none is there'}; do "
            f"{', '.join(public.convert.columns)} still hold what they did? See {_CATALOGUE}"
        )
    rows = [
        {
            "data_source": public.name,
            "prompt": [*system, {"role": "user", "content": question}],
            "ability": public.ability,
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": index, "split": public.split},
        }
        for index, question, answer, system in consistent
    ]
    return rows, dropped


def read_manifest(out: Path) -> dict[str, dict[str, Any]]:
    """The manifest's entry for each set, by name; {} without a manifest. Raises ValueError if it is not JSON."""
    path = out / MANIFEST
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); remove it, and the sets are prepared again") from error


def _is_current(entry: Mapping[str, Any], path: Path, public: PublicSet, layout: int) -> bool:
    expected = {"source": public.id, "subset": public.subset, "split": public.split, "layout": layout}
    same_revision = public.revision is None or entry["revision"] in (None, public.revision)
    same = same_revision and all(entry[name] == value for name, value in expected.items())
    return same and path.is_file() and sha256(path) == entry["sha256"]
