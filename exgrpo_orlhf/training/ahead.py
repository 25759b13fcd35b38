"""The batch that is generated one step ahead (train.generate_ahead): made beside an update, kept in checkpoints.

    ahead/rollouts.parquet     one row a rollout, groups in the plan's order: question_id, replayed, token_ids, finish,
                               verdict, reward, sound, extracted, logs, behaviour_logprobs, policy_step, actions,
                               seed, sampler_logprobs, given
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
from ..grader.grade import Grade
from ..records import Question, Rollout, RolloutGroup, Trajectory
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
        ("sampler_logprobs", pa.large_list(pa.float32())),
        ("given", pa.int32()),
    ]
)
_OF_ROLLOUT = ("token_ids", "finish", *_ROLLOUTS.names[9:])
_OF_GRADE = ("verdict", "reward", "sound", "extracted")


class BatchAhead(NamedTuple):
    """A step's plan and its first rollouts, graded, in the plan's order."""

    plan: Plan
    groups: list[RolloutGroup]


def sampled_by(groups: Sequence[RolloutGroup], logprobs: Sequence[LogProbs], step: int) -> list[RolloutGroup]:
    """The groups with their rollouts' behaviour log-probs and policy version.

    logprobs: of all groups' rollouts, in order (`Engine.behaviour_logprobs`); step: version of the sampling policy
    """
    rest = iter(logprobs)
    return [
        replace(
            group,
            rollouts=tuple(
                replace(rollout, behaviour_logprobs=next(rest), policy_step=step) for rollout in group.rollouts
            ),
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


def save(batch: BatchAhead, folder: Path) -> None:
    """Write the two tables into a new folder."""
    folder.mkdir()
    rollouts: list[dict[str, Any]] = []
    for group in batch.groups:
        for rollout in group.rollouts:
            grade = rollout.grade
            assert grade is not None  # a batch is graded when it is complete
            logs = {"logs": grade.logs, "parts": grade.parts} if grade.parts else grade.logs
            of_group = {"question_id": group.question.id, "replayed": group.planned_replay, "logs": json.dumps(logs)}
            of_rollout = {name: getattr(rollout, name) for name in _OF_ROLLOUT}
            rollouts.append({**of_group, **of_rollout, **{name: getattr(grade, name) for name in _OF_GRADE}})
    candidates = [(question.id, trajectory) for question, stored in batch.plan.stored.items() for trajectory in stored]
    schema = snapshot.trajectory_schema(trajectory for _, trajectory in candidates)
    snapshot.write_table(rollouts, _ROLLOUTS, folder / "rollouts.parquet")
    snapshot.write_table((snapshot.row_of(*pair) for pair in candidates), schema, folder / "candidates.parquet")


def load(folder: Path, question: Callable[[str], Question], step: int, rollouts_per_replayed: int) -> BatchAhead:
    """What was saved.

    question: by its id; step: that trains on the batch; rollouts_per_replayed: as in `Plan`
    """
    groups: dict[str, RolloutGroup] = {}
    for row in snapshot.read_rows(pq.read_table(folder / "rollouts.parquet")):
        logged = json.loads(row["logs"])
        pairs = logged if isinstance(logged, dict) else {"logs": logged}
        logs: dict[str, Any] = {name: tuple(map(tuple, values)) for name, values in pairs.items()}
        grade = Grade(**{name: row[name] for name in _OF_GRADE}, **logs)
        rollout = Rollout(**{name: row[name] for name in _OF_ROLLOUT}, grade=grade)
        question_id = row["question_id"]
        earlier = groups[question_id].rollouts if question_id in groups else ()
        groups[question_id] = RolloutGroup(question(question_id), (*earlier, rollout), row["replayed"])
    planned: dict[bool, list[Question]] = {True: [], False: []}
    for group in groups.values():
        planned[group.planned_replay].append(group.question)
    replayed: dict[Question, list[Trajectory]] = {}
    for row in snapshot.read_rows(pq.read_table(folder / "candidates.parquet")):
        replayed.setdefault(groups[row["question_id"]].question, []).append(snapshot.trajectory_of(row))
    plan = Plan(step, planned[False], planned[True], replayed, rollouts_per_replayed=rollouts_per_replayed)
    return BatchAhead(plan, list(groups.values()))
