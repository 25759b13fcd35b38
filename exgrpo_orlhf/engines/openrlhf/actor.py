"""OpenRLHF's policy actor with the mixed-policy loss, and with a forward pass that makes no logits.

Imported where OpenRLHF can be: with CUDA, or after cpu.install().
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from openrlhf.models import Actor
from openrlhf.trainer.ray import ppo_actor
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer, PolicyModelActor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from ...objective import MixedPolicyLoss, token_stats
from ..rows import ForwardRow
from .gradient_guard import GradientGuard
from .policy_loss import MixedLoss, RolloutCorrection, update_metrics

_EVERYTHING = 10**9  # checkpoints, GiB: OpenRLHF's rotation never removes anything, checkpoints.py does


@dataclass(frozen=True, repr=False)
class ActorSettings:
    """What the policy actors need of an experiment; travels as `args.exgrpo`."""

    loss: MixedPolicyLoss
    skip_above_grad_norm: float | None


class MixedActorTrainer(ActorPPOTrainer):
    """OpenRLHF's actor trainer: its loss is MixedLoss, everything around it is OpenRLHF's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        advantage = self.args.algo.advantage
        self.actor_loss_fn = MixedLoss(
            self.args.exgrpo.loss,
            rows=self.args.train.batch_size,
            # With dynamic batches OpenRLHF itself says when a step ends, and DeepSpeed divides by nothing.
            gas=1 if self.args.train.dynamic_batch_enable else self.strategy.accumulated_gradient,
            single_step=self.args.train.max_epochs == 1
            and self.args.train.batch_size == self.args.rollout.batch_size * self.args.rollout.n_samples_per_prompt,
            correction=RolloutCorrection(
                advantage.is_correction_level,
                advantage.is_correction_mode,
                advantage.is_correction_gating,
                tuple(advantage.is_correction_threshold),
            ),
        )
        self.recorded: dict[int, tuple[np.ndarray, float]] = {}

    def training_step(self, experience: Any, kl_ctl: float, step: int, loss_batch_info: Any = None) -> dict[str, Any]:
        self.actor_loss_fn.replayed = _flags(experience.info, "replayed")
        self.actor_loss_fn.reference = experience.base_action_log_probs
        # A row that could not be graded: none of its tokens is in the loss, though the normaliser has counted them.
        in_loss = _flags(experience.info, "in_loss").to(experience.action_mask.device)
        experience.action_mask = experience.action_mask * in_loss[:, None].to(experience.action_mask.dtype)
        if self.args.train.dynamic_batch_enable:
            # With dynamic batches OpenRLHF 0.11.2 sets DeepSpeed's gradient_accumulation_steps to 1 and calls backward
            # once for each micro-batch. ZeRO-1 and 2 then take every backward pass for the last of its optimiser step
            # and overwrite the gradient: only the last micro-batch would count, and the loss would not show it
            # (OpenRLHF's issue 1131). So DeepSpeed is told which pass is the last.
            self.actor.model.set_gradient_accumulation_boundary(bool(self.replay_buffer.dynamic_optimizer_step[step]))
        # OpenRLHF's own KL term is measured and not added: ours is in the loss, by its normaliser.
        status = super().training_step(experience, 0.0, step, loss_batch_info)
        if self.actor_loss_fn.single_step:
            self._record(experience)
        # OpenRLHF divides its metrics by the tokens of a micro-batch, and a micro-batch may be one ungradable row or
        # what fills up a group.
        if not status["num_action_tokens"] and "logprobs_diff" in status["metrics"]:
            status["metrics"]["logprobs_diff"] = 0.0
        return {**status, "num_action_tokens": max(status["num_action_tokens"], 1.0)}

    def _record(self, experience: Any) -> None:
        """Log-probs, float32 (T,), and mean entropy of each row that has a token in the loss, from the forward pass of
        the update. Rows that could not be graded and those that fill up a group have none."""
        in_loss = experience.action_mask.bool().cpu()  # (R, A)
        log_probs, entropies = (values.float().cpu() for values in self.actor.latest)
        for label, tokens, *values in zip(experience.labels, in_loss, log_probs, entropies, strict=True):
            if tokens.any():
                row_log_probs, row_entropies = (row[tokens] for row in values)
                self.recorded[int(label)] = row_log_probs.numpy(), float(row_entropies.mean())


def _flags(info: dict[str, Any], name: str) -> torch.Tensor:
    """A per-row flag, (R,) bool: OpenRLHF makes a tensor or a list of per-row tensors of it on the way."""
    values = info[name]
    return (values if isinstance(values, torch.Tensor) else torch.stack([torch.as_tensor(v) for v in values])).bool()


