"""A stored episode as a start: its first turns, and what it goes on with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from ..records import Trajectory


class Start(NamedTuple):
    """The first turns of a stored episode. tokens: of all that follows the prompt, up to the end of the last of these
    turns; actions: which of them are the policy's; seed: with which its environment answered"""

    tokens: list[int]
    actions: list[bool]
    seed: int

    @classmethod
    def of(cls, episode: Trajectory, given: int | None = None) -> Start:
        """given: tokens; None: all"""
        actions = np.ones(len(episode), np.bool_) if episode.actions is None else episode.actions
        return cls(episode.token_ids[:given].tolist(), actions[:given].tolist(), episode.seed or 0)

    def next_turn(self, tokens: Sequence[int], actions: Sequence[bool]) -> list[int]:
        """The actions that it goes on with after what has been played of it; none where it went on otherwise.

        tokens, actions: as an episode that is played has them so far
        """
        n = len(tokens)
        if (tokens, actions) != (self.tokens[:n], self.actions[:n]):
            return []
        return [token for token, _ in takewhile(itemgetter(1), zip(self.tokens[n:], self.actions[n:], strict=True))]
