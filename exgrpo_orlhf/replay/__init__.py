"""Experience management: numpy and plain Python, no model and no engine."""

from .buffer import ReplayBuffer
from .difficulty import DifficultyBuckets
from .limits import BufferLimits
from .mixer import Plan, ReplayMixer
from .retirement import RetirementPolicy
from .sampling import QuestionSampler
from .scoring import ScoreReuse
from .selection import TrajectorySelector

__all__ = [
    "BufferLimits",
    "DifficultyBuckets",
    "Plan",
    "QuestionSampler",
    "ReplayBuffer",
    "ReplayMixer",
    "RetirementPolicy",
    "ScoreReuse",
    "TrajectorySelector",
]
