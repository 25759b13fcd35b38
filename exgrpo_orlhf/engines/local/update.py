"""The update of the local engine: one or more optimiser steps on one batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ...attention.packing import PackedRow
from ...objective import MixedPolicyLoss, TokenBatch
from ...records import Measured, MixedBatch, Row
from ...settings import LocalEngine, Optimizer
from ..engine import LogProbs, NonFiniteUpdate, UpdateStats
from ..frozen_copy import FrozenCopy, begin_anew
from ..rows import behaviour_logprobs, row_dump
from ..schedule import scheduler
from ..weight_decay import decay_groups
from .forward import PolicyForward, Recomputing, per_row

log = logging.getLogger(__name__)

# From rows, and whether to pack them, to their log-probs and entropies, as PolicyForward computes them.
Reference = Callable[[Sequence[PackedRow], bool], tuple[torch.Tensor, torch.Tensor]]


class PolicyUpdate:
    """The optimiser, its schedule, and the policy that they update."""

    def __init__(
        self,
        forward: PolicyForward,
        reference: Reference | None,
        settings: Optimizer,
        machine: LocalEngine,
        copies: Mapping[str, FrozenCopy] = {},
    ) -> None:
        """reference: the frozen initial policy, for a KL term; copies: by name (`Experiment.copies`)"""
        self.forward, self.reference, self.settings = forward, reference, settings
        self.model: PreTrainedModel = forward.model
        self.copies = copies
        self.micro_batch_tokens = machine.micro_batch_tokens
        self._recomputing = Recomputing(self.model, machine.gradient_checkpointing)
        self._fused = True if self.forward.device.type == "cuda" else None  # None: torch's choice, a loop on a CPU
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            decay_groups(self.model, settings.weight_decay),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=self._fused,
        )
        self.scheduler = scheduler(self.optimizer, settings)

    def __call__(self, batch: MixedBatch, rows: list[Row], loss: MixedPolicyLoss) -> UpdateStats:
        """One or more passes over a batch, each of one or more optimiser steps on an equal share of its groups.

        rows: of the flattened batch, with their prompts
        Raises NonFiniteUpdate. The weights are then as they were before that optimiser step.
        """
        groups, n = len(batch.rows), min(self.settings.steps_per_batch, len(batch.rows))
        ends = np.cumsum([0, *map(len, batch.rows)]).tolist()
        state = _UpdateState(rows, loss, batch.base_share)
        steps = n * (1 if batch.reincarnated else self.settings.passes_per_batch)
        self._measure_before(state, steps)
        norms, losses, skipped, rate = [], [], 0, self.scheduler.get_last_lr()[0]
        for step in range(steps):
            part = step % n
            if part == 0:
                state.passes.append({})
            # Every n-th group goes to the same step: each step has fresh and replayed groups in the batch's proportion.
            of_step = range(part, groups, n)
            members = [i for g in of_step for i in range(ends[g], ends[g + 1])]
            value, norm = self._backward(state, members, len(of_step) * batch.group_size)
            limit = self.settings.skip_above_grad_norm
            if limit is not None and norm > limit:
                log.warning("update skipped: gradient norm %.4g is above Optimizer.skip_above_grad_norm", norm)
                skipped += 1
            else:
                rate = self.scheduler.get_last_lr()[0]
                self.optimizer.step()
                self.scheduler.step()
            self.optimizer.zero_grad(set_to_none=True)
            norms.append(norm)
            losses.append(value)
        metrics = {
            "policy/loss": float(np.mean(losses)),
            "policy/grad_norm": float(np.mean(norms)),
            "policy/skipped_updates": float(skipped),
            "policy/learning_rate": float(rate),
            **loss.fresh_metrics(loss.fresh_sums(state.fresh_rows(), state.mixed)),
        }
        policy_logprobs = [state.passes[0][i] for i in range(len(state.rows))]
        return UpdateStats(policy_logprobs, state.behaviour_logprobs, state.entropies, metrics)

    def _measure_before(self, state: _UpdateState, steps: int) -> None:
        """What the first optimiser step changes: log-probs under π_k, where a batch has several, and frozen copies."""
        if steps > 1:  # π_old is the policy that sampled the batch, also for the rows of later optimiser steps
            around = state.loss.clip_around == "policy"
            behaviour = state.behaviour_logprobs
            missing = [i for i, row in enumerate(state.rows) if behaviour[i] is None or (around and row.trajectory)]
            for i, measured in zip(missing, self._measure(state, missing), strict=True):
                of = behaviour if behaviour[i] is None else state.old_logprobs
                of[i] = measured.logprobs
        for name, copy in self.copies.items():
            if name == "base" or state.base_share < 1:
                with copy.in_place():
                    measured_rows = self._measure(state, [*range(len(state.rows))])
                state.references[name] = [one.logprobs for one in measured_rows]
        if "preceding" in self.copies:
            self.copies["preceding"].take()

    def reincarnate(self) -> None:
        """The copy of the reference becomes the policy, and the optimiser begins anew."""
        if "base" in self.copies:
            self.copies["base"].take()
        begin_anew(self.optimizer)

    def _measure(self, state: _UpdateState, members: list[int]) -> list[Measured]:
        return self.forward.measure([state.rows[i] for i in members], self.micro_batch_tokens)

    def _backward(self, state: _UpdateState, members: list[int], rows: int) -> tuple[float, float]:
        """Accumulates the gradient of one optimiser step and clips it. Returns the loss and the norm before clipping.
        rows: for the normaliser; K for each group, also for a group that has fewer around a stored trajectory"""
        lengths = torch.tensor([state.rows[i].length for i in members])
        weights = zip(members, state.loss.row_weights(lengths, rows=rows).tolist(), strict=True)
        state.weights = {i: weight * state.rows[i].weight for i, weight in weights}
        state.token_weight = 1 / int(lengths.sum())
        advantages = torch.tensor([state.rows[i].advantage for i in members])
        needs = dict(zip(members, state.loss.needs_gradient(advantages).tolist(), strict=True))
        # Rows without a gradient are measured too, once: their log-probs may be stored, their entropy is a metric.
        idle = [i for i in members if not needs[i] and i not in state.passes[0]]
        for i, measured in zip(idle, self._measure(state, idle), strict=True):
            state.record(i, measured)
        active = [i for i in members if needs[i]]
        if not active:  # an optimiser step with a gradient of 0: Adam still moves by its momentum
            for parameter in self._trained:
                parameter.grad = torch.zeros_like(parameter)
        total = 0.0
        for part, pack in self.forward.batches([state.rows[i] for i in active], self.micro_batch_tokens):
            total += self._micro_step(state, [active[j] for j in part], pack)
        limit = math.inf if self.settings.max_grad_norm is None else self.settings.max_grad_norm
        norm = float(torch.nn.utils.clip_grad_norm_(self._trained, limit))
        if not np.isfinite(total) or not np.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteUpdate(
                f"the update is not finite (loss {total}, gradient norm {norm}): this optimiser step changed no weight",
                [state.dump(i) for i in members],
            )
        return total, norm

    def _micro_step(self, state: _UpdateState, part: list[int], pack: bool) -> float:
        rows = [state.rows[i] for i in part]
        lengths = [row.length for row in rows]
        with self._recomputing():
            logprobs, entropies = self.forward(rows, pack)  # (A,), (A,)
        for i, measured in zip(part, per_row(rows, logprobs, entropies), strict=True):
            state.record(i, measured)

        def per_token(values: list[Any], dtype: torch.dtype) -> torch.Tensor:  # one value per row → per token (T,)
            return torch.tensor(values, dtype=dtype).repeat_interleave(torch.tensor(lengths)).to(self.forward.device)

        def joined(values: Sequence[LogProbs] | None) -> torch.Tensor | None:  # of each row of the batch → (T,)
            if values is None:
                return None
            return torch.from_numpy(np.concatenate([values[i] for i in part])).to(self.forward.device)

        reference = joined(state.references.get("base"))
        if self.reference is not None:
            with torch.no_grad():
                reference, _ = self.reference(rows, pack)
        behaviour = joined(state.behaviour_logprobs)
        assert behaviour is not None
        value = state.loss(
            TokenBatch(
                logprobs=logprobs,
                entropies=entropies,
                behaviour_logprobs=behaviour,
                advantages=per_token([row.advantage for row in rows], torch.float32),
                replayed=per_token([row.trajectory is not None for row in rows], torch.bool),
                in_loss=per_token([row.in_loss for row in rows], torch.bool),
                row_weights=per_token([state.weights[i] for i in part], torch.float32),
                token_weight=state.token_weight,
                row_of=per_token(list(range(len(rows))), torch.int64),
                mixed=state.mixed,
                reference_logprobs=reference,
                preceding_logprobs=joined(state.references.get("preceding")),
                base_share=state.base_share,
                old_logprobs=joined([state.old_logprobs.get(i, one) for i, one in enumerate(state.behaviour_logprobs)])
                if state.old_logprobs
                else None,
            )
        )
        value.backward()
        return float(value.detach())

    def save(self, folder: Path) -> None:
        state = {"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()}
        torch.save(state, folder / "optimizer.pt")
        for name, copy in self.copies.items():
            copy.save(folder / f"{name}.pt")

    def load(self, folder: Path) -> None:
        """Raises ValueError for a state of other parameters."""
        for name, copy in self.copies.items():
            copy.load(folder / f"{name}.pt")
        state = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
        for group in state["optimizer"]["param_groups"]:
            # As this device needs it, whatever wrote the checkpoint. A fused Adam keeps its step counters there too.
            group["fused"] = self._fused
        if len(state["optimizer"]["param_groups"]) != len(self.optimizer.param_groups):
            raise ValueError(
                f"{folder / 'optimizer.pt'} is of a version whose Optimizer.weight_decay took biases and norms too; "
                f"begin a new run with its weights: --from {folder.parent} (--with-buffer for its buffer)"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


class _UpdateState:
    """The rows of a batch and what has been measured of them so far.

    weights: of each token of a row, and token_weight: of any token; both of the present optimiser step
    old_logprobs: of replayed rows under π_k, where they are clipped around it; references: of each row under a frozen
        copy, by its name
    """

    weights: dict[int, float]
    token_weight: float

    def __init__(self, rows: list[Row], loss: MixedPolicyLoss, base_share: float) -> None:
        self.rows, self.loss, self.base_share = rows, loss, base_share
        self.old_logprobs: dict[int, LogProbs] = {}
        self.references: dict[str, list[LogProbs]] = {}
        self.mixed = any(row.trajectory is not None for row in rows)
        self.passes: list[dict[int, LogProbs]] = []  # for each pass the log-probs of the rows it measured
        self.behaviour_logprobs: list[Any] = [behaviour_logprobs(row, None) for row in rows]
        self.entropies = [0.0] * len(rows)

    def record(self, i: int, measured: Measured) -> None:
        """What the forward pass of a row's own optimiser step measured. Where a batch has one step, that is also the
        behaviour policy of a fresh row, unless it was generated ahead."""
        self.passes[-1][i] = measured.logprobs
        if len(self.passes) == 1:
            self.entropies[i] = measured.entropy
        if self.behaviour_logprobs[i] is None:
            self.behaviour_logprobs[i] = measured.logprobs

    def fresh_rows(self) -> Iterator[tuple[float, LogProbs, LogProbs]]:
        """Advantage, log π_θ and log π_old of each fresh row in each pass that measured it."""
        for part in self.passes:
            for i, row in enumerate(self.rows):
                if row.trajectory is None and i in part:
                    yield row.advantage, part[i], self.behaviour_logprobs[i]

    def dump(self, i: int) -> dict[str, Any]:
        policy = next(part[i] for part in reversed(self.passes) if i in part)
        return row_dump(self.rows[i], policy, self.behaviour_logprobs[i])
