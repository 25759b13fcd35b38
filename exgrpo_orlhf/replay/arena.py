"""Trajectories in a few large arrays: 8 bytes a token and a fixed number of bytes a trajectory, whatever their number.

Token ids (int32) and log-probs (float32) lie end to end in blocks. A removed trajectory leaves a gap; when the block
being written is full, the block with the most gaps is closed up in place and written on, and only if every block is at
least 80 % full a new one is made. So the arrays take at most 8/0.8 = 10 bytes a stored token, plus one block.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .trajectory import Trajectory

BLOCK_TOKENS = 2**18  # 2 MiB; closing one up costs about a millisecond
FULL = 0.8
SOUND = (None, False, True)  # as stored: its position

# What is kept of a trajectory besides its tokens, in one array each: name → type code of `array`, whose single values
# are read and written several times faster than numpy's. 61 bytes in all.
COLUMNS = {
    "key_high": "Q",  # hash of the token ids
    "key_low": "Q",
    "sequence": "q",  # order of storing; -1 for a free slot
    "reward": "d",
    "block": "i",
    "start": "i",
    "length": "i",
    "step": "i",
    "sound": "b",
    "score": "d",  # not a number if it was never measured
    "scored_step": "i",
}
Key = tuple[int, int]
TRAJECTORY_BYTES = sum(array(code).itemsize for code in COLUMNS.values())


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
        self._key_high, self._key_low = array("Q"), array("Q")
        self._sequence, self._reward = array("q"), array("d")
        self._block, self._start, self._length, self._step = array("i"), array("i"), array("i"), array("i")
        self._sound = array("b")
        self._score, self._scored_step = array("d"), array("i")
        self._free: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._head = -1  # the block being written
        self._next_block = 0
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._sequence) - len(self._free)

    @property
    def slots(self) -> int:
        """Slots in use or free: the next number that has never been used."""
        return len(self._sequence)

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def token_bytes(self) -> int:
        """Bytes of the blocks, gaps included."""
        return sum(block.capacity * 8 for block in self._blocks.values())

    def add(self, trajectory: Trajectory, key: Key, sequence: int) -> int:
        """Copy a trajectory in; returns its slot. sequence: its place in the order of storing, never used before."""
        n = len(trajectory)
        number = self._block_for(n)
        block = self._blocks[number]
        start = block.used
        block.token_ids[start : start + n] = trajectory.token_ids
        block.logprobs[start : start + n] = trajectory.behaviour_logprobs
        slot = self._free.pop() if self._free else self._new_slot()
        self._key_high[slot], self._key_low[slot] = key
        self._sequence[slot], self._reward[slot], self._step[slot] = sequence, trajectory.reward, trajectory.step
        self._block[slot], self._start[slot], self._length[slot] = number, start, n
        self._sound[slot] = SOUND.index(trajectory.sound)
        self.set_score(slot, trajectory.score, trajectory.scored_step)
        block.slots.append(slot)
        block.used += n
        block.live += n
        self._tokens += n
        return slot

    def get(self, slot: int) -> Trajectory:
        """A copy of the trajectory: its tokens may move later. Raises KeyError for a free slot."""
        self._check(slot)
        block, start = self._blocks[self._block[slot]], self._start[slot]
        end = start + self._length[slot]
        return Trajectory(
            block.token_ids[start:end].copy(),
            block.logprobs[start:end].copy(),
            self._reward[slot],
            self._step[slot],
            sound=SOUND[self._sound[slot]],
            score=None if math.isnan(self._score[slot]) else self._score[slot],
            scored_step=self._scored_step[slot],
        )

    def set_score(self, slot: int, score: float | None, step: int) -> None:
        self._score[slot], self._scored_step[slot] = math.nan if score is None else score, step

    def remove(self, slot: int) -> None:
        """Raises KeyError for a free slot."""
        self._check(slot)
        number, n = self._block[slot], self._length[slot]
        block = self._blocks[number]
        block.live -= n
        self._sequence[slot] = -1
        self._free.append(slot)
        self._tokens -= n
        if not block.live and number != self._head:
            del self._blocks[number]

    def find(self, slots: Sequence[int], key: Key) -> int | None:
        """Which of these slots holds the trajectory with this key, if any."""
        high, low = key
        for slot in slots:
            if self._key_low[slot] == low and self._key_high[slot] == high:
                return slot
        return None

    def key(self, slot: int) -> bytes:
        return self._key_high[slot].to_bytes(8) + self._key_low[slot].to_bytes(8)

    def sequence(self, slot: int) -> int:
        """Place in the order of storing; -1 for a free slot."""
        return self._sequence[slot]

    def step(self, slot: int) -> int:
        return self._step[slot]

    def column(self, name: str, slots: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """The values of a column (of COLUMNS) for many slots."""
        values = np.frombuffer(getattr(self, f"_{name}"), dtype=COLUMNS[name])
        return np.asarray(values[slots])

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

    def _check(self, slot: int) -> None:
        if self._sequence[slot] < 0:
            raise KeyError(f"slot {slot} is free")

    def _new_slot(self) -> int:
        for column in (self._key_high, self._key_low, self._sequence, self._block, self._start, self._length):
            column.append(0)
        self._step.append(0)
        self._reward.append(0.0)
        self._sound.append(0)
        self._score.append(math.nan)
        self._scored_step.append(-1)
        return len(self._sequence) - 1

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
        np.frombuffer(self._start, np.int32)[slots] = np.cumsum(lengths) - lengths
        block.used, block.slots = len(source), array("i", slots.astype(np.int32).tobytes())


class StoringOrder:
    """Slots in the order in which they were filled. What has been removed meanwhile is skipped and swept up now and
    then, so that `append` and `oldest` cost O(1) amortised and the list never exceeds twice the stored trajectories.
    """

    def __init__(self, arena: TrajectoryArena) -> None:
        self._arena = arena
        self._slots, self._sequences = array("i"), array("q")
        self._first = 0

    def append(self, slot: int, sequence: int) -> None:
        self._slots.append(slot)
        self._sequences.append(sequence)
        if len(self._slots) > 2 * len(self._arena) + 1024:
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


def key_of(trajectory: Trajectory) -> Key:
    """Identity of a trajectory, as the two numbers that the arena keeps."""
    key = trajectory.key
    return int.from_bytes(key[:8]), int.from_bytes(key[8:])


def spans(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The indices start … start + length − 1 of several spans, end to end."""
    if not len(lengths):
        return np.zeros(0, np.int64)
    begins = np.cumsum(lengths) - lengths
    return np.asarray(np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - begins, lengths))
