#!/usr/bin/env python
"""What a step of experience management costs, with ten thousand, a hundred thousand and a million stored questions.

Goal, for the median step: plan + observe + store (128 questions, K = 8, ρ = 0.5, trajectories of 48 tokens, 4 stored a
question, nothing retires) takes at most 10 times as long as hashing and copying the step's new trajectories alone
(measured in the same run) at 10^5 stored questions, and at most twice that time at 10^6. With 2,000 tokens a stored
trajectory takes at most 9 bytes a token, everything counted. The official code's question sampling alone takes 4.2 s at
2·10^4.

Also reported: the same with trajectories of 2,000 tokens, per kilobyte stored; writing and loading a snapshot, per
gigabyte of tokens and log-probs; the paper's largest buffer. All times are processor time. Everything runs on the real
classes; filling a million questions takes most of the script's two minutes (and 4 GB).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from command_line import finish, make_parser

from exgrpo_orlhf.grader.grade import Grade
from exgrpo_orlhf.questions.fresh import FreshQuestions
from exgrpo_orlhf.records import Question, Rollout, RolloutGroup, Trajectory
from exgrpo_orlhf.replay import (
    DifficultyBuckets,
    QuestionSampler,
    ReplayBuffer,
    ReplayMixer,
    RetirementPolicy,
    snapshot,
)
from exgrpo_orlhf.replay.mixer import MixerParts

B, K, STORED = 128, 8, 4
GOAL_RATIO, GOAL_GROWTH, GOAL_BYTES = 10.0, 2.0, 9.0
# Table 8 of the paper (arXiv 2510.02245v2): 202,011 trajectories take 1.77 GB, 8,762 bytes each. It states no lengths;
# assumed is the mean that an id and a log-prob of 4 bytes each give, 1,095 tokens.
PAPER_TRAJECTORIES, PAPER_BYTES, PAPER_LENGTH = 202_011, 1.77e9, 1095
RIGHT, WRONG = Grade("correct", 1.0), Grade("wrong", 0.0)


class Load:
    """A filled buffer and the work of its steps: random tokens, random grades, everything else real."""

    def __init__(self, questions: int, length: int) -> None:
        self.rng = np.random.default_rng(0)
        self.length, self.made = length, 0
        self.questions = [Question(f"{i:032x}", "p", "a", "benchmark") for i in range(questions)]
        self.fresh = FreshQuestions(self.questions, np.random.default_rng(1))
        self.buffer = ReplayBuffer(RetirementPolicy(at_accuracy=None), per_question=STORED)
        parts = MixerParts(QuestionSampler(), DifficultyBuckets(), K, B, self.rng)
        self.mixer = ReplayMixer(parts, start_at_accuracy=None)
        pool = self.rng.integers(0, 150_000, (1024, length), dtype=np.int32)
        self.pool = [(ids, self.rng.normal(-1, 0.5, length).astype(np.float32)) for ids in pool]
        for i, question in enumerate(self.questions):
            self.buffer.record(question.id, Fraction(1 + i % 7, K), 0)
            self.buffer.store([(question.id, self.trajectory(0)) for _ in range(STORED)])

    def trajectory(self, step: int) -> Trajectory:
        """Tokens that are in no other one."""
        ids, logprobs = self.pool[self.made % len(self.pool)]
        ids = ids.copy()
        ids[:2] = divmod(self.made, 100_000)
        self.made += 1
        return Trajectory(ids, logprobs.copy(), 1.0, step)

    def step(self, step: int) -> dict[str, float]:
        """Milliseconds of each part. What an engine does in between is made up outside the clock."""
        plan, planning = timed(self.mixer.plan, self.fresh, self.buffer, step)
        groups, experience = [], []
        for question in (*plan.fresh, *plan.replayed):
            replayed = question in plan.stored
            grades = [RIGHT if x < 0.5 else WRONG for x in self.rng.random(K - replayed)]
            rollouts = tuple(Rollout(self.pool[0][0], "stop", grade) for grade in grades)
            groups.append(RolloutGroup(question, rollouts, replayed))
            experience += [(question.id, self.trajectory(step)) for grade in grades if grade is RIGHT]
        _, observing = timed(self.buffer.observe, groups, step)
        _, storing = timed(self.buffer.store, experience)
        _, copying = timed(hash_and_copy, [one for _, one in experience])
        parts = {"plan": planning, "observe": observing, "store": storing}
        return {**parts, "step": sum(parts.values()), "copying": copying}


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """What the function returns, and its milliseconds of processor time."""
    began = time.process_time()
    result = function(*arguments)
    return result, (time.process_time() - began) * 1000


def hash_and_copy(trajectories: list[Trajectory]) -> None:
    for one in trajectories:
        _ = one.key, one.token_ids.copy(), one.behaviour_logprobs.copy()


def measure(questions: int, length: int, steps: int) -> dict[str, float]:
    load, filling = timed(Load, questions, length)
    times = [load.step(step) for step in range(1, steps + 6)][5:]
    figures = {name: statistics.median(row[name] for row in times) for name in times[0]}
    figures |= {
        "questions": questions,
        "length": length,
        "step_max": max(row["step"] for row in times),
        "stored_kB_per_step": B * K / 2 * length * 8 / 1000,
        "trajectories": load.buffer.n_trajectories,
        "fill_s": filling / 1000,
    }
    figures["ratio"] = figures["step"] / figures["copying"]
    figures["us_per_kB"] = figures["step"] * 1000 / figures["stored_kB_per_step"]
    if questions < 10**6:
        figures |= measure_snapshot(load.buffer)
    return figures


def measure_snapshot(buffer: ReplayBuffer) -> dict[str, float]:
    gigabytes = buffer.n_tokens * 8 / 1e9
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "replay"
        _, saving = timed(snapshot.save, buffer, path, "benchmark")
        empty = ReplayBuffer(RetirementPolicy(at_accuracy=None))
        loaded, loading = timed(snapshot.load, path, empty, "benchmark")
    assert loaded.n_tokens == buffer.n_tokens
    return {"save_s_per_GB": saving / 1000 / gigabytes, "load_s_per_GB": loading / 1000 / gigabytes}


def memory(questions: int, length: int) -> tuple[float, float]:
    """Bytes that a trajectory and a question take, everything counted: from buffers of two sizes."""
    taken = []
    for stored in (STORED, 2 * STORED):
        load = Load(1, length)
        ids = [f"{i:032x}" for i in range(questions)]
        buffer = ReplayBuffer(RetirementPolicy(at_accuracy=None))
        tracemalloc.start()
        for i, question_id in enumerate(ids):
            buffer.record(question_id, Fraction(1 + i % 7, K), 0)
            buffer.store([(question_id, load.trajectory(0)) for _ in range(stored)])
        taken.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    per_trajectory = (taken[1] - taken[0]) / (len(ids) * STORED)
    return per_trajectory, taken[0] / len(ids) - STORED * per_trajectory


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=40, help="measured steps (default 40)")
    arguments, began = parser.parse_args(), (time.perf_counter(), time.process_time())
    sizes = [300, 1000, 3000] if arguments.small else [10**4, 10**5, 10**6]  # stored questions
    rows = [measure(n, 48, arguments.steps) for n in sizes]
    rows.append(measure(sizes[0], 2000, arguments.steps))
    rows.append(measure(sizes[0] if arguments.small else PAPER_TRAJECTORIES // STORED, PAPER_LENGTH, arguments.steps))
    names = ("questions", "length", "plan", "observe", "store", "step", "step_max", "copying", "ratio", "us_per_kB")
    print("milliseconds of processor time, median of a step")
    print("  ".join(f"{name:>10}" for name in names))
    for row in rows:
        print("  ".join(f"{row[name]:>10,.2f}" for name in names))
    _, middle, largest, long, paper = rows
    few = 100 if arguments.small else 2000
    taken = {length: memory(few, length) for length in (48, PAPER_LENGTH, 2000)}
    for length, (per_trajectory, per_question) in taken.items():
        print(
            f"a trajectory of {length:,} tokens takes {per_trajectory:,.0f} bytes, {per_trajectory / length:.2f} a "
            f"token; a question besides {per_question:.0f}"
        )
    per_trajectory, per_question = taken[PAPER_LENGTH]
    size = PAPER_TRAJECTORIES * (per_trajectory + per_question / STORED)
    print(
        f"the paper's {PAPER_TRAJECTORIES:,} trajectories, of {PAPER_LENGTH:,} tokens: {size / 1e9:.2f} GB, "
        f"{size / PAPER_BYTES:.2f} times the paper's; a step {paper['step']:.1f} ms"
    )
    for row in (middle, long, paper):
        print(
            f"snapshot of {row['trajectories']:,} trajectories of {row['length']:,} tokens, per GB of tokens and "
            f"log-probs: {row['save_s_per_GB']:.1f} s to write, {row['load_s_per_GB']:.1f} s to load"
        )
    growth, bytes_per_token = largest["step"] / middle["step"], taken[2000][0] / 2000
    met = bool(middle["ratio"] <= GOAL_RATIO and growth <= GOAL_GROWTH and bytes_per_token <= GOAL_BYTES)
    wall, processor = time.perf_counter() - began[0], time.process_time() - began[1]
    figures = {
        "rows": rows,
        "wall_s": wall,
        "processor_s": processor,
        "bytes_per_trajectory": {length: taken[length][0] for length in taken},
        "paper_buffer_bytes": size,
        "growth": growth,
        "met": met or arguments.small,
    }
    summary = (
        f"a step at {middle['questions']:,} questions takes {middle['ratio']:.2f} times the hashing and copying of "
        f"what it stores (goal {GOAL_RATIO:g}), {growth:.2f} times that at {largest['questions']:,} (goal "
        f"{GOAL_GROWTH:g}); {bytes_per_token:.2f} bytes a token at 2,000 tokens (goal {GOAL_BYTES:g}); "
        f"{processor:.0f} s of processor time in {wall:.0f} s"
    )
    return finish(arguments, figures, summary)


if __name__ == "__main__":
    sys.exit(main())
