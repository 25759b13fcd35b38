"""Builders for tests of the replay: rollouts, groups, trajectories, mixers, and a training loop without a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction

import numpy as np

from exgrpo_orlhf.grader.grade import Grade
from exgrpo_orlhf.objective import GroupAdvantages
from exgrpo_orlhf.questions.fresh import FreshQuestions
from exgrpo_orlhf.records import MixedBatch, Question, Rollout, RolloutGroup, Trajectory
from exgrpo_orlhf.replay import (
    DifficultyBuckets,
    Plan,
    QuestionSampler,
    ReplayBuffer,
    ReplayMixer,
    RetirementPolicy,
    TrajectorySelector,
)
from exgrpo_orlhf.replay.injection import Choice
from exgrpo_orlhf.replay.mixer import MixerParts

K = 4
REWARDS = {"correct": 1.0, "wrong": 0.0, "no_answer": 0.0, "timeout": None, "error": None}
QUESTIONS = [Question.make("sums", f"{i}+1=", str(i + 1)) for i in range(40)]


def rollout(verdict: str, tokens=(5, 6, 7), finish="stop", sound=None) -> Rollout:
    return Rollout(np.array(tokens, np.int32), finish, Grade(verdict, REWARDS[verdict], sound))


def group(verdicts, question: Question | str = QUESTIONS[0], replayed=False) -> RolloutGroup:
    """question: one, or its id"""
    if isinstance(question, str):
        question = Question(question, f"{question}?", "1", "test")
    rollouts = tuple(rollout(verdict, tokens=(i + 1, 9)) for i, verdict in enumerate(verdicts))
    return RolloutGroup(question, rollouts, replayed)


def trajectory(tokens=(1, 2), step=0, logprob=-0.5, reward=1.0, finish="stop", sound=None) -> Trajectory:
    ids = np.array(tokens, np.int32)
    return Trajectory(ids, np.full(len(ids), logprob, np.float32), reward, step, finish, sound)


def plain(one: Trajectory) -> tuple:
    """All of a trajectory, to be compared."""
    arrays = one.token_ids.tobytes(), one.behaviour_logprobs.tobytes()
    return *arrays, one.reward, one.step, one.finish, one.sound, one.key


def view(buffer: ReplayBuffer) -> dict:
    """All that a buffer holds, to be compared; the order in each bucket and of retirement too."""
    return {
        "records": {
            question_id: (
                *(record.accuracy, record.observed_step, record.streak),
                [(one.sequence, plain(one.trajectory)) for one in record.stored],
            )
            for question_id, record in buffer.records.items()
        },
        "retired": list(buffer.retired.items()),
        "next": buffer.next_sequence,
        "buckets": {a: [members[i] for i in range(len(members))] for a, members in buffer.candidates.items()},
        "counts": (
            *(buffer.n_candidates, buffer.n_with_trajectories),
            *(buffer.n_trajectories, buffer.n_tokens, buffer.n_bytes),
        ),
    }


def mixer(b=8, seed=0, group_size=K, sampler=None, buckets=None, **settings) -> ReplayMixer:
    rng = np.random.default_rng(seed)
    parts = MixerParts(sampler or QuestionSampler(), buckets or DifficultyBuckets(), group_size, b, rng)
    return ReplayMixer(parts, **{"start_at_accuracy": None, **settings})


def source(n=40, seed=1) -> FreshQuestions:
    return FreshQuestions(QUESTIONS[:n], np.random.default_rng(seed))


def filled(n: int) -> ReplayBuffer:
    buffer = ReplayBuffer(RetirementPolicy())
    for i, question in enumerate(QUESTIONS[:n]):
        buffer.record(question.id, Fraction(1 + i % 3, 4), 0)
        buffer.store([(question.id, trajectory([i, 1]))])
    return buffer


def choices(chosen: Mapping[str, Trajectory]) -> dict[str, Choice]:
    return {question_id: Choice([one], (), 0) for question_id, one in chosen.items()}


def assemble(groups, chosen=None, **settings) -> MixedBatch:
    completing = mixer(**settings)
    return completing.assemble(completing.complete(groups, choices(chosen or {})), GroupAdvantages())


def finish_step(with_mixer: ReplayMixer, buffer: ReplayBuffer, groups, chosen, step: int) -> int:
    """What a step does with its graded groups, in its order. Returns how many trajectories were stored."""
    with_mixer.share.observe(groups, step)
    if with_mixer.collecting:
        buffer.observe(groups, step)
    batch = with_mixer.assemble(with_mixer.complete(groups, chosen), GroupAdvantages())
    logprobs = [np.full(len(row.token_ids), -0.5, np.float32) for row in batch.flat_rows()]
    return buffer.store(with_mixer.collect(batch, logprobs, step))


def train(
    with_mixer: ReplayMixer, fresh: FreshQuestions, buffer: ReplayBuffer, steps: int, skill=0.5, seed=3, first=1
) -> Iterator[Plan]:
    """Steps of training on coin flips: every part but the model is the real one. Yields each step's plan."""
    selector, draw = TrajectorySelector(by="random"), np.random.default_rng(seed)
    for step in range(first, first + steps):
        plan = with_mixer.plan(fresh, buffer, step)
        chosen = selector.choose(plan.stored, {}, with_mixer.rng)
        groups = []
        for question, replayed in [(q, False) for q in plan.fresh] + [(q, True) for q in plan.replayed]:
            flips = draw.random(plan.rollout_counts(K)[len(groups)]) < skill
            tokens = draw.integers(1, 100, (K, 3))
            rollouts = [rollout("correct" if flip else "wrong", ids) for flip, ids in zip(flips, tokens, strict=False)]
            groups.append(RolloutGroup(question, tuple(rollouts), replayed))
        finish_step(with_mixer, buffer, groups, chosen, step)
        yield plan


def ids_of(plan: Plan) -> tuple[list[str], list[str]]:
    return [question.id for question in plan.fresh], [question.id for question in plan.replayed]
