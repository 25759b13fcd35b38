"""OpenRLHF's policy actor with the mixed-policy loss, and with a forward pass that scores responses.

Imported where OpenRLHF can be: with CUDA, or after cpu.install().
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from openrlhf.trainer.ray import ppo_actor
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer, PolicyModelActor
from openrlhf.utils.loss_utils import get_loss_batch_info

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

    def training_step(self, experience: Any, kl_ctl: float, step: int, loss_batch_info: Any = None) -> dict[str, Any]:
        if loss_batch_info is None:  # dynamic batches; before the mask changes, for every response token counts
            loss_batch_info = get_loss_batch_info(
                self.strategy,
                experience.action_mask,
                replay_buffer=self.replay_buffer,
                step=step,
                dynamic_batch=self.args.train.dynamic_batch_enable,
            )
        self.actor_loss_fn.replayed = _flags(experience.info, "replayed")
        # A row that could not be graded: none of its tokens is in the loss, though the normaliser has counted them.
        in_loss = _flags(experience.info, "in_loss").to(experience.action_mask.device)
        experience.action_mask = experience.action_mask * in_loss[:, None].to(experience.action_mask.dtype)
        return super().training_step(experience, kl_ctl, step, loss_batch_info)


def _flags(info: dict[str, Any], name: str) -> torch.Tensor:
    """A per-row flag, (R,) bool: OpenRLHF makes a tensor or a list of per-row tensors of it on the way."""
    values = info[name]
    return (values if isinstance(values, torch.Tensor) else torch.stack([torch.as_tensor(v) for v in values])).bool()


@contextmanager
def stats_in_place_of_logits(
    head: torch.nn.Module, predicts: torch.Tensor, targets: torch.Tensor, temperature: float
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """While a model runs forward, its output layer computes log-probs and entropies instead of logits.

    predicts: (B, S) bool, the positions whose hidden state predicts a response token; targets: (N,) those tokens
    The list that this yields then holds one pair (N,), (N,). The output layer is entered as always, so ZeRO-3 gathers
    its weight; the logits, N × V numbers, never exist. Without gradient only.
    """
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        bias = head.bias.to(hidden.dtype) if head.bias is not None else None
        weight = head.weight.to(hidden.dtype)
        found.append(token_stats(hidden[predicts], weight, targets, bias=bias, temperature=temperature))
        return hidden.new_zeros((*hidden.shape[:-1], 1))  # in the logits' place; nobody looks

    head.forward = forward  # type: ignore[method-assign]
    try:
        yield found
    finally:
        del head.forward


class MixedPolicyActor(PolicyModelActor.__ray_metadata__.modified_class):  # type: ignore[name-defined, misc]
    """Ray forbids subclassing an actor class; the class under it is fine."""

    def init_model_from_pretrained(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        ppo_actor.ActorPPOTrainer = MixedActorTrainer  # a global of that module, looked up below
        super().init_model_from_pretrained(strategy, *args, **kwargs)
        self.guard = GradientGuard(
            self.actor.model.optimizer, strategy.args.ds.zero_stage, strategy.args.exgrpo.skip_above_grad_norm
        )

    def measure(self, rows: Sequence[ForwardRow]) -> tuple[list[np.ndarray], list[float]]:
        """Log-probs (float32 (T,), sampling temperature) and mean entropy (nats, temperature 1) of each response."""
        device = torch.cuda.current_device()
        layout = packed if self.strategy.args.ds.packing_samples else padded
        ids, mask, positions, predicts = (None if t is None else t.to(device) for t in layout(rows))
        targets = torch.from_numpy(np.concatenate([row.response for row in rows])).to(device, torch.long)
        model = self.actor.model
        head = model.module.get_output_embeddings()
        model.eval()
        with torch.no_grad(), stats_in_place_of_logits(head, predicts, targets, self.actor.temperature) as found:
            model(ids, attention_mask=mask, position_ids=positions, use_cache=False)
        model.train()
        ((logprobs, entropies),) = found
        lengths = [len(row.response) for row in rows]
        return (
            [part.numpy().copy() for part in logprobs.cpu().split(lengths)],
            [float(part.mean()) for part in entropies.split(lengths)],
        )

    def fit(self, kl_ctl: float = 0) -> dict[str, Any]:
        """OpenRLHF's update of the batch that was appended; its status and our metrics, the same on every rank."""
        loss = self.trainer.actor_loss_fn
        loss.begin()
        self.guard.begin()
        status = super().fit(kl_ctl)
        totals = self.strategy.all_reduce(dict(loss.totals), op="sum")
        norms = self.guard.norms
        return {
            **status,
            **update_metrics(totals, self.strategy.world_size, loss.correction.level != "off"),
            "policy/grad_norm": float(np.mean(norms)),
            "policy/skipped_updates": float(self.guard.skipped),
            "policy/learning_rate": self.guard.rate,
        }

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


def padded(rows: Sequence[ForwardRow]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, attention mask, positions and `predicts`, each (R, W), padded on the right.

    The hidden state before a token predicts it: for a prompt of P tokens, positions P−1 … P+T−2 of the row.
    """
    width = max(map(len, rows))
    ids = np.zeros((len(rows), width), np.int64)
    mask, predicts = np.zeros_like(ids), np.zeros(ids.shape, bool)
    for i, row in enumerate(rows):
        prompt, length = len(row.prompt), len(row)
        ids[i, :prompt], ids[i, prompt:length] = row.prompt, row.response
        mask[i, :length] = 1
        predicts[i, prompt - 1 : length - 1] = True
    positions = np.broadcast_to(np.arange(width), ids.shape).copy()
    return tuple(map(torch.from_numpy, (ids, mask, positions, predicts)))  # type: ignore[return-value]


def packed(rows: Sequence[ForwardRow]) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor]:
    """The same with all rows in one, (1, N): where the positions begin again, a row begins that sees no other."""
    ids, mask, positions, predicts = padded(rows)
    real = mask.bool()
    return ids[real][None], None, positions[real][None], predicts[real][None]
