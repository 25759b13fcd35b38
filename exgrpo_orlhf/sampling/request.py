"""What a sampler is asked for, and what it gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..environments.playing import Play, Player
from ..grader.grade import Message
from ..records import Question, Rollout


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
    turn_of: the episode of which this is a turn
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
    turn_of: Play | None = None
    key: tuple[Any, ...] = ()
    prompt: str = ""
    messages: tuple[Message, ...] = ()

    def seed_at(self, position: int) -> int:
        """The first response's. position: of the request among those that are sampled with it"""
        return self.seed if isinstance(self.seed, int) else self.seed.of_request(position)

    def turn(self, episode: Play) -> Request:
        """The request for an episode's next turn, sampled as this one is."""
        return replace(
            self,
            prompt_ids=episode.context,
            seed=episode.turn_seed,
            max_tokens=episode.room,
            stop=episode.player.environment.stop,
            turn_of=episode,
        )

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


class EngineLost(RuntimeError):
    """An actor or an engine, in this process or another, died, refused a request, failed or does not answer."""


class Sampler(ABC):
    """Responses are sampled without top-k, penalties or whatever else a model's own generation config asks for: they
    would not come from the policy, and every importance weight would be wrong.

    reproducible: None if a response depends on its request alone; else a sentence on why it may differ when other
        requests are computed with it
    together: episodes that are played at a time; None: all
    outdated: set by whoever has changed the policy's weights, for a sampler that has a copy of them
    """

    reproducible: str | None = None
    together: int | None = None
    outdated: bool = True

    @abstractmethod
    def sample(self, requests: Sequence[Request], done: Collection[int] = ()) -> Generator[Portion, None, None]:
        """Yields each request's responses when they are complete, in portions of any order.

        done: positions of requests that are not sampled. Closing the generator cancels the remaining ones.

        Raises EngineLost.
        """

    def episodes(
        self,
        player: Player,
        questions: Sequence[Question],
        seeds: Sequence[int],
        like: Request,
        done: Collection[int] = (),
    ) -> Iterator[list[tuple[int, Rollout]]]:
        """Plays an episode of each question with its seed, `together` of them at a time. Yields positions and rollouts
        of those that are over, in portions, those at `done` excepted. like: how their turns are sampled

        Which are played together does not depend on `done`: where one of them is missing, all are played. Raises
        EngineLost and NotLoaded.
        """
        order = sorted(range(len(questions)), key=lambda i: (len(player.prompts.encode(questions[i])), i))
        size = self.together or max(1, len(order))
        for block in (order[begin : begin + size] for begin in range(0, len(order), size)):
            if all(i in done for i in block):
                continue
            with player.episodes([questions[i] for i in block], [seeds[i] for i in block]) as plays:
                for over in self._play(plays, like):
                    yield [(block[i], plays[i].rollout()) for i in over if block[i] not in done]

    def _play(self, plays: Sequence[Play], like: Request) -> Iterator[Sequence[int]]:
        """Yields the positions of episodes that are over.

        A turn waits for the environments of all: which rows are generated together then never depends on how fast an
        environment was, and a resumed run samples the same tokens.
        """

        going = [play for play in plays if play.received()]
        while going:
            turns = {i: turn for part in self.sample([like.turn(play) for play in going]) for i, (turn,) in part}
            for i, episode in enumerate(going):
                episode.act(turns[i])
            going = [play for play in going if play.received()]
        yield range(len(plays))

    def describe(self) -> dict[str, Any]:
        """Settings and versions for the record, as JSON."""
        return {}

    def awake(self) -> AbstractContextManager[object]:
        """The context in which its engines can work. `sample` and `episodes` enter it themselves."""
        return nullcontext()

    def close(self) -> None:  # noqa: B027  (most have nothing to release)
        """Release memory and end processes. May be called twice."""
