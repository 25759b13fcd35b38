"""The batch that is generated one step ahead (train.generate_ahead): made beside an update, kept in checkpoints.

    ahead/rollouts.parquet     one row a rollout, groups in the plan's order: question_id, replayed, token_ids, finish,
                               verdict, reward, sound, extracted, logs, behaviour_logprobs, policy_step, actions,
                               seed
    ahead/candidates.parquet   one row a stored trajectory of a replayed question, as it was when that was planned:
                               question_id, token_ids, behaviour_logprobs, reward, step, finish, sound, actions,
                               seed

The checkpoint's manifest has their checksums. The rollouts are graded and have the version of the policy that sampled
them: a resumed run trains on them as they are, and draws no question twice and leaves none out.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from ..engines.engine import LogProbs
from ..records import Grade, Question, Rollout, RolloutGroup, Trajectory
from ..replay import Plan, snapshot

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
        ("logs", pa.string()),  # JSON; with several rewards an object of logs and parts
        ("behaviour_logprobs", pa.large_list(pa.float32())),
        ("policy_step", pa.int64()),
        ("actions", pa.large_list(pa.bool_())),
        ("seed", pa.uint64()),
    ]
)


class PrefetchedBatch(NamedTuple):
    """A step's plan and its first rollouts, graded, in the plan's order."""

    plan: Plan
    groups: list[RolloutGroup]


def sampled_by(groups: Sequence[RolloutGroup], logprobs: Sequence[LogProbs], step: int) -> list[RolloutGroup]:
    """The groups with their rollouts' behaviour log-probs and policy version.

    logprobs: of all groups' rollouts, in order (`Engine.behaviour_logprobs`); step: version of the sampling policy
    """
    left = iter(logprobs)
    return [
        replace(
            group,
            rollouts=tuple(replace(one, behaviour_logprobs=next(left), policy_step=step) for one in group.rollouts),
        )
        for group in groups
    ]


def start(call: Callable[[], T], in_thread: bool) -> Future[T]:
    """Make a call in a daemon thread, for which a program that ends does not wait; or at once, and raise at once."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    if in_thread:
        threading.Thread(target=run, name="generate-ahead", daemon=True).start()
    else:
        future.set_result(call())
    return future


def save(batch: PrefetchedBatch, folder: Path) -> None:
    """Write the two tables into a new folder."""
    folder.mkdir()
    rollouts: list[list[Any]] = []
    for group in batch.groups:
        for one in group.rollouts:
            assert one.grade is not None  # a batch is graded when it is complete
            grade = [one.grade.verdict, one.grade.reward, one.grade.sound, one.grade.extracted]
            logs, parts = one.grade.logs, one.grade.parts
            grade.append(json.dumps({"logs": logs, "parts": parts} if parts else logs))
            policy = [one.behaviour_logprobs, one.policy_step, one.actions, one.seed]
            rollouts.append([group.question.id, group.planned_replay, one.token_ids, one.finish, *grade, *policy])
    candidates = [(question, one) for question, own in batch.plan.stored.items() for one in own]
    schema = snapshot.trajectory_schema(one for _, one in candidates)
    stored = [[question.id, *snapshot.values_of(one, schema)] for question, one in candidates]
    snapshot.write_table(rollouts, _ROLLOUTS, folder / "rollouts.parquet")
    snapshot.write_table(stored, schema, folder / "candidates.parquet")


def load(folder: Path, question: Callable[[str], Question], step: int, rollouts_per_replayed: int) -> PrefetchedBatch:
    """What was saved.

    question: by its id; step: that trains on the batch; rollouts_per_replayed: as in `Plan`
    """
    groups: dict[str, RolloutGroup] = {}
    for question_id, planned_replay, ids, finish, *grade, logs, behaviour, version, actions, seed in snapshot.read_rows(
        pq.read_table(folder / "rollouts.parquet")
    ):
        pairs = own if isinstance(own := json.loads(logs), dict) else {"logs": own}
        of_grade: dict[str, Any] = {name: tuple(map(tuple, each)) for name, each in pairs.items()}
        rollout = Rollout(ids, finish, replace(Grade(*grade), **of_grade), None, behaviour, version, actions, seed)
        earlier = groups[question_id].rollouts if question_id in groups else ()
        groups[question_id] = RolloutGroup(question(question_id), (*earlier, rollout), planned_replay)
    planned: dict[bool, list[Question]] = {True: [], False: []}
    for group in groups.values():
        planned[group.planned_replay].append(group.question)
    replayed: dict[Question, list[Trajectory]] = {one: [] for one in planned[True]}
    for question_id, *values in snapshot.read_rows(pq.read_table(folder / "candidates.parquet")):
        replayed[groups[question_id].question].append(snapshot.trajectory_of(values))
    plan = Plan(step, planned[False], planned[True], replayed, rollouts_per_replayed=rollouts_per_replayed)
    return PrefetchedBatch(plan, list(groups.values()))
