"""What both engines share: questions, groups and batches become prompts and rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..environments.playing import Player, outdated
from ..records import Measured, MixedBatch, Question, Rollout, RolloutGroup, Trajectory
from .engine import Engine, LogProbs
from .rows import ForwardRow


class RowEngine(Engine):
    """An engine that generates from token ids, and measures rows of prompt and response."""

    tokenizer: Any
    player: Player | None  # where a response is an episode

    @abstractmethod
    def play(
        self, questions: Sequence[Question], seeds: Sequence[int], temperature: float, top_p: float
    ) -> list[Rollout]:
        """An episode of each question, each with its own seed. temperature: 0 is greedy"""

    @abstractmethod
    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], temperature: float, top_p: float
    ) -> list[Rollout]:
        """An ungraded response to each prompt (token ids), each with its own seed. temperature: 0 is greedy"""

    @abstractmethod
    def measure(self, rows: Sequence[ForwardRow]) -> list[Measured]:
        """Each row under the current policy, without gradient."""

    def generate_for(
        self, questions: Sequence[Question], seeds: Sequence[Sequence[int]], temperature: float, top_p: float
    ) -> list[list[Rollout]]:
        asked = [question for question, own in zip(questions, seeds, strict=True) for _ in own]
        own_seeds = [seed for own in seeds for seed in own]
        if self.player:
            rollouts = iter(self.play(asked, own_seeds, temperature, top_p))
        else:
            rollouts = iter(self.generate([*map(self.prompts.encode, asked)], own_seeds, temperature, top_p))
        return [[next(rollouts) for _ in own] for own in seeds]

    def decode(self, token_ids: npt.NDArray[np.int32]) -> str:
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def score(self, candidates: Mapping[Question, Sequence[Trajectory]]) -> dict[Question, list[Measured]]:
        measured = self._measure((one, stored) for one, all_ in candidates.items() for stored in all_)
        return {question: [next(measured) for _ in stored] for question, stored in candidates.items()}

    def outdated(self, stored: Sequence[tuple[Question, Trajectory]]) -> list[bool]:
        return outdated(self.player, stored) if self.player else [False] * len(stored)

    def behaviour(self, groups: Sequence[RolloutGroup]) -> list[LogProbs]:
        measured = self._measure((group.question, one) for group in groups for one in group.rollouts)
        return [one.logprobs for one in measured]

    def _measure(self, responses: Iterator[tuple[Question, Rollout | Trajectory]]) -> Iterator[Measured]:
        return iter(self.measure([ForwardRow.of(self.prompts.encode(question), one) for question, one in responses]))

    def forward_rows(self, batch: MixedBatch) -> list[ForwardRow]:
        """Prompt and response of each row of the flattened batch."""
        return [ForwardRow.of(self.prompts.encode(row.question), row.response) for row in batch.flat_rows()]
