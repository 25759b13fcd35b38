"""The local engine: one process, one CPU or one GPU."""

from .torch_engine import LocalParts, TorchEngine

__all__ = ["LocalParts", "TorchEngine"]
