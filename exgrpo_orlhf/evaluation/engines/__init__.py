"""Engines that answer a benchmark's prompts: transformers, vLLM, a server."""

from .engine import EngineFailure, GenerationEngine, GenerationRequest, Key, Response

__all__ = ["EngineFailure", "GenerationEngine", "GenerationRequest", "Key", "Response"]
