"""Trajectories in a few large arrays: 8 bytes a token and a fixed number of bytes a trajectory, whatever their number.

Token ids (int32) and log-probs (float32) lie end to end in blocks. A removed trajectory leaves a gap; when the block
being written is full, the block with the most gaps is closed up in place and written on, and only if every block is at
least 80 % full a new one is made. So the arrays take at most 8/0.8 = 10 bytes a stored token, plus one block.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..records import Trajectory

BLOCK_TOKENS = 2**18  # 2 MiB; closing one up costs about a millisecond
FULL = 0.8
SWEEP = 1024  # trajectories stored between two looks whether the order needs sweeping
SOUND = (None, False, True)  # as stored: its position

# What is kept of a trajectory besides its tokens: 64 bytes, a cache line, in one table. Read and written a row at a
# time by `struct`, which takes a fifth of the time of a numpy row; `column` gives numpy's view of many.
FIELDS = [
    ("key", "16s", "V16"),  # hash of the token ids
    ("sequence", "q", "<i8"),  # order of storing; -1 for a free slot
    ("reward", "d", "<f8"),
    ("score", "d", "<f8"),  # not a number if it was never measured
    ("block", "i", "<i4"),
    ("start", "i", "<i4"),
    ("length", "i", "<i4"),
    ("step", "i", "<i4"),
    ("scored_step", "i", "<i4"),
    ("sound", "b", "<i1"),
    ("unused", "3s", "V3"),
]
ROW = struct.Struct("<" + "".join(code for _, code, _ in FIELDS))
TABLE = np.dtype([(name, kind) for name, _, kind in FIELDS])
TRAJECTORY_BYTES = ROW.size
_SEQUENCE, _STEP, _SCORE, _SCORED_STEP = (
    (struct.Struct("<" + code), sum(struct.calcsize(c) for _, c, _ in FIELDS[:i]))
    for name in ("sequence", "step", "score", "scored_step")
    for i, (field, code, _) in enumerate(FIELDS)
    if field == name
)


class Block:
    """Tokens of several trajectories end to end. used: tokens written; live: those not removed."""

    def __init__(self, capacity: int) -> None:
        self.token_ids = np.empty(capacity, np.int32)
        self.logprobs = np.empty(capacity, np.float32)
        self.capacity = capacity
        self.used = self.live = 0
        self.slots = array("i")  # whose tokens lie here; also of slots that have been removed or taken again since


class TrajectoryArena:
    """Stores trajectories under slot numbers. `add`, `get` and `remove` cost O(length), `add` amortised."""

    def __init__(self) -> None:
        self._table = bytearray()
        self._free: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._head = -1  # the block being written
        self._next_block = 0
        self._trajectories = self._tokens = 0

    def __len__(self) -> int:
        return self._trajectories

    @property
    def slots(self) -> int:
        """Slots in use or free: the next number that has never been used."""
        return len(self._table) // ROW.size

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def token_bytes(self) -> int:
        """Bytes of the blocks, gaps included."""
        return sum(block.capacity * 8 for block in self._blocks.values())

    def add(self, trajectory: Trajectory, key: bytes, sequence: int) -> int:
        """Copy a trajectory in; returns its slot.

        key: `trajectory.key`; sequence: its place in the order of storing, never used before
        """
        n = len(trajectory)
        number = self._block_for(n)
        block = self._blocks[number]
        start = block.used
        block.token_ids[start : start + n] = trajectory.token_ids
        block.logprobs[start : start + n] = trajectory.behaviour_logprobs
        if self._free:
            slot = self._free.pop()
        else:
            slot = self.slots
            self._table += bytes(ROW.size)
        ROW.pack_into(
            self._table,
            slot * ROW.size,
            key,
            sequence,
            trajectory.reward,
            math.nan if trajectory.score is None else trajectory.score,
            number,
            start,
            n,
            trajectory.step,
            trajectory.scored_step,
            SOUND.index(trajectory.sound),
            b"",
        )
        block.slots.append(slot)
        block.used += n
        block.live += n
        self._trajectories += 1
        self._tokens += n
        return slot

    def get(self, slot: int) -> Trajectory:
        """A copy of the trajectory: its tokens may move later. Raises KeyError for a free slot."""
        _, _, reward, score, number, start, n, step, scored_step, sound, _ = self._row(slot)
        block, end = self._blocks[number], start + n
        return Trajectory(
            block.token_ids[start:end].copy(),
            block.logprobs[start:end].copy(),
            reward,
            step,
            sound=SOUND[sound],
            score=None if math.isnan(score) else score,
            scored_step=scored_step,
        )

    def set_score(self, slot: int, score: float, step: int) -> None:
        """Raises KeyError for a free slot."""
        self._row(slot)
        for (field, offset), value in ((_SCORE, score), (_SCORED_STEP, step)):
            field.pack_into(self._table, slot * ROW.size + offset, value)

    def remove(self, slot: int) -> None:
        """Raises KeyError for a free slot."""
        _, _, _, _, number, _, n, *_ = self._row(slot)
        block = self._blocks[number]
        block.live -= n
        field, offset = _SEQUENCE
        field.pack_into(self._table, slot * ROW.size + offset, -1)
        self._free.append(slot)
        self._trajectories -= 1
        self._tokens -= n
        if not block.live and number != self._head:
            del self._blocks[number]

    def find(self, slots: Sequence[int], key: bytes) -> int | None:
        """Which of these slots holds the trajectory with this key, if any."""
        for slot in slots:
            begin = slot * ROW.size
            if self._table[begin : begin + 16] == key:
                return slot
        return None

    def key(self, slot: int) -> bytes:
        return bytes(self._table[slot * ROW.size : slot * ROW.size + 16])

    def sequence(self, slot: int) -> int:
        """Place in the order of storing; -1 for a free slot."""
        return self._value(_SEQUENCE, slot)

    def step(self, slot: int) -> int:
        return self._value(_STEP, slot)

    def column(self, name: str, slots: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """The values of one of FIELDS for many slots."""
        return np.asarray(np.frombuffer(self._table, TABLE)[name][slots])

    def gather(self, slots: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Token ids and log-probs of many trajectories end to end, in the order of the slots."""
        lengths, owner = self.column("length", slots).astype(np.int64), self.column("block", slots)
        starts, ends = self.column("start", slots).astype(np.int64), np.cumsum(lengths)
        token_ids = np.empty(ends[-1] if len(ends) else 0, np.int32)
        logprobs = np.empty(len(token_ids), np.float32)
        for number in np.unique(owner):
            block, here = self._blocks[int(number)], np.flatnonzero(owner == number)
            source = spans(starts[here], lengths[here])
            target = spans(ends[here] - lengths[here], lengths[here])
            token_ids[target], logprobs[target] = block.token_ids[source], block.logprobs[source]
        return token_ids, logprobs

    def _row(self, slot: int) -> tuple[Any, ...]:
        row = ROW.unpack_from(self._table, slot * ROW.size)
        if row[1] < 0:
            raise KeyError(f"slot {slot} is free")
        return row

    def _value(self, field: tuple[struct.Struct, int], slot: int) -> int:
        return int(field[0].unpack_from(self._table, slot * ROW.size + field[1])[0])

    def _block_for(self, n: int) -> int:
        head = self._blocks.get(self._head)
        if head is not None and head.used + n <= head.capacity:
            return self._head
        emptiest = min(self._blocks, key=lambda number: self._blocks[number].live, default=None)
        if emptiest is not None:
            block = self._blocks[emptiest]
            if block.live <= FULL * block.capacity and block.live + n <= block.capacity:
                self._close_up(emptiest)
                self._head = emptiest
                return emptiest
        self._head = self._next_block
        self._next_block += 1
        self._blocks[self._head] = Block(max(BLOCK_TOKENS, n))
        return self._head

    def _close_up(self, number: int) -> None:
        """Move a block's trajectories to its front, in the order in which they lie."""
        block = self._blocks[number]
        slots = np.unique(np.frombuffer(block.slots, np.int32)).astype(np.int64)
        slots = slots[(self.column("block", slots) == number) & (self.column("sequence", slots) >= 0)]
        slots = slots[np.argsort(self.column("start", slots))]
        lengths = self.column("length", slots).astype(np.int64)
        source = spans(self.column("start", slots).astype(np.int64), lengths)
        block.token_ids[: len(source)], block.logprobs[: len(source)] = block.token_ids[source], block.logprobs[source]
        np.frombuffer(self._table, TABLE)["start"][slots] = np.cumsum(lengths) - lengths
        block.used, block.slots = len(source), array("i", slots.astype(np.int32).tobytes())


