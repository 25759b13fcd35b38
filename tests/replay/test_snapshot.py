"""The buffer on disk: exact, readable by others, and refused when anything is wrong with it."""

import hashlib
import json
import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import replay_builders
from full_disk import full_disk
from replay_builders import group, view

from exgrpo_orlhf.records import Trajectory
from exgrpo_orlhf.replay import ReplayBuffer, RetirementPolicy
from exgrpo_orlhf.replay.snapshot import SnapshotError, load, load_for_new_run, n_bytes, save

FILES = ("manifest.json", "questions.parquet", "trajectories.parquet")
ACCURACY_COLUMNS = ["accuracy_numerator", "accuracy_denominator"]
SPREAD_COLUMNS = ["spread_numerator", "spread_denominator"]
QUESTION_COLUMNS = ["question_id", *ACCURACY_COLUMNS, *SPREAD_COLUMNS, "observed_step", "streak", "retired_step"]
TRAJECTORY_COLUMNS = [
    "question_id",
    "token_ids",
    "behaviour_logprobs",
    "reward",
    "step",
    "finish",
    "sound",
    "actions",
    "seed",
    "sequence",
]


def trajectory(draw: random.Random, step: int) -> Trajectory:
    ids = np.array(draw.choices(range(152_000), k=draw.randrange(1, 9)), np.int32)
    logprobs = np.array([-draw.expovariate(1) for _ in ids], np.float32)
    logprobs[0] = draw.choice([np.float32(-0.0), np.float32(-1e-42), np.float32(-88.25), logprobs[0]])
    return Trajectory(ids, logprobs, draw.choice([1.0, 0.1]), step, "stop", draw.choice([None, True, False]))


def varied(seed=0, questions=30, **limits) -> ReplayBuffer:
    """Candidates in several buckets, whose order is not that of insertion; unsolved, never stored, and retired."""
    draw, buffer = random.Random(seed), ReplayBuffer(RetirementPolicy(), **limits)
    ids = [f"{draw.randrange(16**8):08x}" for _ in range(questions)]
    for step in range(6 * questions):
        question_id = draw.choice(ids)
        if question_id in buffer.retired:
            continue
        buffer.record(question_id, Fraction(draw.choice([0, 1, 2, 3, 4, 5]), draw.choice([7, 8])), step)
        if draw.random() < 0.6:
            buffer.store([(question_id, trajectory(draw, step)) for _ in range(draw.randrange(1, 3))])
        if draw.random() < 0.05:
            buffer.retire(question_id, step)
    for i in range(3):
        buffer.record(f"{2 - i} never stored", Fraction(i, 8), 0)
    return buffer


@pytest.fixture
def saved(tmp_path) -> Path:
    save(varied(), tmp_path / "replay", "tokenizer-1")
    return tmp_path / "replay"


def opened(folder: Path, fingerprint="tokenizer-1") -> ReplayBuffer:
    return load(folder, ReplayBuffer(RetirementPolicy()), fingerprint)


# -- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replays_unsolved", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_buffer_comes_back_bit_identical(seed, replays_unsolved, tmp_path):
    """With the order in each bucket, which decides what the sampler draws."""
    buffer = varied(seed, replays_unsolved=replays_unsolved)
    assert 0 < buffer.n_candidates <= buffer.n_with_trajectories < len(buffer.records)
    assert (buffer.n_candidates == buffer.n_with_trajectories) == replays_unsolved
    assert (len(buffer.candidates.get(Fraction(0), ())) > 1) == replays_unsolved
    assert buffer.retired
    save(buffer, tmp_path / "replay", "f")
    loaded = load(tmp_path / "replay", ReplayBuffer(RetirementPolicy(), replays_unsolved=replays_unsolved), "f")
    assert view(loaded) == view(buffer)
    assert Fraction(0) not in opened(tmp_path / "replay", "f").candidates, "where they are not asked for"


@pytest.mark.parametrize("failures", [False, True])
def test_the_bytes_of_a_snapshot_are_those_of_its_buffer_before_it_is_loaded(failures, tmp_path):
    buffer = varied()
    actions = np.arange(8) % 3 == 2  # of an episode, 6 of whose tokens are its environment's
    episode = Trajectory(np.arange(8, dtype=np.int32), np.zeros(2, np.float32), 1.0, 0, actions=actions)
    buffer.record("episode", Fraction(1, 2), 0)
    buffer.store([("episode", episode)])
    held = buffer.n_bytes
    if failures:
        buffer.keep_failures(4)
        buffer.failed.record("episode", Fraction(1, 2), 0)
        buffer.failed.store([("episode", replace(episode, correct=False))])
        held += buffer.failed.n_bytes
    save(buffer, tmp_path / "replay", "f")
    assert n_bytes(tmp_path / "replay") == held


