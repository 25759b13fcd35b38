"""A log of decisions and a buffer of very many questions, for the page of a run's experience."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np

from exgrpo_orlhf.io.json_lines import StepLog
from exgrpo_orlhf.records import Question, Trajectory
from exgrpo_orlhf.replay import ReplayBuffer, RetirementPolicy


def large(folder: Path, n: int, steps: int, per_step: int) -> tuple[list[Question], ReplayBuffer]:
    """A log of `steps` steps with 2 × per_step questions each, and a buffer with two trajectories of each of n."""
    draw, buffer = np.random.default_rng(0), ReplayBuffer(RetirementPolicy())
    questions = [Question.make("synthetic", f"What is {i} times {7 * i % 1013}, modulo 97?", "1") for i in range(n)]
    for question in questions:
        buffer.record(question.id, Fraction(int(draw.integers(0, 8)), 8), steps)
        lengths = draw.integers(20, 40, 2)
        of_question = [
            Trajectory(draw.integers(1, 30, length).astype(np.int32), -draw.random(length).astype(np.float32), 1.0, 5)
            for length in lengths
        ]
        buffer.store((question.id, one) for one in of_question)
    log = StepLog(folder / "decisions.jsonl", compact=True)
    for step in range(1, steps + 1):
        ids = [questions[i].id[:12] for i in draw.choice(n, 2 * per_step, replace=False)]
        counts = {
            name: draw.integers(0, 3, 2 * per_step).tolist() for name in ("correct", "checked", "lucky", "stored")
        }
        table = {"id": ids, "as": ["fresh"] * per_step + ["replayed"] * per_step, "graded": [8] * 2 * per_step}
        values = {
            name: draw.random(per_step).round(4).tolist() for name in ("entropy", "others", "surprisal", "log_weight")
        }
        counts_of_replays = {name: draw.integers(1, 40, per_step).tolist() for name in ("age", "tokens", "of", "place")}
        sizes = {"unsolved": 5, "hard": step, "medium": 2 * step, "easy": step, "solved": 0}
        log.add(
            {
                "step": step,
                "questions": {**table, **counts, "entropy": draw.random(2 * per_step).round(4).tolist()},
                "replays": {"id": ids[per_step:], **values, **counts_of_replays, "sound": [None] * per_step},
                **{"retired": ids[:2], "returned": [], "evicted": ids[-3:], "buckets": sizes, "retired_in_all": step},
            }
        )
    return questions, buffer
