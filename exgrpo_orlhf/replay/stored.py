"""What the replay buffer holds of a question, and what a step has changed in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from ..records import Trajectory


class BufferEntry(NamedTuple):
    """A trajectory in the buffer. key: `trajectory.key`; sequence: its place in the order of storing."""

    trajectory: Trajectory
    key: bytes
    sequence: int


@dataclass(slots=True)
class Changes:
    """Question ids, in the order of what happened since a step began.

    retired, returned: from retirement
    evicted: one for each trajectory that a limit has taken, the mean of its question's newest group, or a check against
        its environment
    spreads: by question, of the rewards of its newest group; only with difficulty 'reward_spread'
    """

    retired: list[str] = field(default_factory=list)
    returned: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    spreads: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class QuestionRecord:
    """What the buffer knows of one question.

    streak: observations in a row that counted towards retirement
    spread: `spread_levels` of its latest group; None where its rewards were all equal, or difficulty is the accuracy
    stored: its trajectories, oldest first
    """

    accuracy: Fraction
    observed_step: int
    streak: int = 0
    spread: Fraction | None = None
    stored: list[BufferEntry] = field(default_factory=list)
