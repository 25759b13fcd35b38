"""The replay buffer on disk: two Parquet tables and a manifest with their checksums.

    manifest.json         format, version, counts, fingerprint, SHA-256 of each table; written last
    questions.parquet     one row a question: question_id, accuracy_numerator, accuracy_denominator, observed_step,
                          retired_step
    trajectories.parquet  one row a trajectory: question_id, token_ids, behaviour_logprobs, reward, step, finish, sound

pandas, DuckDB or Polars open the tables. A snapshot appears under its name only when complete and on the disk.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .buffer import QuestionRecord, ReplayBuffer
from .retirement import RetirementPolicy
from .trajectory import Trajectory

FORMAT = "exgrpo-replay-buffer"
VERSION = 1
_TABLES = ("questions.parquet", "trajectories.parquet")

_MANIFEST = {"format", "version", "fingerprint", "questions", "retired", "trajectories", "sha256"}

_QUESTIONS = pa.schema(
    [
        ("question_id", pa.string()),
        ("accuracy_numerator", pa.int32()),  # of the latest accuracy, in lowest terms; null for a retired question
        ("accuracy_denominator", pa.int32()),
        ("observed_step", pa.int64()),
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
    ]
)


class SnapshotError(ValueError):
    """A snapshot that is missing, torn, or not one of ours."""


def save(buffer: ReplayBuffer, folder: Path, fingerprint: str) -> None:
    """Write a snapshot to `folder`, which must not exist yet, atomically.

    fingerprint: what makes the token ids meaningful (tokenizer, template); `load` refuses another one
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        order = buffer.canonical_order()
        pq.write_table(_questions_table(buffer, order), partial / _TABLES[0], compression="zstd")
        pq.write_table(_trajectories_table(buffer, order), partial / _TABLES[1], compression="zstd")
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": fingerprint,
            "questions": len(order),
            "retired": len(buffer.retired),
            "trajectories": buffer.n_trajectories,
            "sha256": {name: _sha256(partial / name) for name in _TABLES},
        }
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        for path in (*partial.iterdir(), partial):
            _fsync(path)
        os.rename(partial, folder)
        _fsync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def load(folder: Path, retirement: RetirementPolicy, fingerprint: str) -> ReplayBuffer:
    """The buffer saved in `folder`. Raises SnapshotError if it is missing, torn, foreign or of another fingerprint."""
    manifest = _manifest(folder)
    if manifest["fingerprint"] != fingerprint:
        raise SnapshotError(
            f"{folder}: this replay buffer was made with another tokenizer or prompt template (its fingerprint is "
            f"{manifest['fingerprint']}, the run's is {fingerprint}); its token ids would mean something else"
        )
    for name in _TABLES:
        if not (folder / name).is_file():
            raise SnapshotError(f"{folder}: {name} is missing; the snapshot is incomplete")
        if _sha256(folder / name) != manifest["sha256"][name]:
            raise SnapshotError(f"{folder / name}: the checksum does not match its manifest; the file is damaged")
    questions = pq.read_table(folder / _TABLES[0])
    trajectories = pq.read_table(folder / _TABLES[1])
    for name, table, schema in ((_TABLES[0], questions, _QUESTIONS), (_TABLES[1], trajectories, _TRAJECTORIES)):
        if not table.schema.equals(schema):
            raise SnapshotError(f"{folder / name}: expected the columns {schema.names}, found {table.schema.names}")
    records: dict[str, QuestionRecord] = {}
    retired: dict[str, int] = {}
    for row in questions.to_pylist():
        if row["retired_step"] is not None:
            retired[row["question_id"]] = row["retired_step"]
        else:
            accuracy = Fraction(row["accuracy_numerator"], row["accuracy_denominator"])
            records[row["question_id"]] = QuestionRecord(accuracy, row["observed_step"])
    counts = {"questions": len(records), "retired": len(retired), "trajectories": len(trajectories)}
    if any(manifest[name] != count for name, count in counts.items()):
        raise SnapshotError(f"{folder / 'manifest.json'}: it counts other rows than the tables hold ({counts})")
    _attach(records, trajectories)
    buffer = ReplayBuffer(retirement)
    buffer.restore(records.items(), retired)
    return buffer


def _questions_table(buffer: ReplayBuffer, order: list[str]) -> pa.Table:
    records = [buffer.records[question_id] for question_id in order]
    retired = sorted(buffer.retired.items())
    none = [None] * len(retired)
    columns: list[list[Any]] = [
        order + [question_id for question_id, _ in retired],
        [record.accuracy.numerator for record in records] + none,
        [record.accuracy.denominator for record in records] + none,
        [record.observed_step for record in records] + none,
        [None] * len(records) + [step for _, step in retired],
    ]
    return pa.table([pa.array(c, t) for c, t in zip(columns, _QUESTIONS.types, strict=True)], schema=_QUESTIONS)


def _trajectories_table(buffer: ReplayBuffer, order: list[str]) -> pa.Table:
    rows = [(question_id, t) for question_id in order for t in buffer.records[question_id].trajectories.values()]
    offsets = np.concatenate([[0], np.cumsum([len(t) for _, t in rows], dtype=np.int64)]).astype(np.int64)

    def lists(arrays: list[Any], dtype: type) -> pa.Array:
        values = np.concatenate(arrays) if arrays else np.zeros(0, dtype)
        return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))

    columns = [
        pa.array([question_id for question_id, _ in rows], pa.string()),
        lists([t.token_ids for _, t in rows], np.int32),
        lists([t.behaviour_logprobs for _, t in rows], np.float32),
        pa.array([t.reward for _, t in rows], pa.float64()),
        pa.array([t.step for _, t in rows], pa.int64()),
        pa.array([t.finish for _, t in rows], pa.string()),
        pa.array([t.sound for _, t in rows], pa.bool_()),
    ]
    return pa.table(columns, schema=_TRAJECTORIES)


def _attach(records: dict[str, QuestionRecord], table: pa.Table) -> None:
    table = table.combine_chunks()
    ids = _flat(table, "token_ids")
    logprobs = _flat(table, "behaviour_logprobs")
    rest = zip(*(table[name].to_pylist() for name in ("question_id", "reward", "step", "finish", "sound")), strict=True)
    for token_ids, behaviour, (question_id, reward, step, finish, sound) in zip(ids, logprobs, rest, strict=True):
        trajectory = Trajectory(token_ids, behaviour, reward, step, finish, sound)
        records[question_id].trajectories[trajectory.key] = trajectory


def _flat(table: pa.Table, name: str) -> list[Any]:
    arrays = []
    for chunk in table[name].chunks:
        values, offsets = chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_numpy()
        arrays += [values[a:b] for a, b in itertools.pairwise(offsets)]
    return arrays


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
    if set(manifest) != _MANIFEST or set(manifest["sha256"]) != set(_TABLES):
        raise SnapshotError(f"{path}: other entries than {sorted(_MANIFEST)}; the manifest is damaged")
    return manifest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
