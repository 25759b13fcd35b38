"""The replay buffer: latest accuracy per question, its correct trajectories, the retired set, the caps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from ..records import RolloutGroup, Trajectory
from .arena import TRAJECTORY_BYTES, StoringOrder, TrajectoryArena
from .indexed_set import IndexedSet
from .limits import BufferLimits
from .retirement import RetirementPolicy

TOKEN_BYTES = 8  # int32 id and float32 log-prob


@dataclass(slots=True)
class QuestionRecord:
    """What the buffer knows of one question.

    streak: observations in a row that counted towards retirement
    slots: of its trajectories in the arena, oldest first
    """

    accuracy: Fraction
    observed_step: int
    streak: int = 0
    slots: list[int] = field(default_factory=list)


class ReplayBuffer:
    """Experience by question. `observe`, `store`, `retire` and `remove` cost O(1) per question and trajectory.

    A *candidate* for replay has stored trajectories and a latest accuracy above 0. A question that falls to 0 stops
    being a candidate and keeps its trajectories; it is one again as soon as it is solved again. With
    `BufferLimits.replays_unsolved` it stays one.
    """

    def __init__(self, retirement: RetirementPolicy, limits: BufferLimits | None = None) -> None:
        self.retirement = retirement
        self.limits = limits or BufferLimits()
        self.arena = TrajectoryArena()
        self._records: dict[str, QuestionRecord] = {}
        self._retired: dict[str, int] = {}  # question id → step at which it retired, in that order
        self._candidates: dict[Fraction, IndexedSet] = {}  # one bucket per exact accuracy
        self._owner: list[str] = []  # question id by slot
        self._order = StoringOrder(self.arena)
        self._with_trajectories = 0
        self.evicted = 0  # trajectories that a limit has taken, since the start of the process
        self.next_sequence = 0

    # -- what is in it ------------------------------------------------------------------------------------------------

    @property
    def retired(self) -> Mapping[str, int]:
        """Retired question ids and the step at which each retired."""
        return self._retired

    @property
    def records(self) -> Mapping[str, QuestionRecord]:
        return self._records

    @property
    def candidates(self) -> Mapping[Fraction, IndexedSet]:
        """Candidate question ids by exact latest accuracy; no empty bucket."""
        return self._candidates

    @property
    def n_candidates(self) -> int:
        return sum(map(len, self._candidates.values()))

    @property
    def n_with_trajectories(self) -> int:
        """Questions with stored trajectories, candidates or fallen to 0."""
        return self._with_trajectories

    @property
    def n_trajectories(self) -> int:
        return len(self.arena)

    @property
    def n_tokens(self) -> int:
        """Stored response tokens."""
        return self.arena.tokens

    @property
    def n_bytes(self) -> int:
        """What `BufferLimits.max_bytes` counts."""
        return self.n_tokens * TOKEN_BYTES + self.n_trajectories * TRAJECTORY_BYTES

    def trajectories(self, question_id: str) -> list[Trajectory]:
        """The stored trajectories of a question, oldest first. Raises KeyError for a question without a record."""
        return [self.arena.get(slot) for slot in self._records[question_id].slots]

    def newest_step(self, question_id: str) -> int:
        """Step of a question's newest trajectory. Raises KeyError without a record, IndexError without a trajectory."""
        return self.arena.step(self._records[question_id].slots[-1])

    # -- what changes it ----------------------------------------------------------------------------------------------

    def advance(self, step: int) -> None:
        """Begin a step: trajectories that are too old for it go, retired questions whose time has come return."""
        if self.limits.max_age is not None:
            while len(self.arena) and self.arena.step(oldest := self._order.oldest()) < step - self.limits.max_age:
                self._evict(oldest)
        if self.retirement.returns_after is not None:
            due = step - self.retirement.returns_after
            while self._retired and next(iter(self._retired.values())) <= due:
                del self._retired[next(iter(self._retired))]

    def observe(self, groups: Iterable[RolloutGroup], step: int) -> None:
        """Record each group's accuracy as the latest one of its question, 0 included, and retire the mastered.

        A group too few of whose rollouts could be graded leaves its question's record as it is.
        """
        for group in groups:
            accuracy, question_id = group.accuracy, group.question.id
            if accuracy is None:
                continue
            if question_id in self._retired:
                if not self.retirement.is_back(accuracy):
                    continue
                del self._retired[question_id]
            self.record(question_id, accuracy, step)
            record = self._records[question_id]
            record.streak = record.streak + 1 if self.retirement.mastered(accuracy) else 0
            if record.streak and self.retirement.retires(record.streak):
                self.retire(question_id, step)

    def record(self, question_id: str, accuracy: Fraction, step: int) -> None:
        """Set a question's latest accuracy. Raises ValueError outside [0, 1] or for a retired question."""
        if not 0 <= accuracy <= 1:
            raise ValueError(f"question {question_id}: an accuracy lies in [0, 1], got {accuracy}")
        if question_id in self._retired:
            raise ValueError(f"question {question_id} is retired and takes no new accuracy")
        record = self._records.get(question_id)
        if record is None:
            self._records[question_id] = QuestionRecord(accuracy, step)
            return
        record.observed_step = step
        if record.accuracy != accuracy:
            self._leave_bucket(question_id, record)
            record.accuracy = accuracy
            self._enter_bucket(question_id, record)

    def store(self, experience: Iterable[tuple[str, Trajectory]]) -> int:
        """Store correct trajectories of observed questions; returns how many. Retired questions take none.

        A trajectory that is sampled again replaces its earlier copy and with it the older log-probs and step. What a
        limit then asks for is evicted, oldest first. Raises ValueError for a response that did not finish (it was cut
        off: correct, but nothing to imitate) and for a question that was never observed; what came before it is stored.
        """
        stored = 0
        for question_id, trajectory in experience:
            if question_id in self._retired:
                continue
            record = self._records.get(question_id)
            if record is None:
                raise ValueError(f"question {question_id} has no accuracy yet: observe its group before storing")
            if trajectory.finish != "stop":
                raise ValueError(f"question {question_id}: a truncated response is not stored")
            key = trajectory.key
            known = self.arena.find(record.slots, key)
            self._add(question_id, record, trajectory, key, self.next_sequence)
            if known is not None:
                self._forget(record, known)
            self.next_sequence += 1
            stored += 1
            self._cap_question(record)
        self._cap_bytes()
        return stored

    def remember_scores(self, question_id: str, scores: Mapping[bytes, float], step: int) -> None:
        """Keep what selection has measured of a question's trajectories, by their keys."""
        for slot in self._records[question_id].slots:
            score = scores.get(self.arena.key(slot))
            if score is not None:
                self.arena.set_score(slot, score, step)

    def retire(self, question_id: str, step: int) -> None:
        """Take a question out of the buffer. Raises KeyError if it has no record."""
        self.remove(question_id)
        self._retired[question_id] = step

    def remove(self, question_id: str) -> None:
        """Forget a question and its trajectories. Raises KeyError if it has no record."""
        record = self._records.pop(question_id)
        self._leave_bucket(question_id, record)
        self._with_trajectories -= bool(record.slots)
        for slot in record.slots:
            self.arena.remove(slot)

    def restore(
        self,
        records: Iterable[tuple[str, QuestionRecord]],
        trajectories: Sequence[tuple[str, int, Trajectory]],
        retired: Mapping[str, int],
        next_sequence: int,
    ) -> None:
        """Fill an empty buffer from a snapshot. Raises ValueError if it is not empty.

        records: without slots, in `canonical_order`; trajectories: (question id, sequence, trajectory)
        """
        if self._records or self._retired:
            raise ValueError("only an empty buffer can be restored")
        self._records.update(records)
        self._retired.update(retired)
        for question_id, sequence, trajectory in sorted(trajectories, key=lambda row: row[1]):
            record = self._records[question_id]
            self._add(question_id, record, trajectory, trajectory.key, sequence, enter=False)
        for question_id, record in self._records.items():
            self._enter_bucket(question_id, record)
            self._cap_question(record)  # the snapshot may be another run's, with other limits
        self._cap_bytes()
        self.next_sequence = next_sequence

    def canonical_order(self) -> list[str]:
        """Question ids bucket by bucket, in each bucket's own order, then the others by id.

        Restoring in this order gives every bucket the order it had, so that a resumed sampler draws the same.
        """
        ordered = [member for accuracy in sorted(self._candidates) for member in self._candidates[accuracy]]
        seen = set(ordered)
        return ordered + sorted(question_id for question_id in self._records if question_id not in seen)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _cap_question(self, record: QuestionRecord) -> None:
        while self.limits.per_question is not None and len(record.slots) > self.limits.per_question:
            self._evict(record.slots[0])

    def _cap_bytes(self) -> None:
        while self.limits.max_bytes is not None and self.n_bytes > self.limits.max_bytes:
            self._evict(self._order.oldest())

    def _add(
        self,
        question_id: str,
        record: QuestionRecord,
        trajectory: Trajectory,
        key: bytes,
        sequence: int,
        enter: bool = True,
    ) -> None:
        slot = self.arena.add(trajectory, key, sequence)
        if slot >= len(self._owner):
            self._owner.append("")
        self._owner[slot] = question_id
        self._order.append(slot, sequence)
        record.slots.append(slot)
        if len(record.slots) == 1:
            self._with_trajectories += 1
            if enter:
                self._enter_bucket(question_id, record)

    def _forget(self, record: QuestionRecord, slot: int) -> None:
        self.arena.remove(slot)
        record.slots.remove(slot)
        if not record.slots:
            self._with_trajectories -= 1

    def _evict(self, slot: int) -> None:
        question_id = self._owner[slot]
        record = self._records[question_id]
        self._forget(record, slot)
        if not record.slots:
            self._leave_bucket(question_id, record)
        self.evicted += 1

    def _enter_bucket(self, question_id: str, record: QuestionRecord) -> None:
        if record.slots and (record.accuracy > 0 or self.limits.replays_unsolved):
            bucket = self._candidates.get(record.accuracy)
            if bucket is None:
                bucket = self._candidates[record.accuracy] = IndexedSet()
            bucket.add(question_id)

    def _leave_bucket(self, question_id: str, record: QuestionRecord) -> None:
        bucket = self._candidates.get(record.accuracy)
        if bucket is not None and question_id in bucket:
            bucket.remove(question_id)
            if not bucket:
                del self._candidates[record.accuracy]
