"""What a sampler is asked for, and what it gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..grader.grade import Message
from ..records import Rollout


@dataclass(frozen=True, slots=True)
class StepSeed:
    """The seed of all rollouts that one plan asks for. run: train.seed; round: of rollouts in the step, from 0"""

    run: int
    step: int
    round: int = 0

    def of_chunk(self, chunk: int) -> int:
        """For a sampler that draws the numbers of a chunk of responses together."""
        return self._made(self.step, chunk, uint=np.uint64)

    def of_request(self, position: int) -> int:
        """For a sampler that gives the n responses to a request consecutive seeds: those of requests are far apart."""
        return self._made(4, self.step, position, uint=np.uint32) >> 1

    def _made(self, *entropy: int, uint: type) -> int:
        numbers = [self.run, *entropy, *([self.round] if self.round else [])]
        return int(np.random.SeedSequence(numbers).generate_state(1, uint)[0])


@dataclass(frozen=True, slots=True)
class Request:
    """n responses to one prompt.

    prompt_ids: its tokens, which a sampler takes as they are
    seed: of these responses alone, below 2^63 (further responses have consecutive ones), or a StepSeed
    max_tokens: of a response
    temperature: 0 is greedy decoding; top_p: below 1 in evaluation only, because the samples are then not the policy's
    end: tokens that end a response, in addition to the model's own; stop: texts that do (not for servers)
    logprobs: whether to return the sampler's own (`Rollout.sampler_logprobs`), at the sampling temperature
    session: of a turn, a number of its episode alone: a sampler may keep what it has computed for the next turn
    last_turn: whether no other turn of the session follows
    key: names it in messages: benchmark, row of its set, sample; requests to different benchmarks share no chunk
    prompt: the text rendered by the template; messages: (role, content) pairs, for servers with a template of their own
    """

    prompt_ids: Sequence[int]
    seed: int | StepSeed
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    n: int = 1
    end: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    session: int | None = None
    last_turn: bool = False
    key: tuple[Any, ...] = ()
    prompt: str = ""
    messages: tuple[Message, ...] = ()

    def seed_at(self, position: int) -> int:
        """The first response's. position: of the request among those that are sampled with it"""
        return self.seed if isinstance(self.seed, int) else self.seed.of_request(position)

    @property
    def name(self) -> str:
        return "/".join(map(str, self.key)) or "a response"


@dataclass(frozen=True, slots=True)
class ServedRollout(Rollout):
    """A response of a server, which gives text and not its token ids: `token_ids` are empty.

    text: without special tokens; tokens: their number, with the end token
    prompt_tokens: their number, if the server rendered the prompt
    """

    text: str = ""
    tokens: int = 0
    prompt_tokens: int | None = None


# The position of each request that is complete, with its responses, which are ungraded.
Portion = list[tuple[int, list[Rollout]]]


POLL = 0.01  # seconds between two looks at what environments have answered


class EngineLost(RuntimeError):
    """An actor or an engine, in this process or another, died, refused a request, failed or does not answer."""


class Pending(ABC):
    """Requests under way. `len` is their number."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def send(self, requests: Mapping[int, Request]) -> None:
        """By position."""

    @abstractmethod
    def arrived(self, wait: bool) -> Portion:
        """What has been completed since. wait: for at least one; else for POLL at most. Raises EngineLost."""


class Sampler(ABC):
    """Responses are sampled without top-k, penalties or whatever else a model's own generation config asks for: they
    would not come from the policy, and every importance weight would be wrong.

    reproducible: None if a response depends on its request alone; else a sentence on why it may differ when other
        requests are computed with it
    together: episodes that are played at a time; None: all
    in_step: whether turns of episodes are sampled together, so that each waits for the environments of all
    outdated: set by whoever has changed the policy's weights, for a sampler that has a copy of them
    """

    reproducible: str | None = None
    together: int | None = None
    in_step: bool = True
    outdated: bool = True

    @abstractmethod
    def sample(self, requests: Sequence[Request], done: Collection[int] = ()) -> Generator[Portion, None, None]:
        """Yields each request's responses when they are complete, in portions of any order.

        done: positions of requests that are not sampled. Closing the generator cancels the remaining ones.

        Raises EngineLost.
        """

    def pending(self) -> AbstractContextManager[Pending]:
        """Requests that are added while others are under way. The context's end cancels the remaining ones."""
        return nullcontext(_Together(self))

    def forget(self, sessions: Iterable[int]) -> None:  # noqa: B027  (most keep nothing)
        """The sessions are over: release what was kept for their next turns."""

    def describe(self) -> dict[str, Any]:
        """Settings and versions for the record, as JSON."""
        return {}

    def awake(self) -> AbstractContextManager[object]:
        """The context in which its engines can work. `sample` and `pending` enter it themselves."""
        return nullcontext()

    def close(self) -> None:  # noqa: B027  (most have nothing to release)
        """Release memory and end processes. May be called twice."""


class _Together(Pending):
    """Of a sampler that computes all requests at once when it is asked for the responses."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler, self._requests = sampler, {}  # type: Sampler, dict[int, Request]

    def __len__(self) -> int:
        return len(self._requests)

    def send(self, requests: Mapping[int, Request]) -> None:
        self._requests.update(requests)

    def arrived(self, wait: bool) -> Portion:
        positions, requests = [*self._requests], [*self._requests.values()]
        self._requests.clear()
        return [(positions[i], rollouts) for portion in self._sampler.sample(requests) for i, rollouts in portion]
