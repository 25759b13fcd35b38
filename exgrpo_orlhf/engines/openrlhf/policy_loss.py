"""MixedPolicyLoss instead of OpenRLHF's PolicyLoss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...objective import MixedPolicyLoss, TokenBatch


class MixedLoss(nn.Module):
    """Takes the arguments of OpenRLHF's PolicyLoss, and normalises over the whole optimiser step.

    OpenRLHF's totals (`batch_num_tokens`) are those of the step over all ranks, divided by the number of micro-batches
    that DeepSpeed accumulates (gas), because DeepSpeed divides every micro-batch's loss by it. The loss is multiplied
    by the number of ranks (dp_size), because gradients are averaged over them. Our normaliser follows this: `rows`
    counts all rows of the step, also those that could not be graded and those that fill up a group to K (OpenRLHF's own
    count leaves out empty rows).

    The entropy term stays OpenRLHF's (`aggregate_loss` over all response tokens), as on the local engine. OpenRLHF's KL
    term is a mean over tokens whatever the normaliser, so the KL term is computed here.
    """

    def __init__(
        self, loss: MixedPolicyLoss, rows: int, gas: int, single_step: bool, openrlhf_loss: Any, ahead: bool = False
    ) -> None:
        """rows: of an optimiser step on all ranks, K for each group
        gas: micro-batches that DeepSpeed accumulates by itself
        single_step: whether a batch has a single optimiser step. The policy is then the one that sampled, and π_θ/π_old
            is 1 by definition; between two forward passes of differently padded rows bfloat16 would make it 1 ± 0.1. Of
            `old_log_probs` only those of replayed rows are then used.
        openrlhf_loss: its PolicyLoss, which knows the train/rollout correction (flags algo.advantage.is_correction_*)
        ahead: whether batches are generated ahead: the policy has changed since, and π_old is what `old_log_probs`
            says. The flag of the correction is then on only so that vLLM gives its log-probs, by which the rows are
            weighed already.
        """
        super().__init__()
        self.loss = replace(loss, entropy_coef=0.0)
        self.rows, self.gas, self.openrlhf_loss = rows, gas, openrlhf_loss
        self.single_step, self.ahead = single_step, ahead
        self.corrects = openrlhf_loss.is_correction_level != "off" and not ahead
        self.replayed = torch.zeros(0, dtype=torch.bool)  # (R,) of the micro-batch that comes next
        self.weights: Tensor | None = None  # (R,) `Row.weight` of them; None: 1
        self.mixed = False  # whether the whole batch has a replayed row, on whatever rank
        # (R, A) log-probs of its tokens: with a KL term, with one to the preceding policy, with a clip around π_k
        self.reference: Tensor | None = None
        self.preceding: Tensor | None = None
        self.before: Tensor | None = None
        self.base_share = 1.0  # λ
        self.totals: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """Begins a new batch: resets `totals`, which this rank sums over its micro-batches."""
        self.totals = {"loss": 0.0, **self.loss.fresh_sums((), False), "filtered": 0.0, "gap": 0.0}

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor,
        rollout_log_probs: Tensor,
        dp_size: int,
        batch_num_tokens: Any,
        global_batch_size: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Tensors are (R, A). Returns what PolicyLoss does: loss, clip ratio, KL, and the correction's KL and share."""
        mask = action_mask.bool()
        fresh = mask & ~self.replayed[:, None].to(mask.device)  # (R, A)
        tokens = float(batch_num_tokens) / dp_size
        old = old_log_probs
        if self.single_step and not self.ahead:
            old = torch.where(fresh, log_probs.detach(), old)
        lengths = mask.sum(1).clamp(min=1)
        weights = self.loss.row_weights(lengths, rows=self.rows / (self.gas * dp_size), tokens=tokens)
        if self.weights is not None:
            weights = weights * self.weights.to(weights.device)
        # The correction is of fresh rows only; it is never negative.
        factors = self._correction(old, rollout_log_probs, mask) if self.corrects else torch.ones_like(advantages)
        selected = log_probs[mask]
        loss = self.loss(
            TokenBatch(
                logprobs=selected,
                entropies=torch.zeros_like(selected),
                behaviour_logprobs=old[mask],
                advantages=torch.where(fresh, advantages * factors, advantages)[mask],
                replayed=~fresh[mask],
                in_loss=torch.ones_like(selected, dtype=torch.bool),
                row_weights=weights[:, None].expand_as(mask)[mask].to(selected.dtype),
                token_weight=1 / tokens,
                row_of=torch.arange(len(mask), device=mask.device)[:, None].expand_as(mask)[mask],
                mixed=self.mixed,
                reference_logprobs=None if self.reference is None else self.reference[mask],
                preceding_logprobs=None if self.preceding is None else self.preceding[mask],
                base_share=self.base_share,
                old_logprobs=None if self.before is None else self.before[mask],
            )
        )
        values = [x.detach().cpu().numpy() for x in (fresh, advantages, log_probs, old)]
        rows = [(float(a[f][0]), now[f], past[f]) for f, a, now, past in zip(*values, strict=True) if f.any()]
        gap, filtered = (rollout_log_probs - old)[fresh], (factors == 0)[fresh]
        sums = {
            "loss": float(loss.detach()) / self.gas,
            **self.loss.fresh_sums(rows, self.mixed),
            "filtered": float(filtered.sum()),
            "gap": float(gap.abs().sum()),
        }
        for name, value in sums.items():
            self.totals[name] += value
        count = max(sums["tokens"], 1)
        clip_ratio, kl = (torch.tensor(sums[name] / count, device=loss.device) for name in ("clipped", "kl"))
        corrected = (gap.sum() / count, filtered.sum() / count) if self.corrects else (None, None)
        return loss, clip_ratio, kl, *corrected

    def _correction(self, old: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
        """(R, A) log-probs under the trainer's π_old and the vLLM engine's π_rollout, which have the same weights but
        differ by rounding, and response mask → (R, A) OpenRLHF's factor of each token's loss; 0 where it is filtered
        out. At π_θ = π_old OpenRLHF's loss is −Σ factor · A."""
        units = torch.ones_like(old, requires_grad=True)
        old, rollout = (torch.where(mask, x, 0) for x in (old, rollout))
        with torch.enable_grad():
            value, *_ = self.openrlhf_loss(old, old, units, mask.to(old.dtype), rollout, 1, 1.0, 1.0)
        return -torch.autograd.grad(value, units)[0]

    def metrics(self, totals: Mapping[str, float], ranks: int, steps: int) -> dict[str, float]:
        """Of an update. With a train/rollout correction they include the mean distance of the engines' log-probs from
        the trainer's (a weight sync that failed shows there) and the share of tokens that were filtered out.

        totals: `totals`, summed over all ranks
        """
        tokens = max(totals["tokens"], 1)
        metrics = {"policy/loss": totals["loss"] / ranks / steps}  # every rank's share was multiplied by their number
        if self.corrects:
            metrics["rollout/logprob_gap"] = totals["gap"] / tokens
            metrics["rollout/filtered_share"] = totals["filtered"] / tokens
        return metrics | self.loss.fresh_metrics(totals)
