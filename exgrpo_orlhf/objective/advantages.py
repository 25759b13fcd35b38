"""Group-relative advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from ..checks import check_settings, require
from ..io.lazy import torch
from ..rounding import ROUNDING

if TYPE_CHECKING:
    from torch import Tensor

STD_EPSILON = 1e-6


@dataclass(frozen=True)
class GroupAdvantages:
    """A = r − mean(r) over the group.

    Without the std (the default) this is Dr. GRPO (arXiv 2503.20783) and what ExGRPO uses: dividing by the std weighs
    questions by how lopsided their group is.

    scale_by_std: A is divided by std(r) + 1e-6 (GRPO, arXiv 2402.03300)
    baseline: 'mean', or the mean of the group's others, 'leave_one_out' (RLOO, arXiv 2402.14740): A·n/(n − 1)
    std_over: with `scale_by_std`, the std of each 'group', or of all rewards of the 'batch' (arXiv 2508.08221)
    of_each_reward: with `scale_by_std` and Verifier.rewards: of each reward by itself, and then of their weighted sum
        over the batch, so that a reward of small spread counts too (GDPO, arXiv 2601.05242; in TRL normalize_then_sum).
        False: of the weighted sum of the rewards
    """

    scale_by_std: bool = False
    baseline: Literal["mean", "leave_one_out"] = "mean"
    std_over: Literal["group", "batch"] = "group"
    of_each_reward: bool = False

    def __post_init__(self) -> None:
        check_settings(GroupAdvantages, vars(self))
        require(
            self.scale_by_std or self.std_over == "group",
            "GroupAdvantages.std_over = 'batch' needs GroupAdvantages.scale_by_std = True",
        )
        require(
            not self.of_each_reward or (self.scale_by_std and self.std_over == "group"),
            "GroupAdvantages.of_each_reward needs scale_by_std = True and std_over = 'group': without the std of each, "
            "the sum of the advantages is that of the summed reward",
        )

    def __call__(self, rewards: npt.NDArray[np.float64] | Tensor, gradable: npt.NDArray[np.bool_] | Tensor) -> Tensor:
        """(G, K) rewards and which of them are rewards at all → float64 (G, K) advantages.

        A row that could not be graded is outside the mean and gets 0; so does every row of a group with fewer than two
        gradable rows. The std is the sample's (n − 1).
        """
        r, ok = torch.as_tensor(rewards, dtype=torch.float64), torch.as_tensor(gradable)
        if r.shape != ok.shape or r.ndim != 2:
            raise ValueError(f"rewards and gradable must both be (groups, K), got {tuple(r.shape)}, {tuple(ok.shape)}")
        n = ok.sum(1, keepdim=True, dtype=torch.float64)  # of integers, n / (n - 1) would be float32
        # Relative to a reward of the group, so that equal rewards give exactly 0 whatever they are: 0.1 + 0.1 + 0.1 is
        # not 3 · 0.1, and a row whose advantage is not 0 costs a backward pass. The std would scale up their rounding.
        first = r.gather(1, ok.to(torch.int8).argmax(1, keepdim=True))
        r = torch.where(ok, r - first, 0)
        r = torch.where(r.amax(1, keepdim=True) - r.amin(1, keepdim=True) > ROUNDING * first.abs().clamp(min=1), r, 0)
        mean = r.sum(1, keepdim=True) / n.clamp(min=1)
        centred = torch.where(ok & (n >= 2), r - mean, 0)
        std = (centred.square().sum(1, keepdim=True) / (n - 1).clamp(min=1)).sqrt()
        if self.std_over == "batch":
            all_rewards = torch.as_tensor(rewards, dtype=torch.float64)[ok]
            std = all_rewards.std() if len(all_rewards) > 1 else torch.zeros(())
        if self.baseline == "leave_one_out":
            centred = centred * (n / (n - 1).clamp(min=1))
        return centred / (std + STD_EPSILON) if self.scale_by_std else centred

    def of_several(self, rewards: npt.NDArray[np.float64], weights: Sequence[float]) -> Tensor:
        """(R, G, K) rewards, NaN where one abstains or could not be graded, and (R,) weights → float64 (G, K).

        A = Σ_r w_r A_r / (std(Σ_r w_r A_r) + 1e-6), the std over the batch. Its mean is 0 as it stands: Σ A_r of each
        group is 0, and subtracting its rounding would give groups without a signal one.
        """
        present = ~np.isnan(rewards)
        advantages = [self(np.nan_to_num(r), ok) for r, ok in zip(rewards, present, strict=True)]
        total = torch.stack([w * a for w, a in zip(weights, advantages, strict=True)]).sum(0)
        rows = total[torch.as_tensor(present.any(0))]
        return total / (rows.std() + STD_EPSILON) if len(rows) > 1 else total
