"""What each step decided, and a few of its rollouts as text: `decisions.jsonl` and `rollouts.jsonl` (docs/explore.md).

Both are written by the training loop, whichever engine does the work, and are cut back as `metrics.jsonl` is.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..io.files import write
from ..io.json_lines import StepLog
from ..questions.text import with_roles
from ..records import MixedBatch, Rollout, RolloutGroup, Row, Trajectory, mean
from ..replay.difficulty import Level
from ..replay.injection import Choice
from ..replay.stored import Changes

ID = 12  # hexadecimal digits of a question's id, and of a trajectory's key: 48 bits
TEXTS_EVERY = 5  # steps from one row of rollouts.jsonl to the next; the first step has one too
RESPONSES = 4  # logged of a group's fresh rollouts, and of a question's stored trajectories
TOKENS = 512  # logged of a response: the first half and the last
PROMPT = 2000  # characters logged of a prompt
SHOWN = 400  # characters shown of a prompt or a response
COLUMNS = ["step", "prompt", "response", "reward", "verdict", "answer"]  # of the table
log = logging.getLogger(__name__)
Floats = npt.NDArray[np.float32]
Decode = Callable[[npt.NDArray[np.int32]], str]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step, when it has ended.

    sampled: all groups, graded, those that were left out of the batch too
    choices: by question id, for each replayed question and each candidate for late injection
    entropies, policy, behaviour: of each row of the flattened batch, as `UpdateStats` has them
    stored: the experience of the step, by question id and trajectory
    buckets: candidates by level
    """

    step: int
    sampled: Sequence[RolloutGroup]
    batch: MixedBatch
    choices: Mapping[str, Choice]
    entropies: Sequence[float]
    policy: Sequence[Floats]
    behaviour: Sequence[Floats]
    stored: Sequence[tuple[str, Trajectory]]
    retired: Mapping[str, int]
    changes: Changes
    buckets: Mapping[Level, int]

    def groups(self) -> list[tuple[RolloutGroup, list[tuple[int, Row]]]]:
        """The batch's groups, each with its rows and their positions in the flattened batch."""
        rows = iter(enumerate(self.batch.flat_rows()))
        return [
            (g, [next(rows) for _ in members]) for g, members in zip(self.batch.groups, self.batch.rows, strict=True)
        ]


class DecisionLog:
    """The two files of a run."""

    def __init__(self, run: Path, show_every: int | None = None) -> None:
        """show_every: as train.show_every. Raises ValueError for a file with a corrupt line, naming file and line."""
        self.table, self._show_every = run / "responses.json", show_every
        self.decisions = StepLog(run / "decisions.jsonl", compact=True)
        self.rollouts = StepLog(run / "rollouts.jsonl", compact=True)

    def append(self, step: StepRecord, decode: Decode) -> None:
        """Write a step's decisions, and in the first and every `TEXTS_EVERY`-th step, and where a response is shown,
        some of its rollouts. Raises OSError."""
        self.decisions.add(decisions(step))
        shown = self._show_every is not None and (step.step == 1 or step.step % self._show_every == 0)
        if shown or step.step == 1 or step.step % TEXTS_EVERY == 0:
            row = {"step": step.step, "questions": texts(step, decode)}
            self.rollouts.add(row)
            if shown:
                log.info("step %d, responses to a question:\n%s", step.step, "\n".join(_shown(row)))

    def write_table(self) -> Path:
        """The rollouts that are logged, as a table that MLflow shows, in a file of the run's folder."""
        rows = [cells for row in self.rollouts.rows() for cells in _cells(row)]
        write(self.table, json.dumps({"columns": COLUMNS, "data": rows}))
        return self.table

    def cut_back(self, step: int) -> None:
        """Drop the rows after a checkpoint's step, and log a warning if some before it are gone."""
        self.decisions.cut_back(step)
        self.rollouts.cut_back(step)
        self.decisions.warn_if_missing(range(1, step + 1))
        self.rollouts.warn_if_missing(range(TEXTS_EVERY, step + 1, TEXTS_EVERY))

    def sync(self) -> None:
        """Put the rows on the disk."""
        self.decisions.sync()
        self.rollouts.sync()


