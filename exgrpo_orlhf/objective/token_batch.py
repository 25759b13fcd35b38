"""The tokens that a loss is computed of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """The response tokens of some rows of an optimiser step, laid end to end: every tensor is (T,).

    logprobs, entropies: of the current policy; logprobs carry the gradient, entropies too where their bonus is on
    behaviour_logprobs: under the policy that made the token: stored for replayed rows, π_old for fresh ones
    advantages: of the token's row
    replayed: whether the row is a stored trajectory
    in_loss: False for the tokens of a row that could not be graded
    row_weights: `MixedPolicyLoss.row_weights` of the token's row
    token_weight: 1 / (response tokens of the whole optimiser step)
    row_of: int64, each token's row, counted from 0 in this batch, which holds all tokens of its rows
    mixed: whether the whole batch of rollouts, of which these may be a part, has a replayed row
    reference_logprobs: under the reference policy; needed only with a KL term
    preceding_logprobs: under the preceding policy π_{k−1}; needed only where base_share is below 1
    base_share: λ of this step, of the KL term to the reference (`ConvexKL.at`)
    old_logprobs: of replayed tokens under π_k, the policy before the batch's first optimiser step, where they are
        clipped around it; None: these are `logprobs`
    """

    logprobs: Tensor
    entropies: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    replayed: Tensor
    in_loss: Tensor
    row_weights: Tensor
    token_weight: float
    row_of: Tensor
    mixed: bool
    reference_logprobs: Tensor | None = None
    preceding_logprobs: Tensor | None = None
    base_share: float = 1.0
    old_logprobs: Tensor | None = None
