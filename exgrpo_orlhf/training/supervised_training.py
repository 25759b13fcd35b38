"""Training on rows of prompt and response: batches, loss, optimiser."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..attention.products import large_layers
from ..engines.local.forward import PolicyForward, Recomputing
from ..engines.local.placement import dtype_of
from ..engines.rows import ForwardRow
from ..engines.schedule import rate_share
from ..engines.weight_decay import decay_groups
from .optimiser_steps import optimiser_steps


class SupervisedTraining:
    """AdamW over float32 weights, in epochs over the rows."""

    def __init__(self, model: PreTrainedModel, rows: Sequence[ForwardRow], settings: Any) -> None:
        """settings: the `SupervisedModel`, whose module imports this one"""
        self.model, self.rows, self._settings = model, rows, settings
        self._steps_of_an_epoch = math.ceil(len(rows) / settings.batch_size)
        self.steps: int = settings.epochs * self._steps_of_an_epoch
        machine = settings.machine
        self.forward = PolicyForward(model, 1.0, dtype_of(machine.dtype, model.device))
        # No prompt comes twice, but of a model with large products a packed pass takes 0.9 of the time of padded ones.
        if large_layers(model):
            self.forward.least_repeated = 0.0
        self._recomputing = Recomputing(model, machine.gradient_checkpointing)
        self._optimiser = torch.optim.AdamW(
            decay_groups(model, settings.weight_decay),
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        warmup = math.ceil(settings.warmup * self.steps)
        shape = partial(rate_share, steps=self.steps, warmup=warmup, schedule=settings.schedule)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimiser, lambda done: shape(done + 1))

    def batch(self, step: int) -> list[int]:
        """The rows of an optimiser step, counted from 1. Each epoch has its own order, of this seed alone."""
        epoch, place = divmod(step - 1, self._steps_of_an_epoch)
        size = self._settings.batch_size
        order = np.random.default_rng([self._settings.seed, epoch]).permutation(len(self.rows))
        return [int(i) for i in order[place * size : (place + 1) * size]]

    def gradient(self, step: int) -> float:
        """Add the gradient of a step's loss, L = −Σ log π(token) / number of the step's response tokens; return L.

        However the rows are cut into micro-batches, each token has the same weight.
        """
        rows = [self.rows[i] for i in self.batch(step)]
        tokens, total = sum(len(row.token_ids) for row in rows), 0.0
        for part, pack in self.forward.batches(rows, self._settings.machine.micro_batch_tokens):
            with self._recomputing():
                logprobs, _ = self.forward([rows[i] for i in part], pack)
            loss = -logprobs.sum() / tokens
            loss.backward()
            total += float(loss.detach())
        return total

    def run(self) -> Iterator[tuple[int, dict[str, float]]]:
        """All steps, each with its metrics. Raises ArithmeticError."""
        tokens = 0
        began = time.perf_counter()
        for step, metrics in optimiser_steps(
            self.gradient,
            self._optimiser,
            self._schedule,
            last=self.steps,
            max_grad_norm=self._settings.max_grad_norm,
            what="supervised start",
        ):
            rows = [self.rows[i] for i in self.batch(step)]
            tokens += sum(len(row.token_ids) for row in rows)
            speed = sum(map(len, rows)) / (time.perf_counter() - began)
            metrics |= {"tokens": tokens, "tokens_per_second": speed}
            yield step, {f"supervised/{name}": value for name, value in metrics.items()}
            began = time.perf_counter()
