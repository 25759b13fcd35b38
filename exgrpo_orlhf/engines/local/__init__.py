"""The local engine: one process, one CPU or one GPU."""

from .torch_engine import TorchEngine

__all__ = ["TorchEngine"]
