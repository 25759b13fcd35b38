"""One process, one CPU or one GPU: transformers and torch."""

from .engine import LocalEngine, LocalSettings

__all__ = ["LocalEngine", "LocalSettings"]
