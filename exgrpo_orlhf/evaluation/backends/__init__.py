"""Engines that answer a benchmark's prompts (transformers, vLLM, a server), and their interface.

An engine gives responses to prompts, each with a seed of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ...records import Grade

Key = tuple[str, int, int]  # benchmark, row of its set (from 0), sample (from 0)
GO_ON = "the responses so far are kept; run the same command again to continue"  # what an EngineFailure ends with


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A response to generate.

    prompt: the text rendered by the template; prompt_ids: its tokens, which an engine takes as they are
    messages: (role, content) pairs of the prompt, for servers that apply their own template
    seed: of this response alone, below 2^63
    temperature: 0 is greedy decoding
    stop_ids: tokens that end the response, in addition to the model's own; stop: texts that do (not for servers)
    """

    key: Key
    prompt: str
    prompt_ids: tuple[int, ...]
    messages: tuple[tuple[str, str], ...]
    seed: int
    max_tokens: int
    temperature: float
    top_p: float
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Response:
    """text: without special tokens; tokens: their number, with the end token; finish: 'length' if truncated

    prompt_tokens: their number, if a server rendered the prompt; else None
    grade: by the environment in which it was played; None: it is to be graded
    token_ids: with the end token; empty from a server
    """

    request: GenerationRequest
    text: str
    tokens: int
    finish: Literal["stop", "length"]
    prompt_tokens: int | None = None
    grade: Grade | None = None
    token_ids: tuple[int, ...] = ()


class EngineFailure(RuntimeError):
    """An engine died, refused a request or does not answer. Its earlier responses are kept."""


class GenerationEngine(Protocol):
    """reproducible: None if a response depends on its request alone; else a sentence on why it may differ when other
    requests are computed with it
    """

    reproducible: str | None

    def generate(
        self, requests: Sequence[GenerationRequest], done: Collection[Key]
    ) -> Generator[list[Response], None, None]:
        """Yield the responses to all requests except those done, each once, in portions of any order.

        Closing the iterator cancels requests under way. Raises EngineFailure.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Settings and versions for the record, as JSON."""
        ...

    def close(self) -> None:
        """Release memory and end processes. May be called twice."""
        ...
