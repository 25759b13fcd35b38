"""Compares the gradient of a batch through a layout with the plain one: one process, float32, no packing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..engines.local import LocalParts, TorchEngine
from ..experiment import Experiment
from ..grader.grade import Grade
from ..records import MixedBatch, Question, Rollout, RolloutGroup, Row, Trajectory
from ..settings import LocalEngine

Gradients = list[dict[str, Tensor]]  # of each optimiser step by parameter, float32 on the CPU


@dataclass(frozen=True)
class Difference:
    """The difference of a gradient from the right one, over all parameters and steps.

    error: relative; norm: ratio of the norms; cosine: 0 if the norm is; steps: of each step and parameter the norm of
    the right gradient, the relative error and the cosine; worst: the parameter of the smallest cosine, and that cosine
    """

    error: float
    norm: float
    cosine: float
    steps: list[dict[str, tuple[float, float, float]]]

    @classmethod
    def between(cls, gradients: Gradients, right: Gradients) -> Difference:
        """Raises ValueError if the numbers of optimiser steps differ."""
        if len(gradients) != len(right):
            raise ValueError(f"{len(gradients)} optimiser steps were made instead of {len(right)}")
        steps, square, squares = [], 0.0, [0.0, 0.0]
        for actual, exact in zip(gradients, right, strict=True):
            pairs = {name: (actual[name].flatten().double(), g.flatten().double()) for name, g in exact.items()}
            steps.append({name: _compare(*pair) for name, pair in pairs.items()})
            for a, b in pairs.values():
                square += float((a - b).square().sum())
                squares = [squares[0] + float(a.square().sum()), squares[1] + float(b.square().sum())]
        error, norm = (square / squares[1]) ** 0.5, (squares[0] / squares[1]) ** 0.5
        return cls(error, norm, (1 + norm**2 - error**2) / (2 * norm) if norm else 0.0, steps)

    @property
    def worst(self) -> tuple[str, float]:
        cosines = [(name, cosine) for step in self.steps for name, (_, _, cosine) in step.items()]
        return min(cosines, key=lambda pair: pair[1])


def _compare(actual: Tensor, right: Tensor) -> tuple[float, float, float]:
    norm, off = float(right.norm()), float((actual - right).norm())
    if not norm and not off:  # as that of LoRA's A, as long as B is 0
        return 0.0, 0.0, 1.0
    return norm, off / norm if norm else off, float(torch.cosine_similarity(actual, right, dim=0))


def random_batch(questions: Sequence[Question], k: int, vocabulary: int, length: int) -> MixedBatch:
    """Groups of K rows of random tokens and advantages. The groups of the second half end with a stored trajectory of
    the largest advantage, whose log-probs are far from one another; the first continues a response; and one fresh row
    could not be graded.

    vocabulary: tokens from 2 up to this are drawn; length: longest response, tokens
    """
    rng, groups, rows = np.random.default_rng(0), [], []
    for i, question in enumerate(questions):
        lengths = rng.integers(length // 3, length + 1, k)
        responses = [rng.integers(2, vocabulary, n).astype(np.int32) for n in lengths]
        given = int(min(lengths)) // 2 if i == 0 < len(questions) // 2 else 0
        for response in responses:
            response[:given] = responses[0][:given]
        advantages = np.sort(rng.normal(size=k))
        stored = None
        if i >= len(questions) // 2:
            stored = Trajectory(responses[-1], -np.abs(rng.normal(3.0, 1.5, lengths[-1])).astype(np.float32), 1.0, 0)
        fresh = [
            Rollout(ids, "stop", Grade("timeout", None) if (i, j) == (0, 0) else Grade("wrong", 0.0), given=given)
            for j, ids in enumerate(responses[: k - (stored is not None)])
        ]
        groups.append(RolloutGroup(question, tuple(fresh), stored is not None))
        members: list[Rollout | Trajectory] = [*fresh, *([stored] if stored else [])]
        graded = [rollout.grade is None or rollout.grade.reward is not None for rollout in fresh] + [True]
        parts = zip(members, (advantages - advantages.mean()).tolist(), graded, strict=False)
        rows.append([Row(question, member, a if ok else 0.0, ok) for member, a, ok in parts])
    return MixedBatch(groups, rows, k)


def of_replayed(batch: MixedBatch) -> MixedBatch:
    """The batch with advantage 0 of its fresh rows."""
    rows = [[row if row.trajectory else replace(row, advantage=0.0) for row in members] for members in batch.rows]
    return replace(batch, rows=rows)


def frozen(experiment: Experiment) -> Experiment:
    """The experiment with a learning rate that changes no weight."""
    return replace(experiment, optimizer=replace(experiment.optimizer, learning_rate=1e-30))


def generated_ahead(engine: TorchEngine, batch: MixedBatch) -> MixedBatch:
    """The batch as if its fresh rows had been generated ahead: sampled by a policy whose log-probs differ from the
    engine's by 0.3, so that some ratios are clipped."""
    rng, fresh = np.random.default_rng(0), iter(engine.behaviour_logprobs(batch.groups))
    groups, rows = [], []
    for group, members in zip(batch.groups, batch.rows, strict=True):
        noise = ((rollout, next(fresh)) for rollout in group.rollouts)
        sampled = [
            replace(rollout, behaviour_logprobs=(now + rng.normal(0, 0.3, len(now))).astype(np.float32), policy_step=1)
            for rollout, now in noise
        ]
        groups.append(replace(group, rollouts=tuple(sampled)))
        responses = [*sampled, *(row.response for row in members[len(sampled) :])]
        rows.append([replace(row, response=response) for row, response in zip(members, responses, strict=True)])
    return replace(batch, groups=groups, rows=rows)


def plain(experiment: Experiment, model: Path, batch: MixedBatch, dtype: Literal["float32", "bfloat16"]) -> Gradients:
    """The gradient of each optimiser step, unclipped, by the local engine on the CPU."""
    engine = plain_engine(experiment, model, dtype)
    gradients = recorded_gradients(engine)
    engine.update(batch, experiment.loss)
    return gradients


def plain_engine(experiment: Experiment, model: Path, dtype: Literal["float32", "bfloat16"]) -> TorchEngine:
    """The local engine on the CPU, without clipping the gradient."""
    parts = LocalParts(
        LocalEngine(device="cpu", dtype=dtype, threads=torch.get_num_threads()),
        replace(experiment.optimizer, max_grad_norm=None, skip_above_grad_norm=None),
        experiment.sampling,
        experiment.prompts,
        experiment.lora,
        experiment.copies,
    )
    return TorchEngine(
        parts,
        model_path=model,
        seed=experiment.settings.seed,
        reference=experiment.loss.kl_coef > 0,
        generates=False,
    )


def recorded_gradients(engine: TorchEngine) -> Gradients:
    """A list to which each following optimiser step of the engine appends its gradient."""
    gradients: Gradients = []

    def record(*_: Any) -> None:
        named = engine.model.named_parameters()
        gradients.append({name: p.grad.detach().float().cpu().clone() for name, p in named if p.grad is not None})

    engine._update.optimizer.register_step_pre_hook(record)
    return gradients
