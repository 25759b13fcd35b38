"""The replay buffer on disk: two Parquet tables and a manifest with their checksums.

    manifest.json         format, version, counts, fingerprint, SHA-256 of each table
    questions.parquet     one row a question: question_id, accuracy_numerator, accuracy_denominator, spread_numerator,
                          spread_denominator, observed_step, streak, retired_step
    trajectories.parquet  one row a trajectory: question_id, token_ids, behaviour_logprobs, reward, step, finish, sound,
                          actions, seed, sequence; with several rewards (Verifier.rewards) also parts, JSON; where there
                          are failures also correct; where advantages are kept also advantage
    failed/               of failures, where they are kept: another snapshot

pandas, DuckDB or Polars open the tables. The manifest is written last: what a save that was cut short leaves behind has
none and is refused. In a checkpoint, the checkpoint's own manifest seals the snapshot (checkpoints/folder.py).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..io.files import Files, checksum, record, sha256, write
from ..records import Trajectory
from .buffer import TRAJECTORY_BYTES, ReplayBuffer
from .difficulty import RetirementPolicy
from .stored import BufferEntry, QuestionRecord

FORMAT = "exgrpo-replay-buffer"
VERSION = 5
FAILED = "failed"
_TABLES = ("questions.parquet", "trajectories.parquet")

_QUESTIONS = pa.schema(
    [
        ("question_id", pa.string()),
        ("accuracy_numerator", pa.int32()),  # of the latest accuracy, in lowest terms; null for a retired question
        ("accuracy_denominator", pa.int32()),
        ("spread_numerator", pa.int32()),  # of the level of spread (difficulty.py); null where there is none
        ("spread_denominator", pa.int32()),
        ("observed_step", pa.int64()),
        ("streak", pa.int32()),  # observations in a row that counted towards retirement
        ("retired_step", pa.int64()),  # null unless retired
    ]
)
_TRAJECTORIES = pa.schema(
    [
        ("question_id", pa.string()),
        ("token_ids", pa.large_list(pa.int32())),
        ("behaviour_logprobs", pa.large_list(pa.float32())),
        ("reward", pa.float64()),
        ("step", pa.int64()),
        ("finish", pa.string()),
        ("sound", pa.bool_()),  # null where nothing checks the reasoning
        ("actions", pa.large_list(pa.bool_())),  # null unless it is an episode
        ("seed", pa.uint64()),  # likewise
    ]
)
_FIELDS = _TRAJECTORIES.names[1:]  # of a Trajectory
_SEQUENCE = pa.field("sequence", pa.int64())  # place in the order of storing
_PARTS = pa.field("parts", pa.string())
_CORRECT = pa.field("correct", pa.bool_())
_ADVANTAGE = pa.field("advantage", pa.float64())
_OPTIONAL = _PARTS, _CORRECT, _ADVANTAGE  # columns, where they are needed
_MORE = [columns for n in range(4) for columns in itertools.combinations(_OPTIONAL, n)]


_BYTES = {"token_ids": 4, "behaviour_logprobs": 4, "actions": 1}  # of a value, in memory


class SnapshotError(ValueError):
    """A snapshot that is missing, torn, or not one of ours."""


def save(buffer: ReplayBuffer, folder: Path, fingerprint: str) -> Files:
    """Write a snapshot to `folder`, which must not exist yet. Returns size and hash of each table.

    fingerprint: what makes the token ids meaningful (tokenizer, template); `load` refuses another one
    """
    folder.mkdir(parents=True)
    order = buffer.canonical_order()
    stored = [(id_, entry) for id_ in order for entry in buffer.records[id_].stored]
    schema = trajectory_schema(entry.trajectory for _, entry in stored)
    rows = ({**row_of(id_, entry.trajectory), "sequence": entry.sequence} for id_, entry in stored)
    tables = (_question_rows(buffer, order), _QUESTIONS), (rows, pa.schema([*schema, _SEQUENCE]))
    for name, table in zip(_TABLES, tables, strict=True):
        write_table(*table, folder / name)
    entries = record(folder, (folder / name for name in _TABLES))
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": fingerprint,
        "questions": len(order),
        "retired": len(buffer.retired),
        "trajectories": buffer.n_trajectories,
        "next_sequence": buffer.next_sequence,
        "sha256": {name: entry.sha256 for name, entry in entries.items()},
    }
    manifest["checksum"] = checksum(manifest)
    write(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    of_failed = save(buffer.failed, folder / FAILED, fingerprint) if buffer.failed is not None else {}
    return {**entries, **{f"{FAILED}/{name}": entry for name, entry in of_failed.items()}}


def n_bytes(folder: Path) -> int:
    """`ReplayBuffer.n_bytes` of a snapshot that is loaded whole, its failures included, by the tables' metadata alone.
    Raises OSError, ValueError for a table that cannot be read."""
    tables = pq.read_metadata(folder / _TABLES[1])
    total: int = tables.num_rows * TRAJECTORY_BYTES
    for row_group, column in itertools.product(range(tables.num_row_groups), range(tables.num_columns)):
        values = tables.row_group(row_group).column(column)
        size = _BYTES.get(values.path_in_schema.partition(".")[0], 0)
        total += size * (values.num_values - (values.statistics.null_count if values.statistics else 0))
    return total + (n_bytes(folder / FAILED) if (folder / FAILED).is_dir() else 0)


def load(folder: Path, buffer: ReplayBuffer, fingerprint: str) -> ReplayBuffer:
    """Fill an empty buffer with what was saved in `folder`.

    Raises SnapshotError if the snapshot is missing, torn, foreign or of another fingerprint.
    """
    manifest = _manifest(folder)
    if manifest["fingerprint"] != fingerprint:
        raise SnapshotError(
            f"{folder}: this replay buffer was made with another tokenizer or prompt template, or another day's date "
            f"in it (fingerprint {manifest['fingerprint']}, not {fingerprint}); its token ids would mean something else"
        )
    for name in _TABLES:
        if not (folder / name).is_file():
            raise SnapshotError(f"{folder}: {name} is missing; the snapshot is incomplete")
        if sha256(folder / name) != manifest["sha256"][name]:
            raise SnapshotError(f"{folder / name}: the checksum does not match its manifest; the file is damaged")
    questions = pq.read_table(folder / _TABLES[0])
    trajectories = pq.read_table(folder / _TABLES[1])
    of_trajectories = [pa.schema([*_TRAJECTORIES, *more, _SEQUENCE]) for more in _MORE]
    for name, table, schemas in ((_TABLES[0], questions, [_QUESTIONS]), (_TABLES[1], trajectories, of_trajectories)):
        if not any(map(table.schema.equals, schemas)):
            raise SnapshotError(f"{folder / name}: expected the columns {schemas[0].names}, found {table.schema.names}")
    records: dict[str, QuestionRecord] = {}
    retired: dict[str, int] = {}
    for row in read_rows(questions):
        if row["retired_step"] is not None:
            retired[row["question_id"]] = row["retired_step"]
        else:
            accuracy = Fraction(row["accuracy_numerator"], row["accuracy_denominator"])
            level = row["spread_numerator"], row["spread_denominator"]
            spread = None if None in level else Fraction(*level)
            records[row["question_id"]] = QuestionRecord(accuracy, row["observed_step"], row["streak"], spread)
    stored = []
    for row in read_rows(trajectories):
        trajectory = trajectory_of(row)
        stored.append((row["question_id"], BufferEntry(trajectory, trajectory.key, row["sequence"])))
    buffer.restore(records.items(), stored, retired, manifest["next_sequence"])
    if buffer.failed is not None:
        load(folder / FAILED, buffer.failed, fingerprint)
    return buffer


def fingerprint(folder: Path) -> str:
    """The fingerprint that a snapshot was saved with. Raises SnapshotError as `load` does."""
    return str(_manifest(folder)["fingerprint"])


def read(folder: Path) -> ReplayBuffer:
    """What a checkpoint has stored, whatever prompts it was made for. Raises SnapshotError for a damaged one."""
    return load(folder, ReplayBuffer(RetirementPolicy()), fingerprint(folder))


def load_for_new_run(folder: Path, buffer: ReplayBuffer, fingerprint: str, questions: Collection[str]) -> ReplayBuffer:
    """Fill an empty buffer, with which a new run starts, with accuracies and trajectories of another run's snapshot.

    questions: the ids of the new run's questions
    Its steps are counted back from the run's newest one, which becomes 0, so that ages go on. What the other run had
    retired is not taken: it has no trajectories.
    Raises SnapshotError as `load` does, and for experience of questions that the new run does not have: an id is made
    of prompt and answer, so those were asked or answered in another way.
    """
    source = load(folder, ReplayBuffer(RetirementPolicy()), fingerprint)
    strange = [question_id for question_id in source.records if question_id not in questions]
    if strange:
        raise SnapshotError(
            f"{folder}: {len(strange)} of its {len(source.records)} questions (such as {strange[0]}) are not among the "
            "run's training questions; they have another prompt, answer or source, belong to another set, or are held "
            "out for validation here"
        )
    records = [(question_id, source.records[question_id]) for question_id in source.canonical_order()]
    rows = [(question_id, stored) for question_id, record in records for stored in record.stored]
    steps = [stored.trajectory.step for _, stored in rows]
    newest = max([*steps, *(record.observed_step for _, record in records)], default=0)
    aged = [
        (question_id, entry._replace(trajectory=replace(entry.trajectory, step=entry.trajectory.step - newest)))
        for question_id, entry in rows
    ]
    measured = []
    for id_, old in records:
        # Of a run whose difficulty was the accuracy: not measured yet. With some right and some wrong there was one.
        unknown = Fraction(1, 2) if buffer.by_spread and 0 < old.accuracy < 1 else None
        spread = unknown if old.spread is None else old.spread
        measured.append((id_, QuestionRecord(old.accuracy, old.observed_step - newest, spread=spread)))
    buffer.restore(measured, aged, {}, source.next_sequence)
    if buffer.failed is not None and (folder / FAILED).is_dir():
        load_for_new_run(folder / FAILED, buffer.failed, fingerprint, questions)
    return buffer


def _question_rows(buffer: ReplayBuffer, order: list[str]) -> Iterator[dict[str, Any]]:
    for question_id in order:
        record = buffer.records[question_id]
        yield {
            "question_id": question_id,
            "accuracy_numerator": record.accuracy.numerator,
            "accuracy_denominator": record.accuracy.denominator,
            "spread_numerator": None if record.spread is None else record.spread.numerator,
            "spread_denominator": None if record.spread is None else record.spread.denominator,
            "observed_step": record.observed_step,
            "streak": record.streak,
            "retired_step": None,
        }
    for question_id, step in buffer.retired.items():
        yield {**dict.fromkeys(_QUESTIONS.names), "question_id": question_id, "retired_step": step}


def trajectory_schema(trajectories: Iterable[Trajectory]) -> pa.Schema:
    """Of a table of trajectories with their questions' ids."""
    several = [(bool(one.parts), not one.correct, one.advantage is not None) for one in trajectories]
    needed = [any(has) for has in zip(*several, strict=True)]
    return pa.schema([*_TRAJECTORIES, *itertools.compress(_OPTIONAL, needed)])


