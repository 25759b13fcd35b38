"""What the paper measures of a run besides accuracy: cost (Table 8), entropy of correct responses (Fig. 1c), a judge's
verdicts (F.2, G.2; Figs. 1b, 10), code blocks (Tables 11, 12), questions kept in a mini-batch (Fig. 9, Table 10).

Each is a table, a list of rows by column name. They need what a run leaves behind: metrics.jsonl, decisions.jsonl,
rollouts.jsonl and the newest checkpoint; no model.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import checkpoints
from ..json_lines import JsonLines
from ..questions.text import with_roles
from ..records import Question
from ..replay import DifficultyBuckets, ReplayBuffer, RetirementPolicy, snapshot
from ..replay.difficulty import LEVELS
from ..replay.dynamic_sampling import DynamicSampling
from ..sampling import Request, Sampler
from ..tracking.decisions import ID, DecisionLog
from ..tracking.metrics_log import MetricsLog

Table = list[dict[str, Any]]
CODE = "```"  # opens or closes a block of code
ADDED = ("plan", "score", "inject", "store")  # parts of a step that on-policy training does not need
JUDGED = "judged.jsonl"  # in the run's folder
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Response:
    """A response that a run has left behind.

    kind: 'fresh', of rollouts.jsonl, or 'stored', in the buffer of the newest checkpoint
    key: names it within the run; step: when it was sampled
    accuracy: of its question's group in that step; of a stored one, the question's latest
    entropy: mean token entropy, nats; of a stored one the mean of −log π_past, whose expectation that is
    whole: whether `text` is all of it
    """

    kind: str
    key: str
    step: int
    question: str
    prompt: str
    answer: str
    text: str
    accuracy: Fraction
    entropy: float
    correct: bool
    sound: bool | None
    whole: bool

    @property
    def has_code(self) -> bool:
        return CODE in self.text


def responses(
    run: Path, questions: Iterable[Question], decode: Callable[[npt.NDArray[np.int32]], str] | None
) -> list[Response]:
    """Those of rollouts.jsonl, and those stored in the newest checkpoint where there is one.

    questions: the run's, for the prompts of stored ones; decode: the text of a stored response, None without checkpoint
    Raises ValueError for a folder without logs, and SnapshotError for a damaged buffer.
    """
    logs = DecisionLog(run)
    if logs.rollouts.last_step < 0:
        raise ValueError(f"{run / 'rollouts.jsonl'}: no such log, or an empty one; is this a run's folder?")
    accuracies: dict[tuple[int, str], Fraction] = {}
    for row in logs.decisions.rows():
        table = row["questions"]
        columns = (table.get(name, ()) for name in ("id", "correct", "graded"))
        accuracies |= {(row["step"], q): Fraction(right, of) for q, right, of in zip(*columns, strict=True) if of}
    found = []
    for row in logs.rollouts.rows():
        for group in row["questions"]:
            accuracy = accuracies.get((row["step"], group["id"]))
            found += [
                Response(
                    kind="fresh",
                    key=f"{row['step']}/{group['id']}/{i}",
                    step=row["step"],
                    question=group["id"],
                    prompt=group["prompt"],
                    answer=group["answer"],
                    text="".join(one["text"]),
                    accuracy=accuracy,
                    entropy=one["entropy"],
                    correct=one["verdict"] == "correct",
                    sound=one["sound"],
                    whole=not one["left_out"],
                )
                for i, one in enumerate(group["responses"])
                if one["kind"] == "fresh" and accuracy is not None
            ]
    return found + (_stored(run, {question.id: question for question in questions}, decode) if decode else [])


def _stored(
    run: Path, questions: Mapping[str, Question], decode: Callable[[npt.NDArray[np.int32]], str]
) -> list[Response]:
    folder = max(checkpoints.find(run).items())[1] / "replay"
    buffer = ReplayBuffer(RetirementPolicy())
    snapshot.load(folder, buffer, snapshot.fingerprint(folder))
    found = []
    for question_id, record in buffer.records.items():
        question = questions.get(question_id)
        asked = ("", "") if question is None else (with_roles(question.prompt), question.answer_text)
        for one in record.stored:
            surprisal = -float(one.trajectory.behaviour_logprobs.mean(dtype=np.float64))
            about = (one.trajectory.step, question_id[:ID], *asked, decode(one.trajectory.token_ids), record.accuracy)
            found.append(Response("stored", one.key.hex()[:ID], *about, surprisal, True, one.trajectory.sound, True))
    return found


def cost(runs: Mapping[str, Path]) -> Table:
    """Table 8 of each run: seconds of a step, what replay adds to them, and what it stores. runs: by name

    `of other`: the mean step by that of the last run. Steps of evaluation and of the first step's start-up count as
    `time/step` has them. Raises ValueError for a folder without metrics.
    """
    table: Table = []
    for name, run in runs.items():
        rows = [row for row in MetricsLog(run / "metrics.jsonl").rows() if "time/step" in row]
        if not rows:
            raise ValueError(f"{run / 'metrics.jsonl'}: no step with 'time/step'; is this a run's folder?")
        seconds = np.array([row["time/step"] for row in rows])
        added = np.array([sum(row.get(f"time/{part}", 0.0) for part in ADDED) for row in rows])
        saved = max(checkpoints.find(run).items(), default=(0, None))[1]
        files = [] if saved is None else [path for path in (saved / "replay").rglob("*") if path.is_file()]
        table.append(
            {
                "run": name,
                "steps": len(rows),
                "mean s": seconds.mean(),
                "least s": seconds.min(),
                "greatest s": seconds.max(),
                "replay's part": added.sum() / seconds.sum(),
                **{f"{part} s": np.mean([row.get(f"time/{part}", 0.0) for row in rows]) for part in ADDED},
                "tokens a step": rows[-1]["cost/generated_tokens"] / rows[-1]["step"],
                "stored": int(rows[-1].get("replay/trajectories", 0)),
                "buffer MB": sum(path.stat().st_size for path in files) / 1e6,
            }
        )
    for row in table:
        row["of other"] = row["mean s"] / table[-1]["mean s"]
    return table


def entropy(found: Sequence[Response], buckets: DifficultyBuckets) -> Table:
    """Entropy of correct responses by the level of their question, of all, of sound ones and of lucky guesses."""
    cells: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for one in found:
        if one.correct:
            names = {None: ("all",), True: ("all", "sound"), False: ("all", "lucky")}[one.sound]
            for name in names:
                cells[one.kind, buckets.level(one.accuracy), name].append(one.entropy)
    return [
        {"kind": kind, "level": level, "reasoning": name, "responses": len(values), **_spread("entropy", values)}
        for (kind, level, name), values in sorted(cells.items(), key=lambda cell: _order(cell[0]))
    ]


def code(found: Sequence[Response], parts: int = 10) -> Table:
    """Share of responses with a block of code, by the step in which they were sampled, in `parts` equal parts."""
    last = max(one.step for one in found)
    width = -(-last // parts)
    cells: dict[tuple[int, str], list[bool]] = defaultdict(list)
    for one in found:
        if one.correct and (one.whole or one.has_code):
            cells[max(one.step - 1, 0) // width, one.kind].append(one.has_code)
    return [
        {
            "steps": f"{part * width + 1} to {min((part + 1) * width, last)}",
            "kind": kind,
            "responses": len(values),
            "with code": float(np.mean(values)),
        }
        for (part, kind), values in sorted(cells.items())
    ]


def kept(run: Path, sampling: DynamicSampling, steps_per_batch: int) -> Table:
    """Questions that are left in the loss of a mini-batch, where others are masked or replaced for their difficulty.

    Mean rewards are taken for accuracies, as they are where rewards are 0 and 1. Raises ValueError for a folder without
    a log.
    """
    counts = []
    for row in DecisionLog(run).decisions.rows():
        table = row["questions"]
        groups = zip(table.get("as", ()), table.get("correct", ()), table.get("graded", ()), strict=True)
        in_batch = [(right, of) for kind, right, of in groups if kind != "left_out"]
        inside = [sampling.in_range([1.0] * right + [0.0] * (of - right)) for right, of in in_batch]
        counts.append((len(in_batch), sum(inside)))
    if not counts:
        raise ValueError(f"{run / 'decisions.jsonl'}: no such log, or an empty one; is this a run's folder?")
    batch, left = np.array(counts).T / steps_per_batch
    return [{"steps": len(counts), "questions": batch.mean(), **_spread("kept", left), "least": left.min()}]


# -- the judge --------------------------------------------------------------------------------------------------------


def judge(
    run: Path, found: Sequence[Response], prompt: str, model: str, sampler: Sampler, sampling: Mapping[str, Any]
) -> None:
    """Asks a model about each correct response whose whole text and prompt are known, and appends what it says to
    RUN/judged.jsonl at once. What is there already, of the same model for the same prompt, is not asked again.

    prompt: the user's own text, with {question}, {answer} and {response}; model: its name; sampling: of the Request
    Raises ValueError for a prompt without {response}, and EngineLost.
    """
    if "{response}" not in prompt:
        raise ValueError("the judge's prompt has no {response}; it may have {question} and {answer} too")
    judged, digest = JsonLines(run / JUDGED), _digest(model, prompt)
    judged.cut(len(judged.keys))  # without the torn line of a killed process
    done = {row["key"] for row in judged.read() if row["prompt"] == digest}
    asked = [one for one in found if one.correct and one.whole and one.prompt and one.key not in done]
    requests = []
    for one in asked:
        values = {"{question}": one.prompt, "{answer}": one.answer, "{response}": one.text}
        text = "".join(values.get(part, part) for part in re.split(r"(\{\w+\})", prompt))
        requests.append(Request((), messages=(("user", text),), key=(one.key,), **sampling))
    log.info("%d responses to judge, %d are judged already", len(asked), len(done))
    for portion in sampler.sample(requests):
        for i, (said,) in portion:
            judged.add({"key": asked[i].key, "prompt": digest, "said": getattr(said, "text", "")})
        log.info("%d are judged in all", len(judged.keys))


def verdicts(
    run: Path, found: Sequence[Response], prompt: str, model: str, words: tuple[str, str], buckets: DifficultyBuckets
) -> Table:
    """Verdicts by kind, level and whether there is code, with the entropy of valid and of invalid responses.

    words: (valid, invalid): the last of them in the judge's answer, as a whole word, is its verdict
    """
    digest = _digest(model, prompt)
    either = re.compile(rf"\b({'|'.join(map(re.escape, words))})\b", re.IGNORECASE)
    said = {
        row["key"]: either.findall(row["said"]) for row in JsonLines(run / JUDGED).read() if row["prompt"] == digest
    }
    cells: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in found:
        if one.key in said:
            verdict = said[one.key][-1].lower() if said[one.key] else "unclear"
            name = {words[0].lower(): "valid", words[1].lower(): "invalid"}.get(verdict, verdict)
            where = one.kind, buckets.level(one.accuracy), "with code" if one.has_code else "without"
            cells[where][name].append(one.entropy)
    table = []
    for (kind, level, with_code), by_verdict in sorted(cells.items(), key=lambda cell: _order(cell[0])):
        valid, invalid = by_verdict["valid"], by_verdict["invalid"]
        share = len(valid) / (len(valid) + len(invalid)) if valid or invalid else float("nan")
        counts = {name: len(by_verdict[name]) for name in ("valid", "invalid", "unclear")}
        means = {f"entropy {name}": np.mean(by_verdict[name] or [np.nan]) for name in ("valid", "invalid")}
        table.append({"kind": kind, "level": level, "code": with_code, **counts, "share valid": share, **means})
    return table


def _digest(model: str, prompt: str) -> str:
    return hashlib.blake2b(f"{model}\n{prompt}".encode(), digest_size=8).hexdigest()


def _spread(name: str, values: Sequence[float] | npt.NDArray[np.float64]) -> dict[str, float]:
    """The mean, and the standard deviation where there are two."""
    return {name: float(np.mean(values)), "sd": float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")}


def _order(cell: tuple[str, str, str]) -> tuple[str, int, str]:
    """By kind, then from hard to solved."""
    return cell[0], [str(level) for level in LEVELS].index(cell[1]), cell[2]
