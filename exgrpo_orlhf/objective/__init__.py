"""The mixed-policy objective: pure torch functions, no engine."""

from .advantages import GroupAdvantages
from .convex_kl import ConvexKL
from .loss import MixedPolicyLoss
from .token_batch import TokenBatch

__all__ = ["ConvexKL", "GroupAdvantages", "MixedPolicyLoss", "TokenBatch"]