class StoringOrder:
    """Slots in the order in which they were filled. What has been removed meanwhile is skipped and swept up now and
    then, so that `append` and `oldest` cost O(1) amortised and the list holds at most twice the stored trajectories
    and SWEEP more.
    """

    def __init__(self, arena: TrajectoryArena) -> None:
        self._arena = arena
        self._slots, self._sequences = array("i"), array("q")
        self._first = 0

    def append(self, slot: int, sequence: int) -> None:
        self._slots.append(slot)
        self._sequences.append(sequence)
        if len(self._slots) % SWEEP == 0 and len(self._slots) > 2 * len(self._arena):
            slots = np.array(self._slots, np.int64)
            sequences: npt.NDArray[np.int64] = np.array(self._sequences, np.int64)
            alive = self._arena.column("sequence", slots) == sequences
            self._slots = array("i", slots[alive].astype(np.int32).tobytes())
            self._sequences = array("q", sequences[alive].tobytes())
            self._first = 0

    def oldest(self) -> int:
        """The slot filled first of those still in use. Raises IndexError if there is none."""
        while self._arena.sequence(self._slots[self._first]) != self._sequences[self._first]:
            self._first += 1
        return self._slots[self._first]


def spans(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The indices start … start + length − 1 of several spans, end to end."""
    if not len(lengths):
        return np.zeros(0, np.int64)
    begins = np.cumsum(lengths) - lengths
    return np.asarray(np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - begins, lengths))
