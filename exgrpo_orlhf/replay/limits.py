"""What the replay buffer forgets, in which order, and what of it can be replayed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BufferLimits:
    """What is forgotten, and what is a candidate (gin name `ReplayBuffer`). None: no limit.

    per_question: trajectories kept of one question; the oldest of that question goes first
    max_age: steps; a trajectory whose log-probs are older goes when a step begins, before it can be replayed
    replays_unsolved: whether a question with stored trajectories whose latest accuracy is 0 is a candidate for replay.
        Its fresh rollouts alone have no signal; a stored success gives it one. The paper's candidates have an accuracy
        above 0 (False).
    max_bytes: of all trajectories, 8 bytes a token and 64 a trajectory; the oldest of all goes first

    Old means measured early: a trajectory that is sampled again is new. A question that loses its last trajectory stops
    being a candidate and keeps its accuracy.
    """

    per_question: int | None = None
    max_age: int | None = None
    max_bytes: int | None = None
    replays_unsolved: bool = False

    def __post_init__(self) -> None:
        for name, least in (("per_question", 1), ("max_age", 1), ("max_bytes", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"ReplayBuffer.{name} must be at least {least}, or None for no limit; got {value!r}")
