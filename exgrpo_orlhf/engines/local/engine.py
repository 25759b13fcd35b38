"""The local engine: one process, one CPU or one GPU; generate, score, update, save."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

from ...objective import MixedPolicyLoss, TokenBatch
from ...prompts import PromptEncoder, Prompts
from ...replay import MixedBatch, Plan, Question, Rollout, RolloutGroup, Row, Trajectory
from ...settings import Optimizer, Sampling, require
from .forward import ForwardRow, PolicyForward, micro_batches
from .generation import chunk_seed, clean_generation_config, end_tokens, generate

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalSettings:
    """The machine (gin name `LocalEngine`).

    device: 'auto' takes the GPU if there is one
    dtype: of the computation; master weights and optimiser are float32 always. 'auto': float32 on a CPU, bfloat16 on
        a GPU
    threads: torch's CPU threads; more than the free cores is ruinous
    micro_batch_tokens: padded tokens of one forward and backward pass
    generation_rows: responses generated at a time
    gradient_checkpointing: compute activations again in the backward pass instead of keeping them
    """

    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: int = 1
    micro_batch_tokens: int = 16384
    generation_rows: int = 256
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        require(
            self.dtype in ("auto", "float32", "bfloat16"),
            f"LocalEngine.dtype must be 'auto', 'float32' or 'bfloat16', got {self.dtype!r}",
        )
        for name in ("threads", "micro_batch_tokens", "generation_rows"):
            require(getattr(self, name) >= 1, f"LocalEngine.{name} must be at least 1, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class UpdateStats:
    """What an update measured, per row of the flattened batch.

    policy_logprobs: float32 (T,), of the current policy when the row's optimiser step began
    behaviour_logprobs: float32 (T,), stored for replayed rows; for fresh ones measured here, by the policy that
        sampled them
    entropies: mean token entropy of the response, nats
    """

    policy_logprobs: list[np.ndarray]
    behaviour_logprobs: list[np.ndarray]
    entropies: list[float]
    metrics: dict[str, float]


class NonFiniteUpdate(ArithmeticError):
    """The loss or the gradient is not finite. dump: the rows of the optimiser step, for a look at what did it."""

    def __init__(self, message: str, dump: list[dict[str, Any]]) -> None:
        super().__init__(message)
        self.dump = dump


class LocalEngine:
    def __init__(
        self,
        settings: LocalSettings,
        optimizer: Optimizer,
        sampling: Sampling,
        prompts: Prompts,
        *,
        model_path: str | Path,
        weights_path: str | Path | None = None,
        seed: int = 0,
        reference: bool = False,
    ) -> None:
        """model_path: a Hugging Face causal LM with its tokenizer; weights_path: a checkpoint of it to continue from.

        reference: keep a frozen copy of the model at `model_path`, for a KL term
        """
        torch.set_num_threads(settings.threads)
        name = settings.device if settings.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
        self.device = torch.device(name)
        dtype = settings.dtype if settings.dtype != "auto" else ("bfloat16" if name != "cpu" else "float32")
        self.settings, self.optimizer_settings, self.sampling, self.seed = settings, optimizer, sampling, seed
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.prompts = PromptEncoder(prompts, self.tokenizer)
        self.model = self._load(weights_path or model_path)
        self.end = end_tokens(self.model, self.tokenizer.eos_token_id)
        if not self.end:
            raise ValueError(f"{model_path}: neither the tokenizer nor the generation config names an end token")
        pad = self.tokenizer.pad_token_id
        self.pad = self.end[0] if pad is None else pad
        self._own_generation_config = self.model.generation_config
        self.model.generation_config = clean_generation_config(self.end, self.pad)
        if settings.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.forward = PolicyForward(self.model, sampling.temperature, getattr(torch, dtype))
        self.reference = (
            PolicyForward(self._load(model_path).requires_grad_(False), sampling.temperature, getattr(torch, dtype))
            if reference
            else None
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
        )
        self.scheduler = get_scheduler(
            "constant_with_warmup" if optimizer.schedule == "constant" else optimizer.schedule,
            self.optimizer,
            num_warmup_steps=optimizer.warmup_steps,
            num_training_steps=optimizer.decay_steps,
        )

    def _load(self, path: str | Path) -> Any:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
        return model.to(self.device).eval()  # eval: with dropout, behaviour log-probs would be another policy's

    # -- generate -----------------------------------------------------------------------------------------------------

    def rollout(self, plan: Plan, group_size: int) -> list[RolloutGroup]:
        """K fresh responses to each fresh question, K−1 to each replayed one; groups in plan order, ungraded."""
        questions = [*plan.fresh, *plan.replayed]
        counts = [group_size] * len(plan.fresh) + [group_size - 1] * len(plan.replayed)
        owners = [i for i, count in enumerate(counts) for _ in range(count)]
        prompts = [self.prompts.encode(questions[i]) for i in owners]
        sampled = self._generate(prompts, self.sampling.temperature, plan.step)
        rollouts: list[list[Rollout]] = [[] for _ in questions]
        for owner, rollout in zip(owners, sampled, strict=True):
            rollouts[owner].append(rollout)
        return [
            RolloutGroup(question, tuple(group), replayed=i >= len(plan.fresh))
            for i, (question, group) in enumerate(zip(questions, rollouts, strict=True))
        ]

    def answer_greedily(self, questions: Sequence[Question]) -> list[Rollout]:
        """The most probable response to each question, ungraded."""
        return self._generate([self.prompts.encode(question) for question in questions], None, 0)

    def _generate(self, prompts: Sequence[Sequence[int]], temperature: float | None, step: int) -> list[Rollout]:
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))  # little padding within a chunk
        rollouts: dict[int, Rollout] = {}
        rows = self.settings.generation_rows
        for chunk, begin in enumerate(range(0, len(order), rows)):
            part = order[begin : begin + rows]
            # transformers samples from torch's global generator: seeded here, and put back as it was.
            devices = [self.device] if self.device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices), self.forward.autocast():
                torch.manual_seed(chunk_seed(self.seed, step, chunk))
                responses = generate(
                    self.model,
                    [prompts[i] for i in part],
                    end=self.end,
                    pad=self.pad,
                    max_new_tokens=self.sampling.max_response_tokens,
                    temperature=temperature,
                )
            rollouts.update(zip(part, responses, strict=True))
        return [rollouts[i] for i in range(len(prompts))]

    def decode(self, token_ids: np.ndarray) -> str:
        """The response as text, without special tokens; for verifiers and people, never encoded again."""
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    # -- score --------------------------------------------------------------------------------------------------------

    def score(self, plan: Plan, to_score: Mapping[str, Sequence[Trajectory]]) -> dict[str, list[float]]:
        """Mean token entropy of each stored response under the current policy, temperature 1, in nats."""
        questions = {question.id: question for question in plan.replayed}
        rows = [
            ForwardRow(self.prompts.encode(questions[question_id]), trajectory.token_ids)
            for question_id, stored in to_score.items()
            for trajectory in stored
        ]
        entropies = iter(self._measure(rows)[1])
        return {question_id: [next(entropies) for _ in stored] for question_id, stored in to_score.items()}

    @torch.no_grad()
    def _measure(self, rows: Sequence[ForwardRow], forward: PolicyForward | None = None) -> tuple[list, list[float]]:
        """Log-probs and mean entropy of each row, without gradient."""
        logprobs: list[Any] = [None] * len(rows)
        entropies = [0.0] * len(rows)
        for part in micro_batches(rows, self.settings.micro_batch_tokens):
            lengths = [len(rows[i].response) for i in part]
            lp, entropy = (forward or self.forward)([rows[i] for i in part])
            for i, row_lp, row_entropy in zip(part, lp.cpu().split(lengths), entropy.split(lengths), strict=True):
                logprobs[i], entropies[i] = row_lp.numpy().copy(), float(row_entropy.mean())
        return logprobs, entropies

    # -- update -------------------------------------------------------------------------------------------------------

    def update(self, batch: MixedBatch, loss: MixedPolicyLoss) -> UpdateStats:
        """One or more optimiser steps on a batch, each on an equal share of its groups.

        Raises NonFiniteUpdate, with the weights as they were before that optimiser step.
        """
        groups, n = len(batch.rows), self.optimizer_settings.steps_per_batch
        rows = batch.flat_rows()
        width = len(batch.rows[0])
        work = _Work(rows, [ForwardRow(self.prompts.encode(row.question), row.token_ids) for row in rows])
        if n > 1:  # π_old is the policy that sampled the batch, also for rows whose turn comes after a step
            self._measure_behaviour(work)
        norms, losses, skipped = [], [], 0
        for part in range(min(n, groups)):
            # Groups are dealt like cards: fresh and replayed ones come in the batch's proportion to every step.
            members = [g * width + k for g in range(part, groups, n) for k in range(width)]
            value, norm = self._backward(work, members, loss)
            limit = self.optimizer_settings.skip_above_grad_norm
            if limit is not None and norm > limit:
                log.warning("update skipped: gradient norm %.4g is above Optimizer.skip_above_grad_norm", norm)
                skipped += 1
            else:
                self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad(set_to_none=True)
            norms.append(norm)
            losses.append(value)
        metrics = {
            "policy/loss": float(np.mean(losses)),
            "policy/grad_norm": float(np.mean(norms)),
            "policy/skipped_updates": float(skipped),
            "policy/learning_rate": float(self.scheduler.get_last_lr()[0]),
        }
        return UpdateStats(work.policy_logprobs, work.behaviour_logprobs, work.entropies, metrics)

    def _measure_behaviour(self, work: _Work) -> None:
        fresh = [i for i, row in enumerate(work.rows) if row.replayed is None]
        logprobs, _ = self._measure([work.forward[i] for i in fresh])
        for i, row_logprobs in zip(fresh, logprobs, strict=True):
            work.behaviour_logprobs[i] = row_logprobs

    def _backward(self, work: _Work, members: list[int], loss: MixedPolicyLoss) -> tuple[float, float]:
        """Accumulate the gradient of one optimiser step, clipped; returns loss and gradient norm before clipping."""
        lengths = torch.tensor([len(work.rows[i].token_ids) for i in members])
        weights = dict(zip(members, loss.row_weights(lengths).tolist(), strict=True))
        token_weight = 1 / int(lengths.sum())
        advantages = torch.tensor([work.rows[i].advantage for i in members])
        needs = dict(zip(members, loss.needs_gradient(advantages).tolist(), strict=True))
        # Rows without a gradient are measured all the same: their log-probs may be stored, their entropy is a metric.
        idle = [i for i in members if not needs[i]]
        for i, logprobs, entropy in zip(idle, *self._measure([work.forward[i] for i in idle]), strict=True):
            work.record(i, logprobs, entropy)
        active = [i for i in members if needs[i]]
        total = 0.0
        for part in micro_batches([work.forward[i] for i in active], self.settings.micro_batch_tokens):
            total += self._micro_step(work, [active[j] for j in part], weights, token_weight, loss)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optimizer_settings.max_grad_norm))
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
        self.model.train(self.settings.gradient_checkpointing)  # transformers checkpoints only in training mode
        logprobs, entropies = self.forward(forward)  # (T,), (T,)
        self.model.eval()
        measured = logprobs.detach().cpu().split(lengths)
        for i, row_logprobs, row_entropy in zip(part, measured, entropies.detach().split(lengths), strict=True):
            work.record(i, row_logprobs.numpy().copy(), float(row_entropy.mean()))

        def spread(values: list[Any], dtype: torch.dtype) -> torch.Tensor:  # one value per row → per token (T,)
            per_row = torch.tensor(values, dtype=dtype, device=self.device)
            return per_row.repeat_interleave(torch.tensor(lengths, device=self.device))

        reference = None
        if self.reference is not None:
            with torch.no_grad():
                reference, _ = self.reference(forward)
        value = loss(
            TokenBatch(
                logprobs=logprobs,
                entropies=entropies,
                behaviour_logprobs=torch.from_numpy(np.concatenate([work.behaviour_logprobs[i] for i in part])).to(
                    self.device
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

    # -- save ---------------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Hugging Face files in `folder`, optimiser and schedule in its subfolder trainer/."""
        self.model.generation_config = self._own_generation_config
        try:
            self.model.save_pretrained(folder)
        finally:
            self.model.generation_config = clean_generation_config(self.end, self.pad)
        self.tokenizer.save_pretrained(folder)
        (folder / "trainer").mkdir(exist_ok=True)
        state = {"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()}
        torch.save(state, folder / "trainer" / "optimizer.pt")

    def load(self, folder: Path) -> None:
        """Optimiser and schedule as saved; the weights come with the constructor's `weights_path`."""
        state = torch.load(folder / "trainer" / "optimizer.pt", map_location=self.device, weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


class _Work:
    """The rows of a batch and what has been measured of them so far."""

    def __init__(self, rows: list[Row], forward: list[ForwardRow]) -> None:
        self.rows, self.forward = rows, forward
        self.policy_logprobs: list[Any] = [None] * len(rows)
        self.behaviour_logprobs: list[Any] = [
            None if row.replayed is None else row.replayed.behaviour_logprobs for row in rows
        ]
        self.entropies = [0.0] * len(rows)

    def record(self, i: int, logprobs: np.ndarray, entropy: float) -> None:
        """A row measured in its own optimiser step. The only step of a batch sees the policy that sampled it."""
        self.policy_logprobs[i], self.entropies[i] = logprobs, entropy
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
            "policy_logprobs": self.policy_logprobs[i].tolist(),
            "behaviour_logprobs": self.behaviour_logprobs[i].tolist(),
        }
