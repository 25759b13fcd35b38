"""Experience management: no model and no engine (numpy; pyarrow for snapshots)."""

from .buffer import ReplayBuffer
from .difficulty import DifficultyBuckets, RetirementPolicy
from .injection import TrajectorySelector
from .mixer import ReplayMixer
from .plan import Plan
from .sampling import QuestionSampler

__all__ = [
    "DifficultyBuckets",
    "Plan",
    "QuestionSampler",
    "ReplayBuffer",
    "ReplayMixer",
    "RetirementPolicy",
    "TrajectorySelector",
]
