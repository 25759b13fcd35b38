"""What can answer a benchmark's prompts: transformers, vLLM, a server."""

from .engine import EngineFailure, GenerationEngine, Key, Request, Response

__all__ = ["EngineFailure", "GenerationEngine", "Key", "Request", "Response"]
