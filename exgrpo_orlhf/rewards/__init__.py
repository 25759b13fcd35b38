"""Verifiers: from a question and a response to a grade."""

from .verifier import Verifier

__all__ = ["Verifier"]
