"""Group-relative advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

STD_EPSILON = 1e-6


@dataclass(frozen=True)
class GroupAdvantages:
    """A = r − mean(r) over the group; divided by std(r) + 1e-6 when `scale_by_std` (GRPO, arXiv 2402.03300).

    Without the std (the default) this is Dr. GRPO (arXiv 2503.20783) and what ExGRPO uses: dividing by the std weighs
    questions by how lopsided their group is.
    """

    scale_by_std: bool = False

    def __call__(self, rewards: npt.NDArray[np.float64] | Tensor, gradable: npt.NDArray[np.bool_] | Tensor) -> Tensor:
        """(G, K) rewards and which of them are rewards at all → float64 (G, K) advantages.

        A row that could not be graded is outside the mean and gets 0; so does every row of a group with fewer than two
        gradable rows. The std is the sample's (n − 1).
        """
        r, ok = torch.as_tensor(rewards, dtype=torch.float64), torch.as_tensor(gradable)
        if r.shape != ok.shape or r.ndim != 2:
            raise ValueError(f"rewards and gradable must both be (groups, K), got {tuple(r.shape)}, {tuple(ok.shape)}")
        n = ok.sum(1, keepdim=True)
        # Relative to a reward of the group, so that equal rewards give exactly 0 whatever they are: 0.1 + 0.1 + 0.1 is
        # not 3 · 0.1, and a row whose advantage is not 0 costs a backward pass.
        first = r.gather(1, ok.to(torch.int8).argmax(1, keepdim=True))
        r = torch.where(ok, r - first, 0)
        mean = r.sum(1, keepdim=True) / n.clamp(min=1)
        centred = torch.where(ok & (n >= 2), r - mean, 0)
        if not self.scale_by_std:
            return centred
        std = (centred.square().sum(1, keepdim=True) / (n - 1).clamp(min=1)).sqrt()
        return centred / (std + STD_EPSILON)
