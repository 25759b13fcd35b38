"""What the paper measures of a run besides accuracy, for measure.py: cost (Table 8), entropy of correct responses (Fig.
1c), a judge's verdicts (F.2, G.2; Figs. 1b, 10), code blocks (Tables 11, 12), questions kept in a mini-batch (Fig. 9,
Table 10).

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

from exgrpo_orlhf import checkpoints
from exgrpo_orlhf.io import tokenizer_file
from exgrpo_orlhf.io.json_lines import JsonLines
from exgrpo_orlhf.questions.special_tokens import decoder
from exgrpo_orlhf.questions.text import with_roles
from exgrpo_orlhf.records import Question, Trajectory
from exgrpo_orlhf.replay import DifficultyBuckets, snapshot
from exgrpo_orlhf.replay.difficulty import LEVELS
from exgrpo_orlhf.replay.plan import DynamicSampling
from exgrpo_orlhf.sampling import Request, Sampler
from exgrpo_orlhf.tracking.decisions import ID, DecisionLog
from exgrpo_orlhf.tracking.metrics_log import MetricsLog

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
    prompt: empty where the question is not known; whole: whether `text` is all of it
    """

    kind: str
    key: str
    step: int
    prompt: str
    answer: str
    text: str
    accuracy: Fraction
    entropy: float
    correct: bool
    sound: bool | None
    whole: bool

    @property
    def judged_as(self) -> str:
        """The key with the text: a run that was resumed may have sampled another at the same place."""
        return f"{self.key} {hashlib.blake2b(self.text.encode(errors='replace'), digest_size=8).hexdigest()}"

    @property
    def has_code(self) -> bool:
        return CODE in self.text


def responses(
    run: Path, questions: Iterable[Question], is_correct: Callable[[Trajectory], bool] = lambda _: True
) -> list[Response]:
    """Those of rollouts.jsonl that continue nothing, and those stored in the newest checkpoint where there is one.

    questions: the run's, for the prompts of stored ones; is_correct: of a stored one, where failures are stored too
    Raises ValueError for a folder without logs, and SnapshotError for a damaged buffer.
    """
    logs = DecisionLog(run)
    if logs.rollouts.last_step < 0:
        raise ValueError(f"{run / 'rollouts.jsonl'}: no such log, or an empty one; is this a run's folder?")
    accuracies: dict[tuple[int, str], Fraction] = {}
    for row in logs.decisions.rows():
        table = row["questions"]
        columns = (table.get(name, ()) for name in ("id", "correct", "graded"))
        accuracies |= {(row["step"], q): Fraction(right, n) for q, right, n in zip(*columns, strict=True) if n}
    fresh = [
        Response(
            kind="fresh",
            key=f"{row['step']}/{group['id']}/{i}",
            step=row["step"],
            prompt=group["prompt"],
            answer=group["answer"],
            text="".join(logged["text"]),
            accuracy=accuracies[row["step"], group["id"]],
            entropy=logged["entropy"],
            correct=logged["verdict"] == "correct",
            sound=logged["sound"],
            whole=not logged["left_out"],
        )
        for row in logs.rollouts.rows()
        for group in row["questions"]
        for i, logged in enumerate(group["responses"])
        if logged["kind"] == "fresh" and not logged.get("given") and (row["step"], group["id"]) in accuracies
    ]
    saved = checkpoints.find(run)
    by_id = {question.id: question for question in questions}
    return fresh + (_stored(max(saved.items())[1], by_id, is_correct) if saved else [])


def _stored(
    checkpoint: Path, questions: Mapping[str, Question], is_correct: Callable[[Trajectory], bool]
) -> list[Response]:
    decode, found = decoder(tokenizer_file.load(checkpoint)), []
    for question_id, record in snapshot.read(checkpoint / "replay").records.items():
        question = questions.get(question_id)
        for trajectory, key, _ in record.stored:
            found.append(
                Response(
                    kind="stored",
                    key=key.hex()[:ID],
                    step=trajectory.step,
                    prompt="" if question is None else with_roles(question.prompt),
                    answer="" if question is None else question.answer_text,
                    text=decode(trajectory.token_ids),
                    accuracy=record.accuracy,
                    entropy=-float(trajectory.behaviour_logprobs.mean(dtype=np.float64)),
                    correct=is_correct(trajectory),
                    sound=trajectory.sound,
                    whole=True,
                )
            )
    return found


