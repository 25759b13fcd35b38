"""What comes back: questions that had retired, questions of old experience, and another run's buffer."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import replay_builders

from exgrpo_orlhf.records import RolloutGroup, Trajectory
from exgrpo_orlhf.replay import (
    DifficultyBuckets,
    QuestionSampler,
    ReplayBuffer,
    RetirementPolicy,
    snapshot,
)

HALF = Fraction(1, 2)


def trajectory(number: int, step: int, length: int = 4) -> Trajectory:
    return replay_builders.trajectory([number] * length, step)


def buffer_of(*, retirement: RetirementPolicy | None = None, **limits) -> ReplayBuffer:
    buffer = ReplayBuffer(retirement or RetirementPolicy(), **limits)
    for name in "abc":
        buffer.record(name, HALF, 0)
    return buffer


def stored(buffer: ReplayBuffer, question_id: str) -> list[int]:
    return [int(t.token_ids[0]) for t in buffer.trajectories(question_id)]


def group(name: str, verdicts: str) -> RolloutGroup:
    """One letter a rollout."""
    return replay_builders.group([{"r": "correct", "w": "wrong", "t": "timeout"}[v] for v in verdicts], name)


# -- retirement -------------------------------------------------------------------------------------------------------


def test_a_retired_question_returns_when_its_accuracy_falls():
    buffer = buffer_of(retirement=RetirementPolicy(returns_below=0.75))
    buffer.observe([group("a", "rrrr")], 1)
    buffer.observe([group("a", "rrrw")], 2)
    assert "a" in buffer.retired, "0.75 is not below 0.75"
    buffer.observe([group("a", "rrww")], 3)
    assert "a" not in buffer.retired
    assert buffer.records["a"].accuracy == HALF
    assert buffer.records["a"].streak == 0


# -- age-decayed sampling ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["bucket", "question"])
def test_a_questions_weight_halves_with_every_half_life_of_its_newest_trajectory(weight):
    steps = {"a": 0, "b": 10, "c": 20, "d": 20}
    buffer = ReplayBuffer(RetirementPolicy())
    for name, step in steps.items():
        buffer.record(name, Fraction(1, 4) if name == "d" else HALF, 0)
        buffer.store([(name, trajectory(1, step=0)), (name, trajectory(2, step=step))])
    sampler = QuestionSampler(method="uniform", weight=weight, half_life=10.0)
    rng, n = np.random.default_rng(0), 20_000

    def draw(k: int) -> list[str]:
        return sampler.sample(buffer.candidates, k, 8, DifficultyBuckets(), rng, buffer.newest_step)

    raw = {name: 2.0 ** (step / 10) for name, step in steps.items()}
    if weight == "bucket":
        expected = {name: raw[name] / 7 / 2 for name in "abc"} | {"d": 0.5}
    else:
        expected = {name: raw[name] / sum(raw.values()) for name in raw}
    first = Counter(draw(1)[0] for _ in range(n))
    for name, p in expected.items():
        assert abs(first[name] - n * p) < 5 * (n * p * (1 - p)) ** 0.5
    # The second draw is without replacement: brute force over the first.
    second = Counter(draw(2)[1] for _ in range(n))
    for name in steps:
        p = 0.0
        for gone in set(steps) - {name}:
            left = {q: raw[q] for q in steps if q != gone}
            if weight == "question":
                p += expected[gone] * left[name] / sum(left.values())
            else:
                halves = {q for q in left if q != "d"}
                here = {name} if name == "d" else halves
                buckets = 1 if gone == "d" else 2
                p += expected[gone] * left[name] / sum(left[q] for q in here) / buckets
        assert abs(second[name] - n * p) < 5 * (n * p * (1 - p)) ** 0.5, name


def test_very_old_questions_are_still_drawn_when_nothing_else_is_left():
    buffer = ReplayBuffer(RetirementPolicy())
    for name, step in (("a", 0), ("b", 100_000)):
        buffer.record(name, HALF, 0)
        buffer.store([(name, trajectory(1, step=step))])
    sampler = QuestionSampler(half_life=1.0, weight="question")
    drawn = sampler.sample(buffer.candidates, 2, 8, DifficultyBuckets(), np.random.default_rng(0), buffer.newest_step)
    assert drawn == ["b", "a"]


# -- another run's buffer ---------------------------------------------------------------------------------------------


def test_a_borrowed_buffer_brings_experience_and_no_mastery(tmp_path):
    source = buffer_of()
    source.store([("a", trajectory(1, step=40)), ("a", trajectory(2, step=100)), ("b", trajectory(3, step=70))])
    source.observe([group("b", "rrww")], 100)
    source.observe([group("c", "rrrr")], 100)
    snapshot.save(source, tmp_path / "replay", "f")
    capped = ReplayBuffer(RetirementPolicy(), per_question=1, max_bytes=100)
    few = snapshot.load_for_new_run(tmp_path / "replay", capped, "f", {"a", "b"})
    assert few.n_bytes <= 100
    assert (stored(few, "a"), stored(few, "b")) == ([], [3]), "the new run's caps hold at once"
    one_each = ReplayBuffer(RetirementPolicy(), per_question=1)
    snapshot.load_for_new_run(tmp_path / "replay", one_each, "f", {"a", "b"})
    assert (stored(one_each, "a"), stored(one_each, "b")) == ([2], [3]), "of each question the newest"
    aging = ReplayBuffer(RetirementPolicy(), max_age=50)
    buffer = snapshot.load_for_new_run(tmp_path / "replay", aging, "f", {"a", "b", "other"})
    assert [t.step for t in buffer.trajectories("a")] == [-60, 0], "ages go on: the newest is of step 0"
    assert {name: record.observed_step for name, record in buffer.records.items()} == {"a": -100, "b": 0}
    assert not buffer.retired
    assert buffer.n_candidates == 2
    buffer.advance(1)
    assert (stored(buffer, "a"), stored(buffer, "b")) == ([2], [3])


def test_experience_of_other_questions_or_tokens_is_refused(tmp_path):
    source = buffer_of()
    source.store([("a", trajectory(1, step=40))])
    snapshot.save(source, tmp_path / "replay", "f")
    with pytest.raises(snapshot.SnapshotError, match="2 of its 3 questions"):
        snapshot.load_for_new_run(tmp_path / "replay", ReplayBuffer(RetirementPolicy()), "f", {"a"})
    with pytest.raises(snapshot.SnapshotError, match="another tokenizer or prompt template"):
        snapshot.load_for_new_run(tmp_path / "replay", ReplayBuffer(RetirementPolicy()), "g", {"a", "b", "c"})
