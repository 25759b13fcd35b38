"""MixedPolicyLoss in the place of OpenRLHF's PolicyLoss."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...objective import MixedPolicyLoss, TokenBatch

LARGEST_LOG_RATIO = 20.0  # a metric has to stay a finite number


@dataclass(frozen=True)
class RolloutCorrection:
    """OpenRLHF's train/rollout correction (its flags algo.advantage.is_correction_*), token by token.

    The trainer's π_old and the vLLM engine's π_rollout are the same weights and yet not quite the same policy. The gate
    looks at their ratio, or at a divergence of the sampled token, per token or in the mean of the sequence.
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
    """Called as OpenRLHF's PolicyLoss is, and normalised over the whole optimiser step.

    OpenRLHF's totals (`batch_num_tokens`) are those of the step over all ranks, divided by the number of micro-batches
    that DeepSpeed accumulates (gas), because DeepSpeed divides every micro-batch's loss by it; and the loss is
    multiplied by the number of ranks (dp_size), because gradients are averaged over them. Ours follow: `rows` are all
    rows of the step, those that could not be graded and what fills up a group to K too (OpenRLHF's own count leaves out
    empty ones).

    The entropy term stays OpenRLHF's (`aggregate_loss` over all response tokens), as on the local engine. OpenRLHF's KL
    term is a mean over tokens whatever the normaliser, so the KL term is computed here.
    """

    def __init__(
        self, loss: MixedPolicyLoss, rows: int, gas: int, single_step: bool, correction: RolloutCorrection
    ) -> None:
        """rows: of an optimiser step on all ranks; gas: micro-batches that DeepSpeed accumulates by itself

        single_step: a batch has one optimiser step, so its policy is the one that sampled: π_θ/π_old is 1 by
            definition. Between two forward passes of differently padded rows bfloat16 would make it 1 ± 0.1.
            `old_log_probs` are then those of replayed rows alone.
        """
        super().__init__()
        self.loss = replace(loss, entropy_coef=0.0)
        self.rows, self.gas, self.single_step, self.correction = rows, gas, single_step, correction
        self.replayed = torch.zeros(0, dtype=torch.bool)  # (R,) of the micro-batch that comes next
        self.reference: Tensor | None = None  # (R, A) log-probs of its tokens, with a KL term
        self.totals: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """A new batch: `totals` counts from here, on this rank."""
        self.totals = dict.fromkeys(("loss", "fresh_tokens", "clipped", "kl", "corrected", "gap"), 0.0)

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: Any = None,
        global_batch_size: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """(R, A) each. Returns what PolicyLoss returns: loss, clip ratio, KL, and of the correction KL and share."""
        mask = action_mask.bool()
        fresh = mask & ~self.replayed[:, None].to(mask.device)  # (R, A)
        tokens = float(batch_num_tokens) / dp_size
        old = torch.where(fresh, log_probs.detach(), old_log_probs) if self.single_step else old_log_probs
        weights = self.loss.row_weights(
            mask.sum(1).clamp(min=1),
            rows=self.rows / (self.gas * dp_size),
            tokens=tokens,
        )[:, None].expand_as(mask)
        correction, scaled = None, advantages
        if self.correction.level != "off":
            if rollout_log_probs is None:
                raise ValueError("algo.advantage.is_correction_level needs the vLLM engine's log-probs, there are none")
            correction = self.correction.weights(old, rollout_log_probs, mask)
            scaled = torch.where(fresh, advantages * correction, advantages)  # the policy's terms alone, never negative
        selected = log_probs[mask]
        loss = self.loss(
            TokenBatch(
                logprobs=selected,
                entropies=torch.zeros_like(selected),
                behaviour_logprobs=old[mask],
                advantages=scaled[mask],
                replayed=~fresh[mask],
                in_loss=torch.ones_like(selected, dtype=torch.bool),
                row_weights=weights[mask].to(selected.dtype),
                token_weight=1 / tokens,
                reference_logprobs=None if self.reference is None else self.reference[mask],
            )
        )
        gap = None if rollout_log_probs is None or correction is None else rollout_log_probs - old
        return self._count(loss, log_probs.detach() - old, advantages, fresh, gap, correction)

    def _count(
        self,
        loss: Tensor,
        log_ratio: Tensor,
        advantages: Tensor,
        fresh: Tensor,
        gap: Tensor | None,
        correction: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Sums over fresh tokens: what the clip takes away, and how far the policy is from the one that sampled.

        gap: the vLLM engine's log-probs less the trainer's, where a correction asked for them
        """
        tokens = int(fresh.sum())
        log_w = log_ratio[fresh].double()
        w = log_w.clamp(max=LARGEST_LOG_RATIO).exp()
        a = advantages[fresh]
        clipped = 0
        if self.loss.clip_low is not None and self.loss.clip_high is not None:
            clipped = int((((w > 1 + self.loss.clip_high) & (a > 0)) | ((w < 1 - self.loss.clip_low) & (a < 0))).sum())
        now = {
            "loss": float(loss.detach()) / self.gas,
            "fresh_tokens": tokens,
            "clipped": clipped,
            "kl": float((w - 1 - log_w).sum()),
        }
        vllm_kl = filtered = None
        if gap is not None and correction is not None:
            dropped = (correction[fresh] == 0).sum()
            now |= {"corrected": int(dropped), "gap": float(gap[fresh].abs().sum())}
            vllm_kl, filtered = gap[fresh].sum() / max(tokens, 1), dropped / max(tokens, 1)
        for name, value in now.items():
            self.totals[name] += value
        clip_ratio, kl = (torch.tensor(now[name] / max(tokens, 1), device=loss.device) for name in ("clipped", "kl"))
        return loss, clip_ratio, kl, vllm_kl, filtered


def update_metrics(totals: dict[str, float], ranks: int, steps: int, corrected: bool) -> dict[str, float]:
    """From `MixedLoss.totals` summed over all ranks to the metrics of an update.

    corrected: with a train/rollout correction also the mean distance of the engines' log-probs from the trainer's,
        which shows weights that did not arrive, and the share of tokens that it filtered out
    """
    tokens = max(totals["fresh_tokens"], 1)
    filtered = totals["corrected"] / tokens
    return {
        "policy/loss": totals["loss"] / ranks / steps,  # every rank's share was multiplied by their number
        "policy/clip_share": totals["clipped"] / tokens,
        "policy/approx_kl": totals["kl"] / tokens,
        **({"rollout/logprob_gap": totals["gap"] / tokens, "rollout/filtered_share": filtered} if corrected else {}),
    }
