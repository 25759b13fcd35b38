"""Responses to the requests of benchmarks: one turn each, or episodes in the benchmark's environment."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from ..environments.playing import Player, graded_text
from ..questions.special_tokens import response_text
from ..records import Grade, Question, Rollout
from ..sampling import EngineLost, Request, Sampler, ServedRollout

Key = tuple[str, int, int]  # benchmark, row of its set (from 0), sample (from 0)


@dataclass(frozen=True, slots=True)
class Response:
    """text: as `response_text`; tokens: their number, with the end token; finish: 'length' if truncated

    prompt_tokens: their number, if a server rendered the prompt; else None
    grade: by the environment in which it was played; None: it is to be graded
    graded_text: what the verifier grades, where that is not all of the text
    """

    request: Request
    text: str
    tokens: int
    finish: Literal["stop", "length"]
    prompt_tokens: int | None = None
    grade: Grade | None = None
    graded_text: str | None = None

    @classmethod
    def of(cls, request: Request, rollout: Rollout, tokenizer: Any, player: Player | None = None) -> Response:
        """tokenizer: of the token ids; player: of an episode"""
        if isinstance(rollout, ServedRollout):
            return cls(request, rollout.text, rollout.tokens, rollout.finish, rollout.prompt_tokens)
        text = response_text(tokenizer, rollout.token_ids.tolist())
        environment = player.environment if player else None
        own = graded_text(rollout, lambda ids: response_text(tokenizer, ids.tolist()), environment)
        return cls(request, text, rollout.length, rollout.finish, grade=rollout.grade, graded_text=own)


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
    NoEnvironment.
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