@pytest.mark.parametrize("kind", ["none", "unsolved", "never stored", "retired"])
def test_a_buffer_of_no_question_or_of_one_kind_comes_back(kind, tmp_path):
    buffer = ReplayBuffer(RetirementPolicy())
    for i, question_id in enumerate(() if kind == "none" else ("c", "a", "b")):
        buffer.record(question_id, Fraction(1, 2), i)
        if kind != "never stored":
            buffer.store([(question_id, trajectory(random.Random(i), i))])
        if kind == "unsolved":
            buffer.record(question_id, Fraction(0), i + 5)
        if kind == "retired":
            buffer.retire(question_id, i + 5)
    save(buffer, tmp_path / "replay", "f")
    assert view(opened(tmp_path / "replay", "f")) == view(buffer)


def test_saving_the_same_buffer_twice_writes_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        save(varied(), tmp_path / name, "f")
    for name in FILES:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


# -- readable by others -----------------------------------------------------------------------------------------------


def test_pandas_opens_both_tables_with_the_documented_columns_and_exact_types(saved):
    buffer = varied()
    questions = pd.read_parquet(saved / "questions.parquet").set_index("question_id", drop=False)
    assert list(questions.columns) == QUESTION_COLUMNS
    assert set(questions.index) == {*buffer.records, *buffer.retired}
    retired = questions[questions.retired_step.notna()]
    assert retired.retired_step.astype(int).to_dict() == dict(buffer.retired)
    for question_id, record in buffer.records.items():
        row = questions.loc[question_id]
        assert Fraction(int(row.accuracy_numerator), int(row.accuracy_denominator)) == record.accuracy
        assert row.observed_step == record.observed_step
    rows = pd.read_parquet(saved / "trajectories.parquet")
    assert list(rows.columns) == TRAJECTORY_COLUMNS
    assert len(rows) == buffer.n_trajectories
    for question_id, part in rows.groupby("question_id"):
        assert [ids.tolist() for ids in part.token_ids] == [
            t.token_ids.tolist() for t in buffer.trajectories(question_id)
        ]
    schema = pq.read_schema(saved / "trajectories.parquet")
    assert schema.field("token_ids").type.value_type == pa.int32()
    assert schema.field("behaviour_logprobs").type.value_type == pa.float32()


