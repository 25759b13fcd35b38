"""An engine: what the training loop calls. Questions, groups and batches become prompts and rows here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..environments.playing import Player, outdated
from ..files import Files
from ..objective import MixedPolicyLoss
from ..questions.prompts import PromptEncoder
from ..records import Measured, MixedBatch, Question, Rollout, RolloutGroup, Trajectory
from ..replay import Plan
from .rows import ForwardRow

LogProbs = npt.NDArray[np.float32]


@dataclass(frozen=True)
class UpdateStats:
    """What an update measured, per row of the flattened batch.

    policy_logprobs: float32 (A,), of the current policy when the row's first optimiser step began
    behaviour_logprobs: float32 (A,), stored for replayed rows; for fresh ones measured here, by the policy that
        sampled them, unless they were generated ahead and came with them
    entropies: mean token entropy of the response, nats, measured with policy_logprobs
    metrics: of all optimiser steps and passes, among them `MixedPolicyLoss.fresh_metrics`
    """

    policy_logprobs: list[LogProbs]
    behaviour_logprobs: list[LogProbs]
    entropies: list[float]
    metrics: dict[str, float]


class NonFiniteUpdate(ArithmeticError):
    """The loss or the gradient is not finite. dump: the rows of the optimiser step (`row_dump`), to find the cause."""

    def __init__(self, message: str, dump: list[dict[str, Any]]) -> None:
        super().__init__(message)
        self.dump = dump

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.dump)  # pickle makes an exception anew from these arguments


class EngineLost(RuntimeError):
    """An actor or an engine in another process died, failed or does not answer."""


class Engine(ABC):
    """Generates from token ids, measures rows of prompt and response, updates and saves.

    whole_batches: True if an optimiser step cannot have fewer questions than train.questions_per_step
    overlaps_update: whether it can generate while it makes an update
    model_path: folder or hub id of the model that the run begins with
    player: where a response is an episode, else None
    """

    prompts: PromptEncoder
    tokenizer: Any
    player: Player | None
    model_path: str | Path
    whole_batches: bool
    overlaps_update: bool

    @abstractmethod
    def rollout(self, plan: Plan, group_size: int) -> Iterable[RolloutGroup]:
        """Fresh ungraded responses, of each question as many as `Plan.rollout_counts` says. Groups come in any order,
        and may come one by one as they are completed. Raises EngineLost."""

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

    def generate_for(
        self, questions: Sequence[Question], seeds: Sequence[Sequence[int]], temperature: float, top_p: float
    ) -> list[list[Rollout]]:
        """For evaluation: an ungraded response to each question for each of its seeds. temperature: 0 is greedy"""
        seed_questions = [question for question, own in zip(questions, seeds, strict=True) for _ in own]
        own_seeds = [seed for own in seeds for seed in own]
        if self.player:
            rollouts = iter(self.play(seed_questions, own_seeds, temperature, top_p))
        else:
            rollouts = iter(self.generate([*map(self.prompts.encode, seed_questions)], own_seeds, temperature, top_p))
        return [[next(rollouts) for _ in own] for own in seeds]

    def decode(self, token_ids: npt.NDArray[np.int32]) -> str:
        """The response as text, without special tokens. For verifiers and people; it is never encoded again."""
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    @abstractmethod
    def measure(self, rows: Sequence[ForwardRow]) -> list[Measured]:
        """Each row under the current policy, without gradient."""

    def score(self, stored: Mapping[Question, Sequence[Trajectory]]) -> dict[Question, list[Measured]]:
        """What scores are made of (`TrajectorySelector`): each stored response under the current policy, in order."""
        measured = self._measure((question, one) for question, own in stored.items() for one in own)
        return {question: [next(measured) for _ in own] for question, own in stored.items()}

    def outdated(self, stored: Sequence[tuple[Question, Trajectory]]) -> list[bool]:
        """Of each stored episode, whether its environment would answer to its actions otherwise by now."""
        return outdated(self.player, stored) if self.player else [False] * len(stored)

    def behaviour_logprobs(self, groups: Sequence[RolloutGroup]) -> list[LogProbs]:
        """With train.generate_ahead: log-probs of each rollout under the policy that has just sampled it, float32 (A,),
        to be weighed by when the weights have changed. Of all groups' rollouts, in order."""
        measured = self._measure((group.question, one) for group in groups for one in group.rollouts)
        return [one.logprobs for one in measured]

    def _measure(self, responses: Iterator[tuple[Question, Rollout | Trajectory]]) -> Iterator[Measured]:
        return iter(self.measure([ForwardRow.of(self.prompts.encode(question), one) for question, one in responses]))

    def forward_rows(self, batch: MixedBatch) -> list[ForwardRow]:
        """Prompt and response of each row of the flattened batch."""
        return [ForwardRow.of(self.prompts.encode(row.question), row.response) for row in batch.flat_rows()]

    @abstractmethod
    def update(self, batch: MixedBatch, loss: MixedPolicyLoss) -> UpdateStats:
        """One or more optimiser steps on a batch. Raises NonFiniteUpdate."""

    @abstractmethod
    def sync(self) -> None:
        """With train.generate_ahead: give the weights of the last update to what generates, which is idle now."""

    @abstractmethod
    def save(self, folder: Path) -> Files:
        """Writes Hugging Face files into `folder`, and the rest of the engine's state into a subfolder of it.

        Returns the hashes of those files that the writing processes have hashed.
        """

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Loads the state that `save` put beside the weights. The weights were loaded when the engine was made."""
