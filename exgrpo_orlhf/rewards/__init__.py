"""Verifiers: from a question and a response to a grade."""

from .answer import Written
from .pool.pool import GradingError, NoGrader, close_pools
from .verifier import Verifier

__all__ = ["GradingError", "NoGrader", "Verifier", "Written", "close_pools"]
