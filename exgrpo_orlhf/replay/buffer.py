"""The replay buffer: latest accuracy per question, its correct trajectories, the retired set, the limits."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal

import numpy as np

from ..checks import Count, check_settings
from ..records import RolloutGroup, Trajectory, mean
from .difficulty import (
    LEVELS,
    DifficultyBuckets,
    Level,
    RetirementPolicy,
    as_fraction,
    is_above_mean,
    spread_levels,
    spread_of,
)
from .sampling import IndexedSet
from .stored import BufferEntry, Changes, QuestionRecord

TRAJECTORY_BYTES = 64  # counted for each trajectory besides its tokens


class ReplayBuffer:
    """Experience by question. `observe`, `store` and `retire` cost O(1) per question and trajectory.

    A *candidate* for replay has stored trajectories and a latest accuracy above 0. A question that falls to 0 stops
    being a candidate and keeps its trajectories; it is one again as soon as it is solved again.

    What is forgotten (None: no limit). Age counts from the last time a trajectory was sampled. A question that
    loses its last trajectory stops being a candidate and keeps its accuracy.

    per_question: trajectories kept of one question; the oldest of that question goes first
    max_age: steps; a trajectory whose log-probs are older goes when a step begins, before it can be replayed (with
        train.generate_ahead one step later, because the batch was planned before; there it is at least 2)
    max_bytes: of all trajectories, 8 bytes a token (of an episode 9, or 5 if it is not the policy's) and 64 a
        trajectory (Python's own overhead, some hundred bytes a trajectory, is not counted); the oldest goes first
    replays_unsolved: whether a question with stored trajectories whose latest accuracy is 0 is a candidate. Its fresh
        rollouts alone have no signal; a stored success gives it one. True is Algorithm 1 (s < K, 0 included).
    difficulty: what a question's bucket is: its latest 'accuracy', or the 'reward_spread' of its latest group, among
        those of its batch (`spread_levels`; paper, section 5.3: rewards between 0 and 1). With the latter a question is
        a candidate unless its latest rewards were all equal, and a trajectory whose reward is not above the mean of its
        question's latest group goes: its advantage would not be positive. Retirement still follows the accuracy
    counts_stored: whether the stored success beside n fresh rollouts of a replayed group counts in its question's
        accuracy, (k+1)/(n+1) (Algorithm 1, line 24): it is then never below 1/K. False: fresh rollouts only, k/n
    """

    def __init__(
        self,
        retirement: RetirementPolicy,
        *,
        per_question: Count | None = None,
        max_age: Count | None = None,
        max_bytes: Count | None = None,
        replays_unsolved: bool = False,
        counts_stored: bool = False,
        difficulty: Literal["accuracy", "reward_spread"] = "accuracy",
    ) -> None:
        """Raises ValueError for a limit below 1, or another difficulty."""
        check_settings(ReplayBuffer, locals())
        self.retirement = retirement
        self.per_question, self.max_age, self.max_bytes = per_question, max_age, max_bytes
        self.replays_unsolved, self.counts_stored = replays_unsolved, counts_stored
        self.by_spread = difficulty == "reward_spread"
        # To be read; changed by the methods below alone.
        self.records: dict[str, QuestionRecord] = {}
        self.retired: dict[str, int] = {}  # question id → step at which it retired, in that order
        self.candidates: dict[Fraction, IndexedSet] = {}  # one bucket per exact difficulty, none of them empty
        self._order: OrderedDict[int, str] = OrderedDict()  # sequence → question id, the oldest trajectory first
        self.n_with_trajectories = 0  # questions with stored trajectories, candidates or fallen to 0
        self.n_tokens = 0  # stored tokens, those of environments included
        self._array_bytes = 0
        self.changes = Changes()
        self.next_sequence = 0
        self.failed: ReplayBuffer | None = None  # the same of failures, where they are kept

    def keep_failures(self, per_question: int) -> None:
        """Keep failures too, in a pool of their own with this one's max_age and max_bytes. Nothing retires from it: a
        mastered question is what a failure's beginning is for."""
        never, age, size = RetirementPolicy(at_accuracy=None), self.max_age, self.max_bytes
        self.failed = ReplayBuffer(never, per_question=per_question, max_age=age, max_bytes=size)

    # -- what is in it ------------------------------------------------------------------------------------------------

    @property
    def n_candidates(self) -> int:
        return sum(map(len, self.candidates.values()))

    @property
    def n_trajectories(self) -> int:
        return len(self._order)

    @property
    def n_bytes(self) -> int:
        """What `max_bytes` counts."""
        return self._array_bytes + self.n_trajectories * TRAJECTORY_BYTES

    def trajectories(self, question_id: str) -> list[Trajectory]:
        """The stored trajectories of a question, oldest first. Raises KeyError for a question without a record."""
        return [stored.trajectory for stored in self.records[question_id].stored]

    def bucket_sizes(self, buckets: DifficultyBuckets) -> dict[Level, int]:
        """Candidates at each level of accuracy; unsolved: all that is stored, but fallen to 0. By spread: all that is
        stored."""
        sizes = dict.fromkeys(LEVELS, 0)
        if self.by_spread:
            return sizes | Counter(buckets.level(record.accuracy) for record in self.records.values() if record.stored)
        for accuracy, members in self.candidates.items():
            sizes[buckets.level(accuracy)] += len(members)
        sizes["unsolved"] += self.n_with_trajectories - self.n_candidates
        return sizes

    def metrics(self, buckets: DifficultyBuckets) -> dict[str, float]:
        """What is stored. `bucket_<level>`: `bucket_sizes`. Limits and retirement: only where bound."""
        metrics: dict[str, float] = {f"replay/bucket_{level}": n for level, n in self.bucket_sizes(buckets).items()}
        metrics["replay/trajectories"], metrics["replay/stored_tokens"] = self.n_trajectories, self.n_tokens
        if self.max_bytes is not None:
            metrics["replay/stored_bytes"] = self.n_bytes
        if self.by_spread:
            metrics["replay/spread_mean"] = mean([*self.changes.spreads.values()])
        if self.by_spread or (self.per_question, self.max_age, self.max_bytes) != (None, None, None):
            metrics["replay/evicted"] = len(self.changes.evicted)
        if self.retirement.at_accuracy is not None:
            metrics["replay/retired"] = len(self.retired)
        if self.failed is not None:
            metrics["replay/failures"] = self.failed.n_trajectories
        return {name: float(value) for name, value in metrics.items()}

    # -- what changes it ----------------------------------------------------------------------------------------------

    def advance(self, step: int) -> None:
        """Begin a step: trajectories that are too old for it go."""
        self.changes = Changes()
        if self.failed is not None:
            self.failed.advance(step)
        if self.max_age is not None:
            while self._order and self.records[self._oldest()].stored[0].trajectory.step < step - self.max_age:
                self._evict(self._oldest())

    def revisit(self, step: int, most: int, rng: np.random.Generator) -> list[str]:
        """Where `RetirementPolicy.revisits_every` is due: ids of ⌊share·retired⌋ questions, at most `most`, which are
        retired no longer and belong into this step's batch."""
        every, share = self.retirement.revisits_every, self.retirement.revisited_share
        if every is None or step % every:
            return []
        n = min(int(as_fraction(share) * len(self.retired)), most)
        retired = list(self.retired)
        chosen = [retired[i] for i in rng.choice(len(retired), n, replace=False).tolist()] if n else []
        for question_id in chosen:
            self._return(question_id)
        return chosen

    def observe(self, groups: Iterable[RolloutGroup], step: int, group_size: int | None = None) -> None:
        """Record each group's accuracy as the latest one of its question, 0 included, and retire the mastered.

        A group too few of whose rollouts could be graded leaves its question's record as it is.
        group_size: K, needed for the levels of 'reward_spread'
        Raises ValueError where it is needed and not given.
        """
        groups = list(groups)
        if self.failed is not None:
            self.failed.observe(groups, step)
        measured = [(group, accuracy) for group in groups if (accuracy := group.accuracy) is not None]
        self.changes.spreads = {group.question.id: spread_of(group) for group, _ in measured if self.by_spread}
        if self.by_spread and group_size is None:
            raise ValueError("the levels of 'reward_spread' need group_size, K")
        spreads = spread_levels(self.changes.spreads, group_size or 0)
        for group, accuracy in measured:
            question_id = group.question.id
            if self.counts_stored and group.planned_replay:
                accuracy = Fraction(group.correct + 1, group.graded + 1)
            if question_id in self.retired:
                continue
            self.record(question_id, accuracy, step, spreads.get(question_id))
            record = self.records[question_id]
            for entry in [*record.stored] if self.by_spread else ():
                if not is_above_mean(entry.trajectory.reward, group):
                    self._evict(question_id, next(i for i, one in enumerate(record.stored) if one is entry))
            record.streak = record.streak + 1 if self.retirement.is_mastered(accuracy) else 0
            if record.streak >= self.retirement.times_in_a_row:
                self.retire(question_id, step)

    def for_injection(self, group: RolloutGroup) -> list[Trajectory]:
        """What is stored for a graded group without a success or, by spread, with equal rewards: trajectories that give
        it a signal. Of others nothing is, and of a group too few of whose rollouts could be graded."""
        if group.question.id not in self.records or group.accuracy is None:
            return []
        stored = self.trajectories(group.question.id)
        if self.by_spread:
            return [one for one in stored if is_above_mean(one.reward, group)] if spread_of(group) == 0 else []
        return stored if group.accuracy == 0 else []

    def record(self, question_id: str, accuracy: Fraction, step: int, spread: Fraction | None = None) -> None:
        """Set a question's latest accuracy and, for 'reward_spread', level of spread. Raises ValueError for an accuracy
        outside [0, 1] or a retired question."""
        if not 0 <= accuracy <= 1:
            raise ValueError(f"question {question_id}: an accuracy lies in [0, 1], got {accuracy}")
        if question_id in self.retired:
            raise ValueError(f"question {question_id} is retired and takes no new accuracy")
        record = self.records.get(question_id)
        if record is None:
            self.records[question_id] = QuestionRecord(accuracy, step, spread=spread)
            return
        record.observed_step = step
        if (record.accuracy, record.spread) != (accuracy, spread):
            self._leave_bucket(question_id, record)
            record.accuracy, record.spread = accuracy, spread
            self._enter_bucket(question_id, record)

    def store(self, experience: Iterable[tuple[str, Trajectory]]) -> int:
        """Store correct trajectories of observed questions, by step; returns how many. Retired questions take none.

        A trajectory that is sampled again replaces its earlier copy and with it the older log-probs and step. What a
        limit then asks for is evicted, oldest first. Raises ValueError for a response that did not finish (it was cut
        off: correct, but nothing to imitate) and for a question that was never observed; what came before it is stored.
        """
        stored = 0
        # With train.generate_ahead a step's replaced groups are younger than its others; `advance` needs them in order.
        for question_id, trajectory in sorted(experience, key=lambda pair: pair[1].step):
            if question_id in self.retired:
                continue
            record = self.records.get(question_id)
            if record is None:
                raise ValueError(f"question {question_id} has no accuracy yet: observe its group before storing")
            if trajectory.finish != "stop":
                raise ValueError(f"question {question_id}: a truncated response is not stored")
            key = trajectory.key
            earlier = next((i for i, old in enumerate(record.stored) if old.key == key), None)
            self._add(question_id, record, BufferEntry(_owned(trajectory), key, self.next_sequence))
            if earlier is not None:
                self._forget(record, earlier)
            self.next_sequence += 1
            stored += 1
            self._cap_question(question_id)
        self._cap_bytes()
        return stored

    def retire(self, question_id: str, step: int) -> None:
        """Take a question out of the buffer, and forget its trajectories. Raises KeyError if it has no record."""
        record = self.records[question_id]
        self._leave_bucket(question_id, record)
        while record.stored:
            self._forget(record, -1)
        del self.records[question_id]
        self.retired[question_id] = step
        self.changes.retired.append(question_id)

    def restore(
        self,
        records: Iterable[tuple[str, QuestionRecord]],
        stored: Sequence[tuple[str, BufferEntry]],
        retired: Mapping[str, int],
        next_sequence: int,
    ) -> None:
        """Fill an empty buffer from a snapshot. Raises ValueError if it is not empty.

        records: without trajectories, in `canonical_order`; stored: (question id, trajectory) in any order
        """
        if self.records or self.retired:
            raise ValueError("only an empty buffer can be restored")
        self.records.update(records)
        self.retired.update(retired)
        for question_id, entry in sorted(stored, key=lambda pair: pair[1].sequence):
            self._add(question_id, self.records[question_id], entry, enter=False)
        for question_id, record in self.records.items():
            self._enter_bucket(question_id, record)
            self._cap_question(question_id)  # the snapshot may be another run's, with other limits
        self._cap_bytes()
        self.next_sequence = next_sequence

    def canonical_order(self) -> list[str]:
        """Question ids bucket by bucket, in each bucket's own order, then the others by id.

        Restoring in this order gives every bucket the order it had, so that a resumed sampler draws the same.
        """
        ordered = [member for accuracy in sorted(self.candidates) for member in self.candidates[accuracy]]
        seen = set(ordered)
        return ordered + sorted(question_id for question_id in self.records if question_id not in seen)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _cap_question(self, question_id: str) -> None:
        while self.per_question is not None and len(self.records[question_id].stored) > self.per_question:
            self._evict(question_id)

    def _cap_bytes(self) -> None:
        while self.max_bytes is not None and self.n_bytes > self.max_bytes:
            self._evict(self._oldest())

    def _add(self, question_id: str, record: QuestionRecord, stored: BufferEntry, enter: bool = True) -> None:
        record.stored.append(stored)
        self._order[stored.sequence] = question_id
        self.n_tokens += len(stored.trajectory)
        self._array_bytes += stored.trajectory.n_bytes
        if len(record.stored) == 1:
            self.n_with_trajectories += 1
            if enter:
                self._enter_bucket(question_id, record)

    def _forget(self, record: QuestionRecord, position: int) -> None:
        stored = record.stored.pop(position)
        del self._order[stored.sequence]
        self.n_tokens -= len(stored.trajectory)
        self._array_bytes -= stored.trajectory.n_bytes
        if not record.stored:
            self.n_with_trajectories -= 1

    def _oldest(self) -> str:
        """The question whose trajectory was stored first of all; it is its own first too."""
        return next(iter(self._order.values()))

    def _evict(self, question_id: str, position: int = 0) -> None:
        """Forget a question's oldest trajectory, or the one at this position."""
        record = self.records[question_id]
        self._forget(record, position)
        if not record.stored:
            self._leave_bucket(question_id, record)
        self.changes.evicted.append(question_id)

    def _return(self, question_id: str) -> None:
        del self.retired[question_id]
        self.changes.returned.append(question_id)

    def _difficulty(self, record: QuestionRecord) -> Fraction | None:
        """The bucket of a question that has trajectories; None: it is no candidate."""
        difficulty = record.spread if self.by_spread else record.accuracy or None
        return Fraction(0) if difficulty is None and self.replays_unsolved else difficulty

    def _enter_bucket(self, question_id: str, record: QuestionRecord) -> None:
        if record.stored and (difficulty := self._difficulty(record)) is not None:
            self.candidates.setdefault(difficulty, IndexedSet()).add(question_id)

    def _leave_bucket(self, question_id: str, record: QuestionRecord) -> None:
        if (difficulty := self._difficulty(record)) is None:
            return
        bucket = self.candidates.get(difficulty)
        if bucket is not None and question_id in bucket:
            bucket.remove(question_id)
            if not bucket:
                del self.candidates[difficulty]


def _owned(trajectory: Trajectory) -> Trajectory:
    """The trajectory with arrays of its own: a view would keep the whole array alive that it is a part of."""
    arrays = {name: getattr(trajectory, name) for name in ("token_ids", "behaviour_logprobs", "actions")}
    views = {name: array.copy() for name, array in arrays.items() if array is not None and array.base is not None}
    return replace(trajectory, **views) if views else trajectory
