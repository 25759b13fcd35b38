"""The local engine: one process, one CPU or one GPU."""

from .engine import TorchEngine

__all__ = ["TorchEngine"]
