"""What the page shows: the log of decisions and the replay buffer, as columns over questions, events and replays."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..questions.question_files import RATE
from ..questions.text import with_roles
from ..records import Question, Trajectory
from ..replay import ReplayBuffer
from ..tracking.decisions import ID, DecisionLog

KINDS = ("fresh", "replayed", "injected", "left_out", "retired", "returned", "evicted", "continued")
STORED = ("replayed", "injected")  # kinds of groups that have a stored row of their question
COUNTS = ("correct", "graded", "lucky", "checked", "stored")
REPLAY = ("age", "tokens", "entropy", "others", "surprisal", "log_weight", "of", "place", "sound")
SHORT = 160  # characters of a prompt in the list of questions
TEXTS = 4_000_000  # characters of stored responses, at most; the most replayed questions come first
LOGGED = 8_000_000  # characters of logged rollouts, at most, their log-probs counted as 8; the newest come first


@dataclass
class History:
    """A run's experience. Questions are numbered; `events` and `replays` are tables, stored by column.

    ids: 12 digits each, prompts and gold answers (their first characters; '' where unknown), by question
    measured: by question, the share of right responses before the run, where `prepare_data.py --measure` has put it
    events: question `q`, `step`, `kind` (number in KINDS), `correct` of `graded`, `lucky` of `checked`, `stored`, and
        `replay` (its row in `replays`, or −1); in the order of steps. Each further stored row of a question in a step,
        and each that stands in another question's group, is a 'replayed' event of its own, with `graded` 0
    entropies: of the fresh rollouts of the questions trained on in a step, nats
    buckets: by step, the candidates by level, and the retired
    spreads: by step, of the rewards of its groups; only with difficulty 'reward_spread'
    accuracy, retired: by question; −1 where the buffer has none
    stored: trajectories of the buffer by question; distinct: how different they are (`diversity`), −1 with fewer than
        two of them
    buffer: `age`, `tokens` and `surprisal` of every stored trajectory
    logged: rows of rollouts.jsonl by question; texts: stored responses by question
    step: the last one of the log; buffer_step: of the buffer, None where there is none
    """

    steps: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    measured: list[float | None] = field(default_factory=list)
    events: dict[str, list[int]] = field(default_factory=dict)
    replays: dict[str, list[Any]] = field(default_factory=dict)
    entropies: list[list[float]] = field(default_factory=list)
    buckets: list[dict[str, int]] = field(default_factory=list)
    spreads: list[list[float]] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    retired: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    distinct: list[float] = field(default_factory=list)
    buffer: dict[str, list[float]] = field(default_factory=dict)
    logged: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    texts: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    buffer_step: int | None = None

    @property
    def step(self) -> int:
        return self.steps[-1]


def read(
    run: Path,
    buffer: ReplayBuffer,
    buffer_step: int | None,
    questions: Sequence[Question],
    decode: Callable[[npt.NDArray[np.int32]], str],
) -> History:
    """The history of a run.

    buffer: the replay buffer at `buffer_step`; an empty one with None
    questions: those of the run, as far as they are known; decode: the text of a stored response
    Raises ValueError for a folder without a log of decisions, and for a corrupt line.
    """
    log, history = DecisionLog(run), History()
    if log.decisions.last_step < 0:
        raise ValueError(f"{run / 'decisions.jsonl'}: no such log, or an empty one; is this a run's folder?")
    numbers: dict[str, int] = {}

    def number(question_id: str) -> int:
        return numbers.setdefault(question_id[:ID], len(numbers))

    history.events = {name: [] for name in ("q", "step", "kind", *COUNTS, "replay")}
    history.replays = {name: [] for name in ("step", *REPLAY)}
    for row in log.decisions.rows():
        _add(history, row, number)
    for row in log.rollouts.rows():
        for question in row["questions"]:
            history.logged.setdefault(number(question["id"]), []).append({"step": row["step"], **question})
    for question_id in (*buffer.records, *buffer.retired):
        number(question_id)
    history.ids = list(numbers)
    prompts = {history.ids[q]: rows[-1]["prompt"][:SHORT] for q, rows in history.logged.items()}
    prompts |= {question.id[:ID]: with_roles(question.prompt)[:SHORT] for question in questions}
    history.prompts = [prompts.get(question_id, "") for question_id in history.ids]
    golds = {question.id[:ID]: question.answer_text[:SHORT] for question in questions}
    history.answers = [golds.get(question_id, "") for question_id in history.ids]
    rates = {question.id[:ID]: question.meta.get(RATE) for question in questions}
    found = map(rates.get, history.ids)
    history.measured = [float(rate) if isinstance(rate, int | float) else None for rate in found]
    logged = [(q, row) for q, of_question in history.logged.items() for row in of_question]
    room, history.logged = LOGGED, {}
    for q, row in sorted(logged, key=lambda pair: -pair[1]["step"]):  # the newest, as many as fit
        room -= len(row["prompt"]) + sum(20 * len(response["text"]) for response in row["responses"])
        if room < 0:
            break
        history.logged.setdefault(q, []).append(row)
    history.buffer_step = buffer_step
    _read_buffer(history, buffer, buffer_step or 0, number, decode)
    return history


def _add(history: History, row: dict[str, Any], number: Callable[[str], int]) -> None:
    """Add a row of decisions.jsonl: in a step questions return, are sampled and replayed, lose trajectories, retire."""
    step, table, replays, events = row["step"], row["questions"], row["replays"], history.events
    history.steps.append(step)
    history.buckets.append({**row["buckets"], "retired": row["retired_in_all"]})
    first = len(history.replays["step"])
    rows_of: dict[str, list[int]] = {}  # in `replays`, by question
    for i, question_id in enumerate(replays.get("id", ())):
        rows_of.setdefault(question_id, []).append(first + i)
    history.replays["step"] += [step] * len(replays.get("id", ()))
    for name in REPLAY:
        history.replays[name] += replays.get(name, ())
    history.entropies.append([entropy for entropy in table.get("entropy", ()) if entropy is not None])
    history.spreads.append([spread for spread in table.get("spread", ()) if spread is not None])
    nothing = {**dict.fromkeys(COUNTS, 0), "replay": -1}

    def add(question_id: str, kind: str, **fields: int) -> None:
        event = {"q": number(question_id), "step": step, "kind": KINDS.index(kind)}
        for name, value in {**event, **nothing, **fields}.items():
            events[name].append(value)

    for question_id in row["returned"]:
        add(question_id, "returned")
    for i, question_id in enumerate(table.get("id", ())):
        values, kind = {name: table[name][i] for name in COUNTS}, table["as"][i]
        rows = rows_of.get(question_id) if kind in STORED else None  # else its stored rows stand in other groups
        add(question_id, kind, **values, replay=rows.pop(0) if rows else -1)
    for question_id, rows in rows_of.items():
        for replay in rows:
            add(question_id, "replayed", replay=replay)
    for kind in ("evicted", "retired"):
        for question_id in row[kind]:
            add(question_id, kind)


def _read_buffer(
    history: History,
    buffer: ReplayBuffer,
    step: int,
    number: Callable[[str], int],
    decode: Callable[[npt.NDArray[np.int32]], str],
) -> None:
    n = len(history.ids)
    history.accuracy, history.retired, history.stored, history.distinct = [-1.0] * n, [-1] * n, [0] * n, [-1.0] * n
    history.buffer = {"age": [], "tokens": [], "surprisal": []}
    for question_id, at in buffer.retired.items():
        history.retired[number(question_id)] = at
    of_question: dict[int, list[Trajectory]] = {}
    for question_id, record in buffer.records.items():
        q, trajectories = number(question_id), [stored.trajectory for stored in record.stored]
        history.accuracy[q], history.stored[q] = round(float(record.accuracy), 4), len(trajectories)
        if trajectories:
            of_question[q] = trajectories
            history.distinct[q] = round(diversity([trajectory.token_ids for trajectory in trajectories]), 3)
        history.buffer["age"] += [step - trajectory.step for trajectory in trajectories]
        history.buffer["tokens"] += map(len, trajectories)
        history.buffer["surprisal"] += map(_surprisal, trajectories)
    replays = Counter(q for q, replay in zip(history.events["q"], history.events["replay"], strict=True) if replay >= 0)
    room = TEXTS
    for q in sorted(of_question, key=lambda q: (q not in history.logged, -replays[q])):
        for trajectory in of_question[q]:
            text = decode(trajectory.token_ids)
            room -= len(text)
            if room < 0:
                return
            about = {"step": trajectory.step, "tokens": len(trajectory), "sound": trajectory.sound}
            history.texts.setdefault(q, []).append({**about, "surprisal": _surprisal(trajectory), "text": text})


def _surprisal(trajectory: Trajectory) -> float:
    return round(-float(trajectory.behaviour_logprobs.mean(dtype=np.float64)), 4)


def diversity(responses: Sequence[npt.NDArray[np.int32]]) -> float:
    """How different responses are: 0, all have the same pairs of neighbouring tokens; 1, none is in two of them; −1 for
    fewer than two responses.

    With n responses, D pairs in all of them together and S the sum of each one's own: (D/S − 1/n) / (1 − 1/n).
    """
    n = len(responses)
    if n < 2:
        return -1.0
    pairs = [set(zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True)) for ids in responses]
    total = sum(map(len, pairs))
    return max((len(set().union(*pairs)) / total - 1 / n) / (1 - 1 / n), 0.0) if total else 0.0


def forgotten_by_step(history: History) -> list[int]:
    """For each step, the questions whose latest group had no success although an earlier one had."""
    solved: dict[int, bool] = {}  # question → whether its latest group had a success; only once solved
    forgotten = dict.fromkeys(history.steps, 0)  # step → by how many questions the count changes
    columns = ("q", "step", "kind", "correct", "graded")
    for q, step, kind, correct, graded in zip(*(history.events[name] for name in columns), strict=True):
        if kind <= KINDS.index("left_out") and graded and (q in solved or correct):
            forgotten[step] += int(not correct) - int(not solved.get(q, True))
            solved[q] = bool(correct)
    return list(itertools.accumulate(forgotten.values()))


def shares_by_step(history: History, values: Sequence[int], of: Sequence[int], steps: Sequence[int]) -> list[float]:
    """Per step of the log, the share sum(values) / sum(of); NaN where `of` is 0."""
    at = np.searchsorted(history.steps, steps)
    top, bottom = (np.bincount(at, weights, len(history.steps)) for weights in (values, of))
    return [float(a / b) if b else float("nan") for a, b in zip(top, bottom, strict=True)]
