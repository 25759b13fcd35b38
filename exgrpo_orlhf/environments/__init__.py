"""Environments of several turns, as OpenRLHF's users write them: each episode runs in a process of its own."""

from .environment import Environment
from .episodes import EpisodeFailed, NoEnvironment, Reply, close_episodes

__all__ = ["Environment", "EpisodeFailed", "NoEnvironment", "Reply", "close_episodes"]
