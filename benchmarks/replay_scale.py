#!/usr/bin/env python
"""What a step of experience management costs, with ten thousand, a hundred thousand and a million stored questions.

Goal, for the median step: plan + observe + store (128 questions, K = 8, ρ = 0.5, trajectories of 48 tokens, 4 stored a
question, nothing retires) takes at most 5 ms at 10^5 stored questions and at most twice that at 10^6; the arrays take
at most 10 bytes a stored token besides a constant per trajectory. The official code's question sampling alone takes
4.2 s at 2·10^4.

Also reported: the same with trajectories of 2,000 tokens, per kilobyte stored; writing and loading a snapshot, per
gigabyte of tokens and log-probs. Everything runs on the real classes; filling a million questions takes most of the
about a minute and a half that this script needs (and 4 GB).

Profile: half of a step is `store`, 450 trajectories at 4.5 µs, of which hashing the tokens and copying them in are the
largest parts; a third is `plan`, mostly the copies of 256 candidates; the draw itself takes 0.3 ms. What helped: one
64-byte row a trajectory through `struct` instead of eleven arrays or a numpy row, entering a question's bucket with its
first trajectory only, drawing all uniform numbers of a step at once, and not building the same Fractions anew.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import tracemalloc
from fractions import Fraction
from pathlib import Path

import numpy as np
from command_line import finish, make_parser

from exgrpo_orlhf.questions.fresh import FreshQuestions
from exgrpo_orlhf.records import Grade, Question, Rollout, RolloutGroup, Trajectory
from exgrpo_orlhf.replay import (
    BufferLimits,
    DifficultyBuckets,
    QuestionSampler,
    ReplayBuffer,
    ReplayMixer,
    RetirementPolicy,
    snapshot,
)
from exgrpo_orlhf.replay.arena import TRAJECTORY_BYTES

B, K, STORED = 128, 8, 4
GOAL_MS, GOAL_GROWTH, GOAL_BYTES = 5.0, 2.0, 10.0
RIGHT, WRONG = Grade("correct", 1.0), Grade("wrong", 0.0)


class Load:
    """A filled buffer and the work of its steps: random tokens, random grades, everything else real."""

    def __init__(self, questions: int, length: int) -> None:
        self.rng = np.random.default_rng(0)
        self.length, self.made = length, 0
        self.questions = [Question(f"{i:032x}", "p", "a", "benchmark") for i in range(questions)]
        self.fresh = FreshQuestions(self.questions, np.random.default_rng(1))
        self.buffer = ReplayBuffer(RetirementPolicy(at_accuracy=None), BufferLimits(per_question=STORED))
        self.mixer = ReplayMixer(
            QuestionSampler(), DifficultyBuckets(), group_size=K, questions_per_step=B, rng=self.rng,
            start_at_accuracy=None,
        )  # fmt: skip
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
        return Trajectory(ids, logprobs, 1.0, step)

    def step(self, step: int) -> dict[str, float]:
        """Milliseconds of each part. What an engine does in between is made up outside the clock."""
        clock = [time.perf_counter()]
        plan = self.mixer.plan(self.fresh, self.buffer, step)
        clock.append(time.perf_counter())
        groups, experience = [], []
        for question in (*plan.fresh, *plan.replayed):
            replayed = question.id in plan.candidates
            grades = [RIGHT if x < 0.5 else WRONG for x in self.rng.random(K - replayed)]
            rollouts = tuple(Rollout(self.pool[0][0], "stop", grade) for grade in grades)
            groups.append(RolloutGroup(question, rollouts, replayed))
            experience += [(question.id, self.trajectory(step)) for grade in grades if grade is RIGHT]
        clock.append(time.perf_counter())
        self.buffer.observe(groups, step)
        clock.append(time.perf_counter())
        self.buffer.store(experience)
        clock.append(time.perf_counter())
        parts = np.diff(clock) * 1000
        return {"plan": parts[0], "observe": parts[2], "store": parts[3], "step": parts[0] + parts[2] + parts[3]}


def measure(questions: int, length: int, steps: int) -> dict[str, float]:
    began = time.perf_counter()
    load = Load(questions, length)
    filled = time.perf_counter() - began
    times = [load.step(step) for step in range(1, steps + 6)][5:]
    figures = {name: statistics.median(row[name] for row in times) for name in times[0]}
    arena = load.buffer.arena
    figures |= {
        "questions": questions,
        "length": length,
        "step_max": max(row["step"] for row in times),
        "stored_kB_per_step": B * K / 2 * length * 8 / 1000,
        "trajectories": len(arena),
        "bytes_per_token": arena.token_bytes / arena.tokens,
        "bytes_per_trajectory": TRAJECTORY_BYTES,
        "fill_s": filled,
    }
    figures["us_per_kB"] = figures["step"] * 1000 / figures["stored_kB_per_step"]
    if questions < 10**6:
        figures |= measure_snapshot(load.buffer)
    return figures


def measure_snapshot(buffer: ReplayBuffer) -> dict[str, float]:
    gigabytes = buffer.n_tokens * 8 / 1e9
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "replay"
        times = [time.perf_counter()]
        snapshot.save(buffer, path, "benchmark")
        times.append(time.perf_counter())
        loaded = snapshot.load(path, RetirementPolicy(at_accuracy=None), "benchmark")
        times.append(time.perf_counter())
    assert loaded.n_tokens == buffer.n_tokens
    return {
        "save_s_per_GB": (times[1] - times[0]) / gigabytes,
        "load_s_per_GB": (times[2] - times[1]) / gigabytes,
    }


def constants(questions: int) -> tuple[float, float]:
    """Bytes a trajectory and a question take besides tokens, everything counted: from buffers of two sizes."""
    taken = []
    for stored in (STORED, 2 * STORED):
        load = Load(1, 48)
        ids = [f"{i:032x}" for i in range(questions)]
        buffer = ReplayBuffer(RetirementPolicy(at_accuracy=None))
        tracemalloc.start()
        for i, question_id in enumerate(ids):
            buffer.record(question_id, Fraction(1 + i % 7, K), 0)
            buffer.store([(question_id, load.trajectory(0)) for _ in range(stored)])
        taken.append(tracemalloc.get_traced_memory()[0] - buffer.arena.token_bytes)
        tracemalloc.stop()
    per_trajectory = (taken[1] - taken[0]) / (len(ids) * STORED)
    return per_trajectory, taken[0] / len(ids) - STORED * per_trajectory


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=40, help="measured steps (default 40)")
    arguments = parser.parse_args()
    sizes = [300, 1000, 3000] if arguments.small else [10**4, 10**5, 10**6]  # stored questions
    rows = [measure(n, 48, arguments.steps) for n in sizes]
    rows.append(measure(sizes[0], 2000, arguments.steps))
    names = ("questions", "length", "plan", "observe", "store", "step", "step_max", "us_per_kB", "bytes_per_token")
    print("milliseconds, median of a step; bytes of the blocks, gaps included")
    print("  ".join(f"{name:>15}" for name in names))
    for row in rows:
        print("  ".join(f"{row[name]:>15,.2f}" for name in names))
    _, middle, largest, long = rows
    per_trajectory, per_question = constants(1000 if arguments.small else 20_000)
    print(
        f"\nbesides its tokens a trajectory takes {per_trajectory:.0f} bytes, {middle['bytes_per_trajectory']} of them "
        f"in the arena's table; a question takes {per_question:.0f}"
    )
    for row in (middle, long):
        print(
            f"snapshot of {row['trajectories']:,} trajectories of {row['length']:,} tokens, per GB of tokens and "
            f"log-probs: {row['save_s_per_GB']:.1f} s to write, {row['load_s_per_GB']:.1f} s to load"
        )
    growth = largest["step"] / middle["step"]
    most = max(row["bytes_per_token"] for row in rows)
    met = bool(middle["step"] <= GOAL_MS and growth <= GOAL_GROWTH and most <= GOAL_BYTES)
    figures = {
        "rows": rows,
        "bytes_per_trajectory": per_trajectory,
        "bytes_per_question": per_question,
        "growth": growth,
        "met": met or arguments.small,
    }
    summary = (
        f"a step takes {middle['step']:.2f} ms at {middle['questions']:,} questions (goal {GOAL_MS:g}), {growth:.2f} "
        f"times that at {largest['questions']:,} (goal {GOAL_GROWTH:g}); {most:.2f} bytes a token (goal {GOAL_BYTES:g})"
    )
    return finish(arguments, figures, summary)


if __name__ == "__main__":
    sys.exit(main())
