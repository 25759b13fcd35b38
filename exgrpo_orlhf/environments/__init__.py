"""Environments of several turns, as OpenRLHF's users write them: each episode runs in a process of its own."""

from .agent import Reply
from .environment import Environment

__all__ = ["Environment", "Reply"]
