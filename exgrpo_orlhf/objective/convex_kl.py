"""The KL term: to a reference policy, or a convex sum of that and one to the preceding policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..checks import Count, Natural, Share, check_settings
from ..io.lazy import torch
from .token_batch import TokenBatch

if TYPE_CHECKING:
    from torch import Tensor

# The KL estimate grows as e^x: a token that the policy almost excludes and the reference does not would outweigh all
# others, with e^12 for 12 nats.
# The bound is OpenRLHF's and verl's; above it a token has no gradient of the KL term.
KL_BOUND = 10.0


@dataclass(frozen=True)
class ConvexKL:
    """KL-Convex (ReMix, arXiv 2507.06892): in step t, which makes π_{k+1} of π_k, the KL term is:

        λ·KL(π_θ‖π_ref) + (1−λ)·KL(π_θ‖π_{k−1}),   λ(t) = max(1 − fall·⌈max(t − constant_steps, 0)/every⌉, lowest)

    π_{k−1} is the policy before the update of step t−1; in the first step it is the policy itself.

    constant_steps: steps in which λ = 1
    every: steps after which λ falls again
    fall: of λ each time
    lowest: λ at the end
    """

    constant_steps: Natural = 50
    every: Count = 10
    fall: Share = 0.1
    lowest: Share = 0.5

    def __post_init__(self) -> None:
        check_settings(ConvexKL, vars(self))

    def at(self, step: int) -> float:
        """λ of a step, counted from 1."""
        return max(1 - self.fall * -(-max(step - self.constant_steps, 0) // self.every), self.lowest)


def kl_of(batch: TokenBatch) -> Tensor:
    """(T,) of each token, nats. Raises ValueError without the log-probs that it needs."""
    if batch.reference_logprobs is None or (batch.base_share < 1 and batch.preceding_logprobs is None):
        raise ValueError("MixedPolicyLoss.kl_coef > 0 needs the reference's log-probs, kl_convex those of π_{k−1} too")
    kl = _estimate(batch.reference_logprobs, batch)
    if batch.base_share == 1 or batch.preceding_logprobs is None:
        return kl
    return batch.base_share * kl + (1 - batch.base_share) * _estimate(batch.preceding_logprobs, batch)


def _estimate(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    x = torch.where(batch.in_loss, logprobs - batch.logprobs, 0)
    x = x.clamp(max=KL_BOUND)  # before exp, or the clamped side's gradient would be 0 · inf
    return (torch.exp(x) - x - 1).clamp(max=KL_BOUND)