def test_the_manifest_counts_what_is_in_the_tables(saved):
    buffer, manifest = varied(), json.loads((saved / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"]) == ("exgrpo-replay-buffer", 5)
    assert manifest["fingerprint"] == "tokenizer-1"
    counted = (manifest["questions"], manifest["retired"], manifest["trajectories"])
    assert counted == (len(buffer.records), len(buffer.retired), buffer.n_trajectories)


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [None, 0, 0.01, 0.3, 0.7, 0.99])
def test_a_torn_or_missing_file_is_refused_by_name(saved, name, share):
    content = (saved / name).read_bytes()
    (saved / name).unlink()
    if share is not None:
        (saved / name).write_bytes(content[: int(share * (len(content) - 2))])
    with pytest.raises(SnapshotError, match=name):
        opened(saved)


@pytest.mark.parametrize("name", FILES[1:])
def test_a_flipped_bit_in_a_table_is_refused_by_name(saved, name):
    content = (saved / name).read_bytes()
    for position in (0, 3, len(content) // 3, len(content) // 2, len(content) - 20, len(content) - 1):
        flipped = bytearray(content)
        flipped[position] ^= 1
        (saved / name).write_bytes(flipped)
        with pytest.raises(SnapshotError, match=name):
            opened(saved)
    (saved / name).write_bytes(content)
    assert opened(saved).n_trajectories > 0


def test_a_flipped_bit_anywhere_in_the_manifest_is_refused(saved):
    """Whatever the bit was part of: a name, a count, a checksum, the fingerprint, the punctuation."""
    content, path = (saved / "manifest.json").read_bytes(), saved / "manifest.json"
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(SnapshotError):
            opened(saved)


def test_a_missing_or_foreign_folder_and_a_file_in_its_place_are_refused_by_name(tmp_path):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "single").write_text("{}")
    for name in ("nowhere", "foreign", "single"):
        with pytest.raises(SnapshotError, match=name):
            opened(tmp_path / name)
    for text in ('{"format": "another"}', "[]", "{}", "null"):
        (tmp_path / "foreign" / "manifest.json").write_text(text)
        with pytest.raises(SnapshotError, match="not an ExGRPO replay buffer"):
            opened(tmp_path / "foreign")


def test_another_version_is_refused(saved):
    manifest = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(json.dumps({**manifest, "version": 6}))
    with pytest.raises(SnapshotError, match="version 6 cannot be read"):
        opened(saved)


def test_another_fingerprint_is_refused_and_both_are_named(saved):
    """T6: the token ids would mean something else."""
    with pytest.raises(SnapshotError, match=r"another day's date.*tokenizer-1.*tokenizer-2"):
        opened(saved, "tokenizer-2")


# -- cut short --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [10, 1_000, 4_000])
def test_what_a_full_disk_leaves_is_refused(limit, tmp_path):
    with full_disk(limit), pytest.raises(OSError, match=r"(?i)file too large|no space|errno"):
        save(varied(questions=300), tmp_path / "replay", "f")
    with pytest.raises(SnapshotError, match="not a complete replay buffer snapshot"):
        opened(tmp_path / "replay", "f")


def test_an_existing_snapshot_is_not_overwritten(saved):
    with pytest.raises(OSError, match="replay"):
        save(ReplayBuffer(RetirementPolicy()), saved, "tokenizer-1")
    assert view(opened(saved)) == view(varied())


def test_size_and_hash_of_each_table_are_those_of_the_file(tmp_path):
    """A checkpoint takes them over: the tables are not read again."""
    for name, entry in save(varied(), tmp_path / "replay", "f").items():
        content = (tmp_path / "replay" / name).read_bytes()
        assert entry == (len(content), hashlib.sha256(content).hexdigest())


# -- another run's buffer ---------------------------------------------------------------------------------------------


def of(number: int, step: int) -> Trajectory:
    return replay_builders.trajectory([number] * 4, step)


def abc() -> ReplayBuffer:
    buffer = ReplayBuffer(RetirementPolicy())
    for name in "abc":
        buffer.record(name, Fraction(1, 2), 0)
    return buffer


def stored(buffer: ReplayBuffer, question_id: str) -> list[int]:
    return [int(one.token_ids[0]) for one in buffer.trajectories(question_id)]


def test_a_borrowed_buffer_brings_experience_and_no_mastery(tmp_path):
    source = abc()
    source.store([("a", of(1, step=40)), ("a", of(2, step=100)), ("b", of(3, step=70))])
    source.observe([group(["correct", "wrong"], "b")], 100)
    source.observe([group(["correct"], "c")], 100)
    save(source, tmp_path / "replay", "f")
    capped = ReplayBuffer(RetirementPolicy(), per_question=1, max_bytes=100)
    few = load_for_new_run(tmp_path / "replay", capped, "f", {"a", "b"})
    assert few.n_bytes <= 100
    assert (stored(few, "a"), stored(few, "b")) == ([2], []), "the new run's caps hold at once"
    one_each = ReplayBuffer(RetirementPolicy(), per_question=1)
    load_for_new_run(tmp_path / "replay", one_each, "f", {"a", "b"})
    assert (stored(one_each, "a"), stored(one_each, "b")) == ([2], [3]), "of each question the newest"
    aging = ReplayBuffer(RetirementPolicy(), max_age=50)
    buffer = load_for_new_run(tmp_path / "replay", aging, "f", {"a", "b", "other"})
    assert [t.step for t in buffer.trajectories("a")] == [-60, 0], "ages go on: the newest is of step 0"
    assert {name: record.observed_step for name, record in buffer.records.items()} == {"a": -100, "b": 0}
    assert not buffer.retired
    assert buffer.n_candidates == 2
    buffer.advance(1)
    assert (stored(buffer, "a"), stored(buffer, "b")) == ([2], [3])


def test_experience_of_other_questions_or_tokens_is_refused(tmp_path):
    source = abc()
    source.store([("a", of(1, step=40))])
    save(source, tmp_path / "replay", "f")
    with pytest.raises(SnapshotError, match="2 of its 3 questions"):
        load_for_new_run(tmp_path / "replay", ReplayBuffer(RetirementPolicy()), "f", {"a"})
    with pytest.raises(SnapshotError, match="another tokenizer or prompt template"):
        load_for_new_run(tmp_path / "replay", ReplayBuffer(RetirementPolicy()), "g", {"a", "b", "c"})