def row_of(question_id: str, one: Trajectory) -> dict[str, Any]:
    """Of a table whose columns are `trajectory_schema`."""
    return {
        "question_id": question_id,
        **{name: getattr(one, name) for name in _FIELDS},
        "parts": json.dumps(one.parts),
        "correct": one.correct,
        "advantage": one.advantage,
    }


def trajectory_of(row: Mapping[str, Any]) -> Trajectory:
    """What `row_of` was made of."""
    parts = tuple((name, value) for name, value in json.loads(row.get("parts", "[]")))
    more = {"correct": row.get("correct", True), "advantage": row.get("advantage")}
    return Trajectory(**{name: row[name] for name in _FIELDS}, parts=parts, **more)


def write_table(rows: Iterable[Mapping[str, Any]], schema: pa.Schema, path: Path) -> None:
    """Write rows as Parquet, of each what the schema names. Raises KeyError for a row that lacks something of it."""
    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    for row in rows:
        for name, values in columns.items():
            values.append(row[name])
    arrays = [pa.array(columns[field.name], field.type) for field in schema]
    pq.write_table(pa.table(arrays, schema=schema), path, compression="zstd")


def read_rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """The rows of a table. Lists of tokens become arrays of their own: a view would keep all of them alive."""
    columns = [
        [None if array is None else array.copy() for array in column.to_numpy()]
        if pa.types.is_large_list(column.type)
        else column.to_pylist()
        for column in table.columns
    ]
    return (dict(zip(table.column_names, values, strict=True)) for values in zip(*columns, strict=True))


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise SnapshotError(f"{folder}: no manifest.json; this is not a complete replay buffer snapshot") from None
    except ValueError as error:
        raise SnapshotError(f"{path}: not readable as JSON ({error}); the snapshot is damaged") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise SnapshotError(f"{path}: this is not an ExGRPO replay buffer (no format {FORMAT!r})")
    if manifest.get("version") != VERSION:
        raise SnapshotError(f"{path}: version {manifest.get('version')!r} cannot be read here, only {VERSION}")
    if manifest.get("checksum") != checksum({name: value for name, value in manifest.items() if name != "checksum"}):
        raise SnapshotError(f"{path}: its checksum does not match its entries; the manifest is damaged")
    return manifest
