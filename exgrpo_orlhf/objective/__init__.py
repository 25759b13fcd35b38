"""The mixed-policy objective: pure torch functions, no engine."""

from .advantages import GroupAdvantages
from .loss import MixedPolicyLoss, TokenBatch

__all__ = ["GroupAdvantages", "MixedPolicyLoss", "TokenBatch"]
