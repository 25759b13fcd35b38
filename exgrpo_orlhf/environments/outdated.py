"""Whether an environment would still answer as it did in a stored episode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..records import Question, Rollout, Trajectory
from .playing import Player, receive
from .start import Start

_TOGETHER = 256  # stored episodes checked at a time


def outdated(player: Player, stored: Sequence[tuple[Question, Trajectory]]) -> list[bool]:
    """Of each stored episode, whether the environment would no longer answer to its actions as it did, or would reward
    them otherwise. Turns with nothing between them are played as one."""
    parts = [stored[begin : begin + _TOGETHER] for begin in range(0, len(stored), _TOGETHER)]
    return [differs for part in parts for differs in _outdated(player, part)]


def _outdated(player: Player, stored: Sequence[tuple[Question, Trajectory]]) -> list[bool]:
    whole = [Start.of(episode) for _, episode in stored]
    with player.episodes([question for question, _ in stored], [start.seed for start in whole]) as plays:
        turns = {i: [0] for i in range(len(stored))}
        while turns:
            going = zip(turns, receive([plays[i] for i in turns]), strict=True)
            goes_on = {i: whole[i].next_turn(plays[i].tokens, plays[i].actions) for i, goes in going if goes}
            turns = {i: turn for i, turn in goes_on.items() if turn}
            for i, turn in turns.items():
                plays[i].act(Rollout(np.array(turn, np.int32), "stop"))
    by_verifier = player.environment.reward != "environment"
    return [
        play.going
        or play.truncated
        or play.failure is not None
        or play.tokens != start.tokens
        or not (by_verifier or play.reward == episode.reward)
        for play, start, (_, episode) in zip(plays, whole, stored, strict=True)
    ]
