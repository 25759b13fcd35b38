"""Verifiers: from a question and a response to a grade."""

from .pool.pool import GradingError, NoGrader, close_pools
from .sandbox.sandbox import NoSandbox
from .verifier import Verifier

__all__ = ["GradingError", "NoGrader", "NoSandbox", "Verifier", "close_pools"]