def decisions(step: StepRecord) -> dict[str, Any]:
    """A row of `decisions.jsonl`: two tables of columns, `questions` and `replays`, and what changed in the buffer."""
    stored = Counter(question_id for question_id, _ in step.stored if question_id not in step.retired)
    in_batch = {group.question.id: rows for group, rows in step.groups()}
    questions, replays = [], []
    continues = any(group.given for group in step.sampled)
    for group in step.sampled:
        rows = in_batch.get(group.question.id, [])
        grades = [rollout.grade for rollout in group.rollouts if rollout.grade is not None and rollout.grade.correct]
        fresh = [step.entropies[i] for i, row in rows if row.trajectory is None]
        again = [i for i, row in rows if row.trajectory is not None]
        kind = _kind(group, rows)
        questions.append(
            {
                "id": group.question.id[:ID],
                "as": kind if rows or group.given else "left_out",
                "rollouts": len(group.rollouts),
                "graded": group.graded,
                "correct": group.correct,
                "checked": sum(grade.sound is not None for grade in grades),
                "lucky": sum(grade.sound is False for grade in grades),
                "stored": stored[group.question.id],
                "entropy": round(mean(fresh), 4) if fresh else None,
            }
        )
        if continues:
            questions[-1]["given"] = group.given
        if spreads := step.changes.spreads:
            spread = spreads.get(group.question.id)  # None: too few of its rollouts could be graded
            questions[-1]["spread"] = None if spread is None else round(spread, 4)
        replays += [_replay(step, rows, i) for i in again]
    return {
        "step": step.step,
        "questions": _columns(questions),
        "replays": _columns(replays),
        "retired": [question_id[:ID] for question_id in step.changes.retired],
        "returned": [question_id[:ID] for question_id in step.changes.returned],
        "evicted": [question_id[:ID] for question_id in step.changes.evicted],
        "buckets": dict(step.buckets),
        "retired_in_all": len(step.retired),
    }


def _kind(group: RolloutGroup, rows: Sequence[tuple[int, Row]]) -> str:
    if group.given:
        return "continued"
    has_stored = any(row.trajectory is not None and row.question.id == group.question.id for _, row in rows)
    return "replayed" if group.planned_replay else "injected" if has_stored else "fresh"


def _choice(step: StepRecord, rows: Sequence[tuple[int, Row]], row: Row) -> Choice:
    """What a stored row was chosen from; of added rows, those of its question. rows: of its group"""
    if (choice := step.choices.get(row.question.id)) is not None:
        return choice
    stored = [one.trajectory for _, one in rows if one.trajectory and one.question.id == row.question.id]
    return Choice(stored, (), next(n for n, one in enumerate(stored) if one is row.trajectory))


def _replay(step: StepRecord, rows: Sequence[tuple[int, Row]], i: int) -> dict[str, Any]:
    """What the log says of a stored row. rows: of its group; i: its position in the flattened batch"""
    row = dict(rows)[i]
    choice = _choice(step, rows, row)
    chosen = choice.trajectory
    others = [result.entropy for n, result in enumerate(choice.measured) if n != choice.place]
    log_weights = step.policy[i].astype(np.float64) - step.behaviour[i]
    return {
        "id": row.question.id[:ID],
        "trajectory": chosen.key.hex()[:ID],
        "of": len(choice.stored),
        "place": choice.place,
        "age": step.step - chosen.step,
        "tokens": len(chosen),
        "entropy": round(float(step.entropies[i]), 4),
        "others": round(mean(others), 4) if others else None,
        "surprisal": round(-float(step.behaviour[i].mean(dtype=np.float64)), 4),
        "log_weight": round(float(log_weights.mean()), 4),
        "log_weight_max": round(float(log_weights.max()), 4),
        "sound": chosen.sound,
    }


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def texts(step: StepRecord, decode: Decode) -> list[dict[str, Any]]:
    """The questions of a row of `rollouts.jsonl`: one that is fresh in this step, one with a stored trajectory, and one
    whose rollouts continue a stored response.

    Of each kind it is the one whose id is the smallest: ids are hashes, and the same few questions are then logged
    again and again, so that their answers can be compared over time.
    """
    groups = step.groups()
    with_stored = [pair for pair in groups if any(row.trajectory is not None for _, row in pair[1])]
    continued = [pair for pair in groups if pair[0].given]
    fresh = [pair for pair in groups if not pair[0].given and all(row.trajectory is None for _, row in pair[1])]
    kinds = [min(kind, key=lambda pair: pair[0].question.id) for kind in (fresh, with_stored, continued) if kind]
    return [_texts(step, group, rows, decode) for group, rows in kinds]


