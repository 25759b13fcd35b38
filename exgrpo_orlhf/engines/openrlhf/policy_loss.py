"""MixedPolicyLoss in the place of OpenRLHF's PolicyLoss."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...objective import MixedPolicyLoss, TokenBatch

LARGEST_LOG_RATIO = 20.0  # of the metrics, which must stay finite


@dataclass(frozen=True)
class RolloutCorrection:
    """OpenRLHF's train/rollout correction (its flags algo.advantage.is_correction_*), token by token.

    The trainer's π_old and the vLLM engine's π_rollout have the same weights but differ by rounding. The gate compares
    their ratio, or a divergence at the sampled token, per token or in the mean of the sequence, with the threshold.
    """

    level: str = "off"
    mode: str = "mask"
    gating: str = "ratio"
    threshold: tuple[float, float] = (0.5, 5.0)

    def weights(self, old: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
        """(R, A) log-probs of both, response mask → (R, A) factor of each token's loss; 0 where it is filtered out."""
        low, high = self.threshold
        log_ratio = torch.where(mask, old - rollout, 0)
        if self.gating == "ratio":
            statistic = log_ratio
        else:
            # A single token's probabilities, kept off 0 and 1 as OpenRLHF does, so that the logs are finite.
            p, q = (torch.where(mask, x, -1.0).exp().clamp(1e-6, 1 - 1e-6) for x in (rollout, old))
            binary_kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
            statistic = binary_kl if self.gating == "binary_kl" else (p - q).abs()
        if self.level == "seq":
            lengths = mask.sum(1, keepdim=True).clamp(min=1)
            statistic = (torch.where(mask, statistic, 0).sum(1, keepdim=True) / lengths).expand_as(mask)
        if self.gating == "ratio":
            statistic = statistic.exp()
        if self.mode == "clip":
            return statistic.clamp(low, high)
        return torch.where((statistic >= low) & (statistic <= high), log_ratio.exp(), 0)


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
        self,
        loss: MixedPolicyLoss,
        rows: int,
        gas: int,
        single_step: bool,
        correction: RolloutCorrection,
        ahead: bool = False,
    ) -> None:
        """rows: of an optimiser step on all ranks; gas: micro-batches that DeepSpeed accumulates by itself

        single_step: whether a batch has a single optimiser step. The policy is then the one that sampled, and π_θ/π_old
            is 1 by definition; between two forward passes of differently padded rows bfloat16 would make it 1 ± 0.1. Of
            `old_log_probs` only those of replayed rows are then used.
        ahead: whether batches are generated ahead: the policy has changed since, and π_old is what `old_log_probs` says
        """
        super().__init__()
        self.loss = replace(loss, entropy_coef=0.0)
        self.rows, self.gas, self.single_step, self.correction = rows, gas, single_step, correction
        self.ahead = ahead
        self.replayed = torch.zeros(0, dtype=torch.bool)  # (R,) of the micro-batch that comes next
        self.reference: Tensor | None = None  # (R, A) log-probs of its tokens, with a KL term
        self.totals: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """Begins a new batch: resets `totals`, which this rank sums over its micro-batches."""
        self.totals = dict.fromkeys(("loss", "fresh_tokens", "clipped", "truncated", "kl", "corrected", "gap"), 0.0)

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
        correction = torch.ones_like(advantages)
        if self.correction.level != "off":
            correction = self.correction.weights(old, rollout_log_probs, mask)
        selected = log_probs[mask]
        row_of = torch.arange(len(mask), device=mask.device)[:, None].expand_as(mask)
        loss = self.loss(
            TokenBatch(
                logprobs=selected,
                entropies=torch.zeros_like(selected),
                behaviour_logprobs=old[mask],
                # The correction is of fresh rows only; it is never negative.
                advantages=torch.where(fresh, advantages * correction, advantages)[mask],
                replayed=~fresh[mask],
                in_loss=torch.ones_like(selected, dtype=torch.bool),
                row_weights=weights[:, None].expand_as(mask)[mask].to(selected.dtype),
                token_weight=1 / tokens,
                row_of=row_of[mask],
                reference_logprobs=None if self.reference is None else self.reference[mask],
            )
        )
        gap = rollout_log_probs - old
        counted = (log_probs.detach() - old, row_of, advantages, gap, correction)
        return self._count(loss, *(x[fresh] for x in counted))

    def _count(
        self, loss: Tensor, log_w: Tensor, row_of: Tensor, advantages: Tensor, gap: Tensor, correction: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Adds to `totals`, over fresh tokens (T,): whose gradient the clip removes, and the distance from π_old.
        gap: the vLLM engine's log-probs minus the trainer's"""
        tokens = max(len(log_w), 1)
        w = log_w.double().clamp(max=LARGEST_LOG_RATIO).exp()
        ratio = self.loss.fresh_log_ratio(log_w.double(), row_of).clamp(max=LARGEST_LOG_RATIO).exp()
        clipped = truncated = 0
        if self.loss.max_fresh_weight is not None:
            truncated = int((ratio > self.loss.max_fresh_weight).sum())
            ratio = ratio.clamp(max=self.loss.max_fresh_weight)  # as in the loss: before the clip
        if self.loss.clip_low is not None and self.loss.clip_high is not None:
            above, below = ratio > 1 + self.loss.clip_high, ratio < 1 - self.loss.clip_low
            clipped = int(((above & (advantages > 0)) | (below & (advantages < 0))).sum())
        now = {
            "loss": float(loss.detach()) / self.gas,
            "fresh_tokens": len(log_w),
            "clipped": clipped,
            "truncated": truncated,
            "kl": float((w - 1 - log_w.double()).sum()),
            "corrected": int((correction == 0).sum()),
            "gap": float(gap.abs().sum()),
        }
        for name, value in now.items():
            self.totals[name] += value
        clip_ratio, kl = (torch.tensor(now[name] / tokens, device=loss.device) for name in ("clipped", "kl"))
        if self.correction.level == "off":
            return loss, clip_ratio, kl, None, None
        return loss, clip_ratio, kl, gap.sum() / tokens, (correction == 0).sum() / tokens


def update_metrics(
    totals: dict[str, float], ranks: int, steps: int, corrected: bool, truncates: bool
) -> dict[str, float]:
    """The metrics of an update.

    Args:
        totals: `MixedLoss.totals`, summed over all ranks
        corrected: whether there is a train/rollout correction. If so, the metrics include the mean distance of the
            engines' log-probs from the trainer's (a weight sync that failed shows there) and the share of tokens that
            the correction filtered out
        truncates: whether weights of fresh tokens have an upper bound
    """
    tokens = max(totals["fresh_tokens"], 1)
    filtered = totals["corrected"] / tokens
    return {
        "policy/loss": totals["loss"] / ranks / steps,  # every rank's share was multiplied by their number
        "policy/clip_share": totals["clipped"] / tokens,
        "policy/approx_kl": totals["kl"] / tokens,
        **({"policy/truncated_share": totals["truncated"] / tokens} if truncates else {}),
        **({"rollout/logprob_gap": totals["gap"] / tokens, "rollout/filtered_share": filtered} if corrected else {}),
    }
