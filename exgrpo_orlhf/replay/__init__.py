"""Experience management: no model and no engine (numpy; pyarrow for snapshots)."""

from .buffer import ReplayBuffer as ReplayBuffer
from .difficulty import DifficultyBuckets as DifficultyBuckets
from .mixer import Plan as Plan
from .mixer import ReplayMixer as ReplayMixer
from .retirement import RetirementPolicy as RetirementPolicy
from .sampling import QuestionSampler as QuestionSampler
from .selection import TrajectorySelector as TrajectorySelector
