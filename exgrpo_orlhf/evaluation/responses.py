"""Responses to the requests of benchmarks: one turn each, or episodes in the benchmark's environment."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from ..environments.playing import Player, written
from ..questions.prompts import opens_thought
from ..questions.special_tokens import response_text
from ..records import Grade, Question, Rollout
from ..rewards import Written
from ..sampling import EngineLost, Request, Sampler, ServedRollout

Key = tuple[str, int, int]  # benchmark, row of its set (from 0), sample (from 0)


@dataclass(frozen=True, slots=True)
class Response:
    """text: as `response_text`; tokens: their number, with the end token; finish: 'length' if truncated

    prompt_tokens: their number, if a server rendered the prompt; else None
    grade: by the environment in which it was played; None: it is to be graded
    written: as the verifier gets it
    """

    request: Request
    text: str
    tokens: int
    finish: Literal["stop", "length"]
    written: Written
    prompt_tokens: int | None = None
    grade: Grade | None = None

    @classmethod
    def of(cls, request: Request, rollout: Rollout, tokenizer: Any, player: Player | None = None) -> Response:
        """tokenizer: of the token ids; player: of an episode"""
        in_thought = opens_thought(request.prompt, request.messages)
        if isinstance(rollout, ServedRollout):
            own = Written(rollout.text, in_thought)
            return cls(request, rollout.text, rollout.tokens, rollout.finish, own, rollout.prompt_tokens)
        text = response_text(tokenizer, rollout.token_ids.tolist())
        prompt = lambda: (request.prompt, request.prompt_ids)
        own = written(rollout, prompt, in_thought, tokenizer, player.environment if player else None)
        return cls(request, text, rollout.length, rollout.finish, own, grade=rollout.grade)


@dataclass(frozen=True)
class Playing:
    """The benchmarks whose responses are episodes.

    players: by the benchmark's name; questions: by benchmark and row, as they are put to the model
    """

    players: Mapping[str, Player]
    questions: Mapping[tuple[str, int], Question]


_NOTHING = Playing({}, {})


def respond(
    sampler: Sampler, requests: Sequence[Request], done: Collection[Key], tokenizer: Any, playing: Playing = _NOTHING
) -> Generator[list[Response], None, None]:
    """Yield the responses to all requests except those done, each once, in portions of any order.

    requests: one benchmark's after another's. Closing the iterator cancels requests under way. Raises EngineLost, and
    NotLoaded.
    """
    for name, same in groupby(requests, lambda request: request.key[0] if request.key[0] in playing.players else None):
        part = [*same]
        finished = {i for i, request in enumerate(part) if request.key in done}
        for portion in _episodes(sampler, part, finished, playing, name) if name else _single(sampler, part, finished):
            player = playing.players[name] if name else None
            yield [Response.of(part[i], rollout, tokenizer, player) for i, rollout in portion]


def _single(
    sampler: Sampler, requests: Sequence[Request], done: Collection[int]
) -> Iterator[list[tuple[int, Rollout]]]:
    try:
        for portion in sampler.sample(requests, done):
            yield [(i, rollout) for i, (rollout,) in portion]
    except ArithmeticError as error:
        raise EngineLost(f"{error}; are the weights?") from error


def _episodes(
    sampler: Sampler, requests: Sequence[Request], done: Collection[int], playing: Playing, name: str
) -> Iterator[list[tuple[int, Rollout]]]:
    questions = [playing.questions[request.key[:2]] for request in requests]
    seeds = [request.seed_at(i) for i, request in enumerate(requests)]
    yield from sampler.episodes(playing.players[name], questions, seeds, requests[0], done)
