"""Experience management: no model and no engine (numpy; pyarrow for snapshots)."""

from .buffer import ReplayBuffer
from .difficulty import DifficultyBuckets
from .mixer import ReplayMixer
from .plan import Plan
from .retirement import RetirementPolicy
from .sampling import QuestionSampler
from .selection import TrajectorySelector

__all__ = [
    "DifficultyBuckets",
    "Plan",
    "QuestionSampler",
    "ReplayBuffer",
    "ReplayMixer",
    "RetirementPolicy",
    "TrajectorySelector",
]
