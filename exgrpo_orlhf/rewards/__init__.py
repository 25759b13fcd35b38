"""Verifiers: from a question and a response to a grade."""

from ..grader.answer import Written
from .pool import GradingError, NoGrader
from .verifier import Verifier

__all__ = ["GradingError", "NoGrader", "Verifier", "Written"]
