"""Experience management: numpy and plain Python, no model and no engine."""

from .buffer import ReplayBuffer
from .difficulty import DifficultyBuckets
from .limits import BufferLimits
from .mixer import MixedBatch, Plan, ReplayMixer, Row
from .retirement import RetirementPolicy
from .sampling import QuestionSampler
from .scoring import ScoreReuse
from .selection import TrajectorySelector
from .trajectory import Grade, Question, Rollout, RolloutGroup, Trajectory

__all__ = [
    "BufferLimits",
    "DifficultyBuckets",
    "Grade",
    "MixedBatch",
    "Plan",
    "Question",
    "QuestionSampler",
    "ReplayBuffer",
    "ReplayMixer",
    "RetirementPolicy",
    "Rollout",
    "RolloutGroup",
    "Row",
    "ScoreReuse",
    "Trajectory",
    "TrajectorySelector",
]
