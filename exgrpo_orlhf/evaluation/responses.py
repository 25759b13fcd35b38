"""Responses to the requests of benchmarks: one turn each, or episodes in the benchmark's environment."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any, Literal

from ..environments.playing import Player, play
from ..grader.grade import Grade
from ..grader.thoughts import Tags, opens_thought
from ..questions.special_tokens import response_text
from ..records import Question, Rollout
from ..rewards import Written
from ..rewards.grading import written
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
    def of(
        cls, request: Request, rollout: Rollout, tokenizer: Any, player: Player | None = None, tags: Tags = ()
    ) -> Response:
        """tokenizer: of the token ids; player: of an episode; tags: as Prompts.thought_tags"""
        in_thought = opens_thought(request.prompt, request.messages, tags)
        if isinstance(rollout, ServedRollout):
            read = lambda: (request.prompt, request.prompt + rollout.text)
            as_written = Written(rollout.text, in_thought, read, tags=tags)
            return cls(request, rollout.text, rollout.tokens, rollout.finish, as_written, rollout.prompt_tokens)
        text = response_text(tokenizer, rollout.token_ids.tolist(), *tags)
        prompt = lambda: (request.prompt, request.prompt_ids)
        observations = player is not None and player.environment.observations_graded
        (as_written,) = written([rollout], prompt, in_thought, tokenizer, tags, observations)
        return cls(request, text, rollout.length, rollout.finish, as_written, grade=rollout.grade)


# By benchmark: who plays its episodes, and its questions by row, as they are put to the model.
Episodes = Mapping[str, tuple[Player, Mapping[int, Question]]]


def respond(
    sampler: Sampler,
    requests: Sequence[Request],
    done: Collection[Key],
    tokenizer: Any,
    episodes: Episodes = MappingProxyType({}),
    tags: Tags = (),
) -> Generator[list[Response], None, None]:
    """Yield the responses to all requests except those done, each once, in portions of any order.

    requests: one benchmark's after another's; episodes: of the benchmarks whose responses are episodes; tags: as
    Prompts.thought_tags. Closing the iterator cancels requests under way. Raises EngineLost, and NotLoaded.
    """
    for name, same in groupby(requests, lambda request: request.key[0] if request.key[0] in episodes else None):
        part, player = [*same], None
        finished = {i for i, request in enumerate(part) if request.key in done}
        if name is None:
            portions: Iterable[list[tuple[int, Any]]] = sampler.sample(part, finished)
        else:
            player, questions = episodes[name]
            asked, seeds = zip(
                *((questions[request.key[1]], request.seed_at(i)) for i, request in enumerate(part)), strict=True
            )
            portions = play(sampler, player, asked, seeds, part[0], finished)
        try:
            for portion in portions:
                rollouts = [(part[i], result if player else result[0]) for i, result in portion]
                yield [Response.of(request, rollout, tokenizer, player, tags) for request, rollout in rollouts]
        except ArithmeticError as error:
            raise EngineLost(f"{error}; are the weights?") from error
