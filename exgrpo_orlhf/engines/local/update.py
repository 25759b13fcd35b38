"""One batch, one or more optimiser steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, get_scheduler
from transformers.modeling_layers import GradientCheckpointingLayer

from ...objective import MixedPolicyLoss, TokenBatch
from ...records import MixedBatch, Question, Row
from ...settings import Optimizer
from ..engine import NonFiniteUpdate, UpdateStats
from .forward import ForwardRow, PolicyForward, measure, micro_batches

log = logging.getLogger(__name__)


class PolicyUpdate:
    """The optimiser and what it does to a batch."""

    def __init__(
        self,
        forward: PolicyForward,
        reference: PolicyForward | None,
        settings: Optimizer,
        *,
        encode: Callable[[Question], Sequence[int]],
        micro_batch_tokens: int,
        gradient_checkpointing: bool,
    ) -> None:
        """reference: the frozen initial policy, for a KL term; encode: a question's prompt as token ids"""
        self.forward, self.reference, self.settings = forward, reference, settings
        self.model: PreTrainedModel = forward.model
        self.encode, self.micro_batch_tokens = encode, micro_batch_tokens
        self._checkpointed: list[GradientCheckpointingLayer] = []
        if gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            layers = [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]
            if not layers:
                raise ValueError(
                    f"LocalEngine.gradient_checkpointing: {type(self.model).__name__} has no layers that can do it"
                )
            self._checkpointed = layers
        self._fused = True if self.forward.device.type == "cuda" else None  # None: torch's choice, a loop on a CPU
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=self._fused,
        )
        self.scheduler = get_scheduler(
            "constant_with_warmup" if settings.schedule == "constant" else settings.schedule,
            self.optimizer,
            num_warmup_steps=settings.warmup_steps,
            num_training_steps=settings.decay_steps,
        )

    def __call__(self, batch: MixedBatch, loss: MixedPolicyLoss) -> UpdateStats:
        """One or more passes over a batch, each of one or more optimiser steps on an equal share of its groups.

        Raises NonFiniteUpdate, with the weights as they were before that optimiser step.
        """
        groups, n = len(batch.rows), min(self.settings.steps_per_batch, len(batch.rows))
        rows = batch.flat_rows()
        ends = np.cumsum([0, *map(len, batch.rows)]).tolist()
        work = _Work(rows, [ForwardRow(self.encode(row.question), row.token_ids) for row in rows])
        steps = n * self.settings.passes_per_batch
        if steps > 1:  # π_old is the policy that sampled the batch, also for rows whose turn comes after a step
            self._measure_behaviour(work)
        norms, losses, skipped, rate = [], [], 0, 0.0
        for step in range(steps):
            part = step % n
            if part == 0:
                work.passes.append({})
            # Groups are dealt like cards: fresh and replayed ones come in the batch's proportion to every step.
            dealt = range(part, groups, n)
            members = [i for g in dealt for i in range(ends[g], ends[g + 1])]
            value, norm = self._backward(work, members, len(dealt) * batch.width, loss)
            limit = self.settings.skip_above_grad_norm
            if limit is not None and norm > limit:
                log.warning("update skipped: gradient norm %.4g is above Optimizer.skip_above_grad_norm", norm)
                skipped += 1
            else:
                self.optimizer.step()
            rate = self.scheduler.get_last_lr()[0]
            self.scheduler.step()
            self.optimizer.zero_grad(set_to_none=True)
            norms.append(norm)
            losses.append(value)
        metrics = {
            "policy/loss": float(np.mean(losses)),
            "policy/grad_norm": float(np.mean(norms)),
            "policy/skipped_updates": float(skipped),
            "policy/learning_rate": float(rate),
        }
        first, *later = work.passes
        policy_logprobs = [first[i] for i in range(len(rows))]
        return UpdateStats(policy_logprobs, work.behaviour_logprobs, work.entropies, metrics, later)

    def _measure_behaviour(self, work: _Work) -> None:
        fresh = [i for i, row in enumerate(work.rows) if row.replayed is None]
        logprobs, _ = measure(self.forward, [work.forward[i] for i in fresh], self.micro_batch_tokens)
        for i, row_logprobs in zip(fresh, logprobs, strict=True):
            work.behaviour_logprobs[i] = row_logprobs

    def _backward(self, work: _Work, members: list[int], rows: int, loss: MixedPolicyLoss) -> tuple[float, float]:
        """Accumulate the gradient of one optimiser step, clipped; returns loss and gradient norm before clipping.

        rows: K for each group, also for one with fewer around a stored trajectory
        """
        lengths = torch.tensor([len(work.rows[i].token_ids) for i in members])
        weights = dict(zip(members, loss.row_weights(lengths, rows=rows).tolist(), strict=True))
        token_weight = 1 / int(lengths.sum())
        advantages = torch.tensor([work.rows[i].advantage for i in members])
        needs = dict(zip(members, loss.needs_gradient(advantages).tolist(), strict=True))
        # Rows without a gradient are measured too, once: their log-probs may be stored, their entropy is a metric.
        idle = [i for i in members if not needs[i] and i not in work.passes[0]]
        measured = measure(self.forward, [work.forward[i] for i in idle], self.micro_batch_tokens)
        for i, logprobs, entropy in zip(idle, *measured, strict=True):
            work.record(i, logprobs, entropy)
        active = [i for i in members if needs[i]]
        if not active:  # a gradient of 0 is a gradient: Adam goes on with its momentum
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        total = 0.0
        for part in micro_batches([work.forward[i] for i in active], self.micro_batch_tokens):
            total += self._micro_step(work, [active[j] for j in part], weights, token_weight, loss)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm))
        if not np.isfinite(total) or not np.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteUpdate(
                f"the update is not finite (loss {total}, gradient norm {norm}): no weight was changed",
                [work.describe(i) for i in members],
            )
        return total, norm

    def _micro_step(
        self, work: _Work, part: list[int], weights: Mapping[int, float], token_weight: float, loss: MixedPolicyLoss
    ) -> float:
        forward = [work.forward[i] for i in part]
        rows = [work.rows[i] for i in part]
        lengths = [len(row.token_ids) for row in rows]
        # transformers checkpoints only what is in training mode. The layers alone are, and only here: their dropout
        # stays off, and generation keeps its cache.
        for layer in self._checkpointed:
            layer.training = True
        logprobs, entropies = self.forward(forward)  # (T,), (T,)
        for layer in self._checkpointed:
            layer.training = False
        measured = (values.detach().cpu().split(lengths) for values in (logprobs, entropies))
        for i, row_logprobs, row_entropy in zip(part, *measured, strict=True):
            work.record(i, row_logprobs.numpy().copy(), float(row_entropy.mean()))

        def spread(values: list[Any], dtype: torch.dtype) -> torch.Tensor:  # one value per row → per token (T,)
            return torch.tensor(values, dtype=dtype).repeat_interleave(torch.tensor(lengths)).to(self.forward.device)

        reference = None
        if self.reference is not None:
            with torch.no_grad():
                reference, _ = self.reference(forward)
        value = loss(
            TokenBatch(
                logprobs=logprobs,
                entropies=entropies,
                behaviour_logprobs=torch.from_numpy(np.concatenate([work.behaviour_logprobs[i] for i in part])).to(
                    self.forward.device
                ),
                advantages=spread([row.advantage for row in rows], torch.float32),
                replayed=spread([row.replayed is not None for row in rows], torch.bool),
                in_loss=spread([row.in_loss for row in rows], torch.bool),
                row_weights=spread([weights[i] for i in part], torch.float32),
                token_weight=token_weight,
                reference_logprobs=reference,
            )
        )
        value.backward()
        return float(value.detach())

    def save(self, path: Path) -> None:
        torch.save({"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()}, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)
        for group in state["optimizer"]["param_groups"]:
            # This device's, whatever wrote the checkpoint. If fused, Adam's step counters go to the device too.
            group["fused"] = self._fused
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


class _Work:
    """The rows of a batch and what has been measured of them so far."""

    def __init__(self, rows: list[Row], forward: list[ForwardRow]) -> None:
        self.rows, self.forward = rows, forward
        self.passes: list[dict[int, np.ndarray]] = []  # of each pass the log-probs of the rows it measured
        self.behaviour_logprobs: list[Any] = [
            None if row.replayed is None else row.replayed.behaviour_logprobs for row in rows
        ]
        self.entropies = [0.0] * len(rows)

    def record(self, i: int, logprobs: np.ndarray, entropy: float) -> None:
        """A row measured in its own optimiser step. The only step of a batch sees the policy that sampled it."""
        self.passes[-1][i] = logprobs
        if len(self.passes) == 1:
            self.entropies[i] = entropy
        if self.behaviour_logprobs[i] is None:
            self.behaviour_logprobs[i] = logprobs

    def describe(self, i: int) -> dict[str, Any]:
        row = self.rows[i]
        return {
            "question_id": row.question.id,
            "token_ids": row.token_ids.tolist(),
            "advantage": row.advantage,
            "in_loss": row.in_loss,
            "replayed_from_step": None if row.replayed is None else row.replayed.step,
            "policy_logprobs": next(part[i] for part in reversed(self.passes) if i in part).tolist(),
            "behaviour_logprobs": self.behaviour_logprobs[i].tolist(),
        }
