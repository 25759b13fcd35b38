"""The mixed-policy objective: pure torch functions, no engine."""

from .advantages import GroupAdvantages
from .loss import MixedPolicyLoss, TokenBatch
from .token_stats import token_stats

__all__ = ["GroupAdvantages", "MixedPolicyLoss", "TokenBatch", "token_stats"]