class MixedActor(Actor):
    """OpenRLHF's model wrapper without logits: of N response tokens and a vocabulary of V, N × V floats never exist.

    The output layer computes each response token's log-prob and entropy, and the model hands them on as if they were
    its logits. So the layer is entered and left like any other, and ZeRO-3 gathers its weight for both passes.
    """

    def forward(
        self,
        sequences: torch.Tensor,
        action_mask: torch.Tensor,
        attention_mask: torch.Tensor,
        return_output: bool = False,
        ring_attn_group: None = None,
        packed_seq_lens: None = None,
        return_entropy: bool = False,
    ) -> Any:
        """sequences and attention_mask (B, S); action_mask (B, S−1), which at t says whether token t+1 is a response's.

        Returns log-probs (B, S−1) at the sampling temperature, 0 outside the mask; with `return_output` also the
        model's output, whose `entropy` is (B, S−1) at temperature 1, with a gradient if `return_entropy`.
        """
        predicts = torch.nn.functional.pad(action_mask.bool(), (0, 1))  # (B, S)
        targets = sequences.roll(-1, dims=1)[predicts]
        positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        mask: torch.Tensor | None = attention_mask
        inside = predicts
        if self.packing_samples:  # all rows in one; where the positions begin again a row begins, and sees no other
            real, mask = attention_mask.bool(), None
            sequences, positions, inside = (x[real][None] for x in (sequences, positions, predicts))
        head = self.model.module.get_output_embeddings()  # of the model inside DeepSpeed's engine

        def stats(hidden: torch.Tensor) -> torch.Tensor:
            bias = None if head.bias is None else head.bias.to(hidden.dtype)
            weight = head.weight.to(hidden.dtype)
            log_probs, entropies = token_stats(hidden[inside], weight, targets, bias=bias, temperature=self.temperature)
            return torch.stack((log_probs, entropies if return_entropy else entropies.detach()), -1)  # (N, 2)

        head.forward = stats
        try:
            output = self.model(sequences, attention_mask=mask, position_ids=positions, use_cache=False)
        finally:
            del head.forward
        found = output["logits"]

        def spread(values: torch.Tensor) -> torch.Tensor:
            return torch.zeros(predicts.shape, device=values.device).masked_scatter(predicts, values)[:, :-1]

        log_probs = spread(found[:, 0])
        if not return_output:
            return log_probs
        output.entropy = spread(found[:, 1])
        self.latest = log_probs.detach(), output.entropy.detach()  # OpenRLHF's training step hands on neither
        return log_probs, output


class InOrder(DataLoader):
    """OpenRLHF shuffles the rows of a batch, from a generator that no checkpoint has. Ours come as they were dealt."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "shuffle": False})


class MixedPolicyActor(PolicyModelActor.__ray_metadata__.modified_class):  # type: ignore[name-defined, misc]
    """Ray forbids subclassing an actor class; the class under it is fine."""

    def init_model_from_pretrained(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        # Globals, looked up below.
        ppo_actor.ActorPPOTrainer, ppo_actor.Actor, ppo_actor.DataLoader = MixedActorTrainer, MixedActor, InOrder
        super().init_model_from_pretrained(strategy, *args, **kwargs)
        if self.ema_model and strategy.args.ckpt.load_enable:  # OpenRLHF begins it again at the first model
            saved = AutoModelForCausalLM.from_pretrained(strategy.args.ckpt.path, dtype="auto").state_dict()
            strategy._unwrap_model(self.ema_model).load_state_dict(saved)
        self.guard = GradientGuard(
            self.actor.model.optimizer, strategy.args.ds.zero_stage, strategy.args.exgrpo.skip_above_grad_norm
        )

    def measure(self, rows: Sequence[ForwardRow]) -> tuple[list[np.ndarray], list[float]]:
        """Log-probs (float32 (T,), sampling temperature) and mean entropy (nats, temperature 1) of each response."""
        device = torch.cuda.current_device()
        sequences, responses, attention = (part.to(device) for part in padded(rows))
        self.actor.eval()
        with torch.no_grad():
            log_probs, output = self.actor(sequences, responses[:, 1:], attention, return_output=True)
        self.actor.train()
        measured = [
            (log_probs[i, len(row.prompt) - 1 : len(row) - 1], output.entropy[i, len(row.prompt) - 1 : len(row) - 1])
            for i, row in enumerate(rows)
        ]
        return [part.cpu().numpy().copy() for part, _ in measured], [float(part.mean()) for _, part in measured]

    def fit(self, kl_ctl: float = 0) -> dict[str, Any]:
        """OpenRLHF's update of the batch that was appended; its status and our metrics, the same on every rank."""
        loss = self.trainer.actor_loss_fn
        loss.begin()
        self.guard.begin()
        self.trainer.recorded = {}
        status = super().fit(kl_ctl)
        totals = self.strategy.all_reduce(dict(loss.totals), op="sum")
        norms = self.guard.norms
        return {
            **status,
            **update_metrics(totals, self.strategy.world_size, len(norms), loss.correction.level != "off"),
            "policy/grad_norm": float(np.mean(norms)),
            "policy/skipped_updates": float(self.guard.skipped),
            "policy/learning_rate": self.guard.rate,
        }

    def recorded(self) -> dict[int, tuple[np.ndarray, float]]:
        """Of the rows of this rank, by their place in the batch, what the latest `fit` recorded: log-probs (float32
        (T,), sampling temperature) and mean entropy (nats, temperature 1) in its only pass. Of several passes none."""
        return self.trainer.recorded

    def save_state(self, folder: str, step: int) -> None:
        """Hugging Face files in `folder`, DeepSpeed's in its subfolder _actor, where OpenRLHF looks for them."""
        args = self.strategy.args
        self.strategy.save_ckpt(
            self.actor.model,
            str(Path(folder) / "_actor"),
            f"global_step{step}",
            _EVERYTHING,
            _EVERYTHING,
            {"global_step": step},
        )
        self.strategy.save_model(self.ema_model if args.train.enable_ema else self.actor, self.tokenizer, folder)

    def save_model(self) -> None:
        """At the end OpenRLHF saves the model; the last checkpoint is that already."""


def padded(rows: Sequence[ForwardRow]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, which of them are a response's, and which are there at all: (R, W), padded on the right."""
    shape = len(rows), max(map(len, rows))
    ids, responses, attention = (np.zeros(shape, np.int64) for _ in range(3))
    for i, row in enumerate(rows):
        prompt, length = len(row.prompt), len(row)
        ids[i, :prompt], ids[i, prompt:length] = row.prompt, row.response
        responses[i, prompt:length] = attention[i, :length] = 1
    return torch.from_numpy(ids), torch.from_numpy(responses), torch.from_numpy(attention)