def cost(runs: Mapping[str, Path]) -> Table:
    """Table 8 of each run: seconds of a step, what replay adds to them, and what it stores. runs: by name

    `of other`: the mean step by that of the last run. A step's seconds are those of training, without evaluation.
    Raises ValueError for a folder without metrics.
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
    for response in found:
        if response.correct:
            names = {None: ("all",), True: ("all", "sound"), False: ("all", "lucky")}[response.sound]
            for name in names:
                cells[response.kind, buckets.level(response.accuracy), name].append(response.entropy)
    return [
        {"kind": kind, "level": level, "reasoning": name, "responses": len(values), **_spread("entropy", values)}
        for (kind, level, name), values in sorted(cells.items(), key=lambda cell: _order(cell[0]))
    ]


def code(found: Sequence[Response], parts: int = 10) -> Table:
    """Share of correct responses with a block of code, by the step in which they were sampled, in `parts` equal parts.

    A response counts if its whole text is known, whether or not code is visible in the ends. left out: the others
    """
    last = max((response.step for response in found), default=0)
    width = -(-last // parts) or 1
    cells: dict[tuple[int, str], list[Response]] = defaultdict(list)
    for response in found:
        if response.correct:
            cells[max(response.step - 1, 0) // width, response.kind].append(response)
    table = []
    for (part, kind), correct in sorted(cells.items()):
        with_code = [response.has_code for response in correct if response.whole]
        table.append(
            {
                "steps": f"{part * width + 1} to {min((part + 1) * width, last)}",
                "kind": kind,
                "responses": len(with_code),
                "with code": float(np.mean(with_code or [np.nan])),
                "left out": len(correct) - len(with_code),
            }
        )
    return table


def kept(run: Path, sampling: DynamicSampling, steps_per_batch: int) -> Table:
    """Questions that are left in the loss of a mini-batch, where others are masked or replaced for their difficulty.

    Mean rewards are taken for accuracies, as they are where rewards are 0 and 1. Raises ValueError for a folder without
    a log.
    """
    counts = []
    for row in DecisionLog(run).decisions.rows():
        table = row["questions"]
        columns = (table.get(name, ()) for name in ("as", "entropy", "correct", "graded"))
        # A continued group that was left out is logged as continued, and has no entropy.
        out = lambda kind, entropy: kind == "left_out" or (kind == "continued" and entropy is None)
        in_batch = [(right, n) for kind, entropy, right, n in zip(*columns, strict=True) if not out(kind, entropy)]
        inside = [sampling.in_range([1.0] * right + [0.0] * (total - right)) for right, total in in_batch]
        counts.append((len(in_batch), sum(inside)))
    if not counts:
        raise ValueError(f"{run / 'decisions.jsonl'}: no such log, or an empty one; is this a run's folder?")
    batch, remaining = np.array(counts).T / steps_per_batch
    return [{"steps": len(counts), "questions": batch.mean(), **_spread("kept", remaining), "least": remaining.min()}]


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
    asked = [r for r in found if r.correct and r.whole and r.prompt and r.judged_as not in done]
    requests = []
    for response in asked:
        values = {"{question}": response.prompt, "{answer}": response.answer, "{response}": response.text}
        text = "".join(values.get(part, part) for part in re.split(r"(\{\w+\})", prompt))
        requests.append(Request((), messages=(("user", text),), key=(response.key,), **sampling))
    log.info("%d responses to judge, %d are judged already", len(asked), len(done))
    for portion in sampler.sample(requests):
        for i, (said,) in portion:
            judged.add({"key": asked[i].judged_as, "prompt": digest, "said": getattr(said, "text", "")})
        log.info("%d are judged in all", len(judged.keys))


def verdicts(
    run: Path, found: Sequence[Response], prompt: str, model: str, words: tuple[str, str], buckets: DifficultyBuckets
) -> Table:
    """Verdicts by kind, level and whether there is code, with the entropy of valid and of invalid responses.

    words: (valid, invalid): the last of them in the judge's answer, as a whole word, is its verdict
    """
    digest = _digest(model, prompt)
    either = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, words))})(?!\w)", re.IGNORECASE)
    said = {
        row["key"]: either.findall(row["said"]) for row in JsonLines(run / JUDGED).read() if row["prompt"] == digest
    }
    cells: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for response in found:
        if (found_words := said.get(response.judged_as)) is not None:
            verdict = found_words[-1].lower() if found_words else "unclear"
            name = {words[0].lower(): "valid", words[1].lower(): "invalid"}.get(verdict, verdict)
            where = response.kind, buckets.level(response.accuracy), "with code" if response.has_code else "without"
            cells[where][name].append(response.entropy)
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
