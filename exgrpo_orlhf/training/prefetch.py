"""The batch that is generated one step ahead (train.generate_ahead = 1): made beside an update, kept in checkpoints.

    ahead/rollouts.parquet     one row a rollout, groups in the plan's order: question_id, replayed, token_ids, finish,
                               verdict, reward, sound, extracted, behaviour_logprobs, policy_step
    ahead/candidates.parquet   one row a stored trajectory of a replayed question, as it was when that was planned:
                               question_id, token_ids, behaviour_logprobs, reward, step, finish, sound

The checkpoint's manifest has their checksums. The rollouts are graded and have the version of the policy that sampled
them: a resumed run trains on them as they are, and draws no question twice and leaves none out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from ..engines.engine import LogProbs
from ..progress import Clock
from ..records import Grade, Question, Rollout, RolloutGroup, Trajectory
from ..replay import Plan

log = logging.getLogger(__name__)
FOLDER = "ahead"
T = TypeVar("T")
_ROLLOUTS = pa.schema(
    [
        ("question_id", pa.string()),
        ("replayed", pa.bool_()),
        ("token_ids", pa.large_list(pa.int32())),
        ("finish", pa.string()),
        ("verdict", pa.string()),
        ("reward", pa.float64()),  # null where it could not be graded
        ("sound", pa.bool_()),
        ("extracted", pa.string()),
        ("behaviour_logprobs", pa.large_list(pa.float32())),
        ("policy_step", pa.int64()),
    ]
)
_CANDIDATES = pa.schema(
    [
        ("question_id", pa.string()),
        ("token_ids", pa.large_list(pa.int32())),
        ("behaviour_logprobs", pa.large_list(pa.float32())),
        ("reward", pa.float64()),
        ("step", pa.int64()),
        ("finish", pa.string()),
        ("sound", pa.bool_()),
    ]
)


class Begun(NamedTuple):
    """A step's plan and its first rollouts, graded, in the plan's order."""

    plan: Plan
    groups: list[RolloutGroup]


def sampled_by(groups: Sequence[RolloutGroup], logprobs: Sequence[LogProbs], step: int) -> list[RolloutGroup]:
    """The groups with their rollouts' behaviour log-probs and policy version.

    logprobs: of all groups' rollouts, in order (`Engine.behaviour`); step: version of the policy that sampled them
    """
    left = iter(logprobs)
    return [
        replace(
            group,
            rollouts=tuple(replace(one, behaviour_logprobs=next(left), policy_step=step) for one in group.rollouts),
        )
        for group in groups
    ]


class Beside(Generic[T]):
    """A call that runs in a thread while the caller goes on, or synchronously.

    clock: which the call uses; error: what it has raised so far in its thread
    """

    def __init__(self, call: Callable[[], T], clock: Clock, in_thread: bool) -> None:
        self._call, self._found, self.clock = call, list[T](), clock
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="generate-ahead", daemon=True) if in_thread else None
        if self._thread:
            self._thread.start()
        else:
            self._found.append(call())

    def _run(self) -> None:
        try:
            self._found.append(self._call())
        except BaseException as error:
            self.error = error

    def result(self) -> T:
        """Waits for it. Raises what it raised."""
        if self._thread:
            self._thread.join()
        if self.error:
            raise self.error
        return self._found[0]


def log_error(coming: Beside[Any] | None) -> None:
    """Logs what the call beside a failed update has raised: one of the two is often the cause of the other."""
    if coming and coming.error:
        log.error("the batch that was generated beside this update failed too: %s", coming.error)


def save(begun: Begun, folder: Path) -> None:
    """Write the two tables into a new folder."""
    folder.mkdir()
    rollouts: list[list[Any]] = []
    for group in begun.groups:
        for one in group.rollouts:
            assert one.grade is not None  # a batch is graded when it is complete
            grade = [one.grade.verdict, one.grade.reward, one.grade.sound, one.grade.extracted]
            known = [one.behaviour_logprobs, one.policy_step]
            rollouts.append([group.question.id, group.replayed, one.token_ids, one.finish, *grade, *known])
    stored = [
        [question.id, *(getattr(one, name) for name in _CANDIDATES.names[1:])]
        for question, trajectories in begun.plan.candidates.items()
        for one in trajectories
    ]
    for name, rows, schema in (("rollouts", rollouts, _ROLLOUTS), ("candidates", stored, _CANDIDATES)):
        columns = zip(*rows, strict=True) if rows else [[]] * len(schema)
        arrays = [pa.array(list(column), kind) for column, kind in zip(columns, schema.types, strict=True)]
        pq.write_table(pa.table(arrays, schema=schema), folder / f"{name}.parquet", compression="zstd")


def load(folder: Path, question: Callable[[str], Question], step: int, beside: int) -> Begun:
    """What was saved.

    question: by its id; step: that trains on the batch; beside: fresh rollouts of a replayed question
    """
    groups: dict[str, RolloutGroup] = {}
    for asked, replayed, ids, finish, *grade, behaviour, version in _rows(folder / "rollouts.parquet"):
        rollout = Rollout(ids, finish, Grade(*grade), None, behaviour, version)
        before = groups[asked].rollouts if asked in groups else ()
        groups[asked] = RolloutGroup(question(asked), (*before, rollout), replayed)
    planned: dict[bool, list[Question]] = {True: [], False: []}
    for group in groups.values():
        planned[group.replayed].append(group.question)
    candidates: dict[Question, list[Trajectory]] = {one: [] for one in planned[True]}
    for asked, *values in _rows(folder / "candidates.parquet"):
        candidates[groups[asked].question].append(Trajectory(*values))
    return Begun(Plan(step, planned[False], planned[True], candidates, beside=beside), list(groups.values()))


def _rows(path: Path) -> list[tuple[Any, ...]]:
    columns = [
        [ids.copy() for ids in column.to_numpy()] if pa.types.is_large_list(column.type) else column.to_pylist()
        for column in pq.read_table(path).columns
    ]
    return list(zip(*columns, strict=True))
