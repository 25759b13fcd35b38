"""Trajectories in arrays: nothing is lost, mixed up or kept beyond its time, and little room is wasted."""

from __future__ import annotations

import random

import numpy as np
import pytest

from exgrpo_orlhf.records import Trajectory
from exgrpo_orlhf.replay.arena import BLOCK_TOKENS, TRAJECTORY_BYTES, TrajectoryArena, spans


def trajectory(rng: np.random.Generator, length: int, step: int = 0) -> Trajectory:
    ids = rng.integers(0, 150_000, length).astype(np.int32)
    sound = [None, False, True][int(rng.integers(3))]
    score = None if rng.random() < 0.3 else float(rng.random())
    return Trajectory(
        ids, rng.normal(-1, 1, length).astype(np.float32), float(rng.random()), step, "stop", sound, score
    )


def same(a: Trajectory, b: Trajectory) -> bool:
    return (
        a.token_ids.tobytes() == b.token_ids.tobytes()
        and a.behaviour_logprobs.tobytes() == b.behaviour_logprobs.tobytes()
        and (a.reward, a.step, a.sound, a.score, a.scored_step) == (b.reward, b.step, b.sound, b.score, b.scored_step)
    )


@pytest.mark.parametrize(("seed", "longest"), [(0, 60), (1, 4000), (2, BLOCK_TOKENS // 3)])
def test_what_was_put_in_comes_out_to_the_bit_through_any_history(seed, longest):
    """Removals leave gaps, blocks are closed up and written on, slots are taken again."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    arena, kept = TrajectoryArena(), {}
    changes = 0
    target = 6 * BLOCK_TOKENS  # tokens to hold
    for sequence in range(40_000 if longest < 100 else 4_000):
        one = trajectory(rng, draw.randint(1, longest), sequence)
        slot = arena.add(one, one.key, sequence)
        assert slot not in kept
        kept[slot] = one
        while arena.tokens > target or (kept and draw.random() < 0.4):
            gone = draw.choice(list(kept)) if len(kept) < 200 else next(iter(kept))
            arena.remove(gone)
            del kept[gone]
            changes += 1
    assert changes > 500
    assert len(arena) == len(kept)
    assert arena.tokens == sum(map(len, kept.values()))
    assert all(same(arena.get(slot), one) for slot, one in kept.items())
    slots = np.array(list(kept), np.int64)
    ids, logprobs = arena.gather(slots)
    assert ids.tobytes() == b"".join(one.token_ids.tobytes() for one in kept.values())
    assert logprobs.tobytes() == b"".join(one.behaviour_logprobs.tobytes() for one in kept.values())


def test_ten_bytes_a_token_and_one_block_however_long_it_goes_on():
    rng, draw = np.random.default_rng(0), random.Random(0)
    arena, slots = TrajectoryArena(), []
    ids, logprobs = rng.integers(0, 9, 500).astype(np.int32), np.zeros(500, np.float32)
    peak = 0
    for sequence in range(60_000):
        n = draw.randint(1, 500)
        one = Trajectory(ids[:n], logprobs[:n], 1.0, 0)
        slots.append(arena.add(one, sequence.to_bytes(16), sequence))
        if len(slots) > 6000:  # about 1.5 million tokens stay, in random order of removal
            position = draw.randrange(len(slots))
            slots[position], slots[-1] = slots[-1], slots[position]
            arena.remove(slots.pop())
            peak = max(peak, arena.token_bytes - 10 * arena.tokens)
    assert peak <= 8 * BLOCK_TOKENS
    assert arena.slots <= 6001


def test_a_trajectory_longer_than_a_block_has_one_of_its_own():
    rng, arena = np.random.default_rng(0), TrajectoryArena()
    long, short = trajectory(rng, BLOCK_TOKENS + 7), trajectory(rng, 5)
    slots = [arena.add(one, one.key, i) for i, one in enumerate((short, long, short, long))]
    assert [len(arena.get(slot)) for slot in slots] == [5, BLOCK_TOKENS + 7, 5, BLOCK_TOKENS + 7]
    assert same(arena.get(slots[3]), long)


def test_an_emptied_arena_gives_its_memory_back():
    rng, arena = np.random.default_rng(0), TrajectoryArena()
    slots = [arena.add(one := trajectory(rng, 5000), one.key, i) for i in range(300)]
    for slot in slots:
        arena.remove(slot)
    assert (len(arena), arena.tokens) == (0, 0)
    assert arena.token_bytes <= 8 * BLOCK_TOKENS


def test_a_copy_does_not_change_when_its_block_is_closed_up():
    rng, arena = np.random.default_rng(0), TrajectoryArena()
    n = BLOCK_TOKENS // 4
    first = [trajectory(rng, n) for _ in range(4)]
    slots = [arena.add(one, one.key, i) for i, one in enumerate(first)]
    held = arena.get(slots[3])
    arena.remove(slots[0])
    arena.remove(slots[1])
    newer = trajectory(rng, n)
    added = arena.add(newer, newer.key, 9)
    assert same(held, first[3])
    assert same(arena.get(slots[2]), first[2])
    assert same(arena.get(added), newer)
    assert arena.token_bytes == 8 * BLOCK_TOKENS, "the gaps were used"


def test_a_free_slot_is_refused():
    rng, arena = np.random.default_rng(0), TrajectoryArena()
    slot = arena.add(one := trajectory(rng, 3), one.key, 0)
    arena.remove(slot)
    for call in (arena.get, arena.remove):
        with pytest.raises(KeyError, match=f"slot {slot} is free"):
            call(slot)
    assert arena.sequence(slot) == -1


def test_find_knows_a_trajectory_by_its_tokens():
    rng, arena = np.random.default_rng(0), TrajectoryArena()
    ones = [trajectory(rng, 8) for _ in range(5)]
    slots = [arena.add(one, one.key, i) for i, one in enumerate(ones)]
    assert [arena.find(slots, one.key) for one in ones] == slots
    assert arena.find(slots[:2], ones[4].key) is None
    assert [arena.key(slot) for slot in slots] == [one.key for one in ones]


def test_a_trajectory_takes_one_cache_line_besides_its_tokens():
    assert TRAJECTORY_BYTES == 64


def test_spans_are_the_indices_of_each_span_end_to_end():
    starts, lengths = np.array([5, 0, 9, 9]), np.array([2, 3, 0, 1])
    assert spans(starts, lengths).tolist() == [5, 6, 0, 1, 2, 9]
    assert spans(starts[:0], lengths[:0]).tolist() == []
