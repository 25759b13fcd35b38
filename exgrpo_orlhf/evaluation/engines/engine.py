"""What the evaluation asks of an engine: responses to prompts, each with a seed of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Key = tuple[str, int, int]  # benchmark, row of its set (from 0), sample (from 0)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response that is asked for.

    prompt: the text as rendered by the template; prompt_ids: its tokens, with which an engine begins
    messages: (role, content) pairs that the text was rendered from, for servers that render themselves
    seed: of this response alone, below 2^63
    temperature: 0 is greedy
    stop_ids: tokens that end the response besides the model's own
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


@dataclass(frozen=True, slots=True)
class Response:
    """text: without special tokens; tokens: of the response, end token included; finish: 'length' if truncated

    prompt_tokens: where the engine writes the prompt itself
    """

    request: GenerationRequest
    text: str
    tokens: int
    finish: Literal["stop", "length"]
    prompt_tokens: int | None = None


class EngineFailure(RuntimeError):
    """An engine that died, refuses or does not answer. What it had answered before is kept."""


class GenerationEngine(Protocol):
    """reproducible: None if a response depends on nothing but its request; else why it may differ in its last bits
    with other requests beside it, as the results say it
    """

    reproducible: str | None

    def generate(self, requests: Sequence[GenerationRequest], done: Collection[Key]) -> Iterator[list[Response]]:
        """The responses to all requests but those done, in whatever order and portions they come; each exactly once.

        Closing the iterator early gives up what is under way. Raises EngineFailure.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Its settings and versions, for the record; JSON."""
        ...

    def close(self) -> None:
        """Give back memory and end processes; may be called twice."""
        ...
