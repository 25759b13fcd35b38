"""The replay buffer: latest accuracy per question, its correct trajectories, the retired set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from .retirement import RetirementPolicy
from .trajectory import RolloutGroup, Trajectory


class IndexedSet:
    """A set of question ids that also knows its members by position: add, remove and draw by index are all O(1).

    The order is part of the state: a sampler draws by index, so a resumed run must see the same order.
    """

    def __init__(self, members: Iterable[str] = ()) -> None:
        self._members = list(members)
        self._position = {member: i for i, member in enumerate(self._members)}

    def add(self, member: str) -> None:
        if member not in self._position:
            self._position[member] = len(self._members)
            self._members.append(member)

    def remove(self, member: str) -> None:
        """Raises KeyError if absent. The last member takes the freed position."""
        position = self._position.pop(member)
        last = self._members.pop()
        if last != member:
            self._members[position] = last
            self._position[last] = position

    def __getitem__(self, position: int) -> str:
        return self._members[position]

    def __contains__(self, member: object) -> bool:
        return member in self._position

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


@dataclass(slots=True)
class QuestionRecord:
    """What the buffer knows of one question. trajectories: by identity, oldest first."""

    accuracy: Fraction
    observed_step: int
    trajectories: dict[bytes, Trajectory] = field(default_factory=dict)


class ReplayBuffer:
    """Experience by question. `observe`, `store`, `retire` and `remove` cost O(1) per question.

    A *candidate* for replay has stored trajectories and a latest accuracy above 0. A question that falls to 0 stops
    being a candidate and keeps its trajectories; it is one again as soon as it is solved again.
    """

    def __init__(self, retirement: RetirementPolicy) -> None:
        self.retirement = retirement
        self._records: dict[str, QuestionRecord] = {}
        self._retired: dict[str, int] = {}  # question id → step at which it retired
        self._candidates: dict[Fraction, IndexedSet] = {}  # one bucket per exact accuracy
        self._with_trajectories = self._trajectories = self._tokens = 0

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
        return self._trajectories

    @property
    def n_tokens(self) -> int:
        """Stored response tokens."""
        return self._tokens

    def trajectories(self, question_id: str) -> list[Trajectory]:
        """The stored trajectories of a question, oldest first. Raises KeyError for a question without a record."""
        return list(self._records[question_id].trajectories.values())

    # -- what changes it ----------------------------------------------------------------------------------------------

    def observe(self, groups: Iterable[RolloutGroup], step: int) -> None:
        """Record each group's accuracy as the latest one of its question, 0 included, and retire the mastered.

        A group too few of whose rollouts could be graded leaves its question's record as it is. A retired question
        stays retired whatever it does later.
        """
        for group in groups:
            accuracy = group.accuracy
            if accuracy is None or group.question.id in self._retired:
                continue
            self.record(group.question.id, accuracy, step)
            if self.retirement.retires(accuracy):
                self.retire(group.question.id, step)

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
        self._leave_bucket(question_id, record)
        record.accuracy, record.observed_step = accuracy, step
        self._enter_bucket(question_id, record)

    def store(self, experience: Iterable[tuple[str, Trajectory]]) -> int:
        """Store correct trajectories of observed questions; returns how many. Retired questions take none.

        A trajectory that is sampled again replaces its earlier copy and with it the older log-probs and step.
        Raises ValueError for a response that did not finish (it was cut off: correct, but nothing to imitate) and for
        a question that was never observed.
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
            self._with_trajectories += not record.trajectories
            known = record.trajectories.pop(key, None)
            record.trajectories[key] = trajectory
            if known is None:
                self._trajectories += 1
                self._tokens += len(trajectory)
            self._enter_bucket(question_id, record)
            stored += 1
        return stored

    def retire(self, question_id: str, step: int) -> None:
        """Take a question out of the buffer for good. Raises KeyError if it has no record."""
        self.remove(question_id)
        self._retired[question_id] = step

    def remove(self, question_id: str) -> None:
        """Forget a question and its trajectories. Raises KeyError if it has no record."""
        record = self._records.pop(question_id)
        self._leave_bucket(question_id, record)
        self._with_trajectories -= bool(record.trajectories)
        self._trajectories -= len(record.trajectories)
        self._tokens -= sum(map(len, record.trajectories.values()))

    def restore(self, records: Iterable[tuple[str, QuestionRecord]], retired: Mapping[str, int]) -> None:
        """Fill an empty buffer from a snapshot; records come in `canonical_order`. Raises ValueError if not empty."""
        if self._records or self._retired:
            raise ValueError("only an empty buffer can be restored")
        for question_id, record in records:
            self._records[question_id] = record
            self._with_trajectories += bool(record.trajectories)
            self._trajectories += len(record.trajectories)
            self._tokens += sum(map(len, record.trajectories.values()))
            self._enter_bucket(question_id, record)
        self._retired.update(retired)

    def canonical_order(self) -> list[str]:
        """Question ids bucket by bucket, in each bucket's own order, then the others by id.

        Restoring in this order gives every bucket the order it had, so that a resumed sampler draws the same.
        """
        ordered = [member for accuracy in sorted(self._candidates) for member in self._candidates[accuracy]]
        seen = set(ordered)
        return ordered + sorted(question_id for question_id in self._records if question_id not in seen)

    def _enter_bucket(self, question_id: str, record: QuestionRecord) -> None:
        if record.accuracy > 0 and record.trajectories:
            self._candidates.setdefault(record.accuracy, IndexedSet()).add(question_id)

    def _leave_bucket(self, question_id: str, record: QuestionRecord) -> None:
        bucket = self._candidates.get(record.accuracy)
        if bucket is not None and question_id in bucket:
            bucket.remove(question_id)
            if not bucket:
                del self._candidates[record.accuracy]
