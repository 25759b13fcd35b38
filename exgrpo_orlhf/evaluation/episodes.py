"""Benchmarks whose responses are episodes: an engine's turns, and the answers of the benchmark's environment."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import Any

import numpy as np

from ..environments.playing import Play, Player, play
from ..records import Question, Rollout
from .backends import GenerationEngine, GenerationRequest, Key, Response

_TOGETHER = 256  # episodes played at a time


class EpisodeEngine:
    """An engine that plays the requests of some benchmarks as episodes, and answers the others as it did.

    The turns of some episodes are generated together, and wait for the environments of all of them. Which are together
    does not depend on which responses exist already: where one of them is missing, all are played again.
    """

    def __init__(
        self, engine: GenerationEngine, players: Mapping[str, Player], questions: Mapping[tuple[str, int], Question]
    ) -> None:
        """players: by the benchmark's name; questions: by benchmark and row, as they are put to the model"""
        self.engine, self.players, self.questions = engine, players, questions
        self.reproducible = engine.reproducible

    def generate(
        self, requests: Sequence[GenerationRequest], done: Collection[Key]
    ) -> Generator[list[Response], None, None]:
        """As a GenerationEngine does. Raises EngineFailure, and NoEnvironment."""
        for name, same in groupby(requests, lambda request: request.key[0]):
            if (player := self.players.get(name)) is None:
                yield from self.engine.generate([*same], done)
                continue
            episodes = [*same]
            for begin in range(0, len(episodes), _TOGETHER):
                together = episodes[begin : begin + _TOGETHER]
                if any(request.key not in done for request in together):
                    responses = self._play(player, together)
                    yield [response for response in responses if response.request.key not in done]

    def _play(self, player: Player, requests: Sequence[GenerationRequest]) -> list[Response]:
        def turns(plays: Sequence[Play]) -> list[Rollout]:
            turn_requests = [
                replace(by_play[one], prompt_ids=tuple(one.context), seed=one.turn_seed, max_tokens=one.room)
                for one in plays
            ]
            responses = chain.from_iterable(self.engine.generate(turn_requests, ()))
            turn_of = {one.request.key: Rollout(np.array(one.token_ids, np.int32), one.finish) for one in responses}
            return [turn_of[request.key] for request in turn_requests]

        questions = [self.questions[one.key[:2]] for one in requests]
        with player.episodes(questions, [one.seed for one in requests]) as plays:
            by_play = dict(zip(plays, requests, strict=True))
            rollouts = play(plays, turns)
        return [
            Response(
                request,
                str(player.tokenizer.decode(rollout.token_ids.tolist(), skip_special_tokens=True)),
                rollout.length,
                rollout.finish,
                grade=rollout.grade,
            )
            for request, rollout in zip(requests, rollouts, strict=True)
        ]

    def describe(self) -> dict[str, Any]:
        return self.engine.describe()

    def close(self) -> None:
        self.engine.close()