def _texts(step: StepRecord, group: RolloutGroup, rows: list[tuple[int, Row]], decode: Decode) -> dict[str, Any]:
    question = group.question
    prompt = with_roles(question.prompt)
    responses = []
    fresh = [(i, row.response) for i, row in rows if isinstance(row.response, Rollout)]
    correct = [pair for pair in fresh if pair[1].grade is not None and pair[1].grade.correct]
    others = [pair for pair in fresh if pair[1].grade is not None and not pair[1].grade.correct]
    kept = correct[: max(RESPONSES // 2, RESPONSES - len(others))]  # half of each kind, as far as there are
    for i, rollout in [*kept, *others[: RESPONSES - len(kept)]]:
        assert rollout.grade is not None  # or it is in neither
        grade = {"verdict": rollout.grade.verdict, "sound": rollout.grade.sound, "finish": rollout.finish}
        now = {"entropy": round(float(step.entropies[i]), 4), "now": step.policy[i]}
        responses.append(
            {
                "kind": "fresh",
                **grade,
                **({"given": rollout.given} if rollout.given else {}),
                **_graded(rollout, rollout.grade.correct),
                **_response(rollout, now, decode),
            }
        )
    own = [(i, row) for i, row in rows if row.trajectory is not None and row.question.id == question.id]
    if own:
        stored, measured, place = _choice(step, rows, own[0][1])
        positions = {id(row.trajectory): i for i, row in own}  # of those that are trained on
        chosen_first = sorted(range(len(stored)), key=lambda n: n != place)
        for n in sorted(chosen_first[:RESPONSES]):
            entry = stored[n]
            values: dict[str, Any] = {"then": entry.behaviour_logprobs}
            if (at := positions.get(id(entry))) is not None:
                values |= {"entropy": round(float(step.entropies[at]), 4), "now": step.policy[at]}
            elif measured:
                values |= {"entropy": round(measured[n].entropy, 4), "now": measured[n].logprobs}
            about = {"chosen": at is not None, "age": step.step - entry.step, "trajectory": entry.key.hex()[:ID]}
            about = {"sound": entry.sound, **_graded(entry, entry.correct), **about}
            responses.append({"kind": "stored", **about, **_response(entry, values, decode)})
    return {
        "id": question.id[:ID],
        "as": _kind(group, rows),
        "prompt": prompt[:PROMPT],
        "answer": question.answer_text[:PROMPT],
        "responses": responses,
    }


def _cells(row: Mapping[str, Any]) -> list[list[Any]]:
    """COLUMNS of each fresh response in a row of `rollouts.jsonl`, of the longest ones without their middle."""
    cells = []
    for question in row["questions"]:
        for response in (each for each in question["responses"] if each["kind"] == "fresh"):
            middle = [" … "] * bool(response["left_out"])
            text = "".join([*response["text"][: TOKENS // 2], *middle, *response["text"][TOKENS // 2 :]])
            reward = response.get("reward", float(response["verdict"] == "correct"))
            cells.append([row["step"], question["prompt"], text, reward, response["verdict"], question["answer"]])
    return cells


def _shown(row: Mapping[str, Any]) -> list[str]:
    """The first question of a row with its gold answer, and a right and a wrong response beside their rewards, if there
    are."""
    cells = [each for each in _cells(row) if each[1] == _cells(row)[0][1]]
    lines = [f"  {_line(prompt)}  (gold {gold})" for _, prompt, *_, gold in cells[:1]]
    return [*lines, *(f"  reward {each[3]:g}, {each[4]}: {_line(each[2])}" for each in cells[:1] + cells[1:][-1:])]


def _line(text: str) -> str:
    """In one line, the beginning and the end."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN // 2]} … {line[-SHOWN // 2 :]}"


def _graded(response: Rollout | Trajectory, correct: bool) -> dict[str, Any]:
    """The reward, where it is not 1 for a success and 0 for another response, and of which rewards it is the sum."""
    parts = {"rewards": {name: round(reward, 4) for name, reward in response.parts}} if response.parts else {}
    total = response.reward
    return parts if total is None or total == float(correct) else {"reward": round(total, 4), **parts}


def _response(response: Rollout | Trajectory, values: Mapping[str, Any], decode: Decode) -> dict[str, Any]:
    """Text by token, with log-probs in nats (None: a token that the policy did not sample); of a long response without
    the tokens (`left_out`) in its middle."""
    ids, actions = response.token_ids, response.learned
    out = len(ids) - TOKENS if len(ids) > TOKENS else 0
    parts = [slice(0, TOKENS // 2), slice(len(ids) - TOKENS // 2, None)] if out else [slice(None)]
    row: dict[str, Any] = {"tokens": len(ids), "left_out": out}
    row["text"] = [piece for part in parts for piece in pieces(ids[part], decode)]
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            of_tokens = np.full(len(ids), np.nan)
            of_tokens[slice(None) if actions is None else actions] = value
            value = [None if np.isnan(x) else round(float(x), 2) for part in parts for x in of_tokens[part]]
        row[name] = value
    return row


def pieces(ids: npt.NDArray[np.int32], decode: Decode) -> list[str]:
    """The text of each token. Together they are the text of all; special tokens are ''.

    A token is decoded with what precedes it, because its text may depend on that (a space at the beginning of a word).
    Where several tokens make one character, the last of them has it and the others are ''.
    """
    parts: list[str] = []
    begin = complete = 0  # tokens from `begin` are decoded together; those before `complete` are in `parts`
    before = ""
    for end in range(1, len(ids) + 1):
        text = decode(ids[begin:end])
        if text.endswith("\ufffd") and end < len(ids) and end - complete < 4:  # UTF-8 has up to 4 bytes a character
            parts.append("")
            continue
        parts.append(text[len(before) :])
        begin, complete = complete, end
        before = decode(ids[begin:end])
    return parts
