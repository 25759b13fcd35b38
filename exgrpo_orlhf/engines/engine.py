"""What the training loop asks of an engine, whichever machine it stands on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..experiment import Experiment, Outcome
from ..objective import MixedPolicyLoss
from ..questions.prompts import PromptEncoder
from ..records import MixedBatch, Question, Rollout, RolloutGroup, Trajectory
from ..replay import Plan
from ..stopping import Stop


@dataclass(frozen=True)
class UpdateStats:
    """What an update measured, per row of the flattened batch.

    policy_logprobs: float32 (T,), of the current policy when the row's first optimiser step began
    behaviour_logprobs: float32 (T,), stored for replayed rows; for fresh ones measured here, by the policy that
        sampled them
    entropies: mean token entropy of the response, nats, measured with policy_logprobs
    later_passes: for each pass after the first, the log-probs of the rows that have a gradient, by position
    """

    policy_logprobs: list[np.ndarray]
    behaviour_logprobs: list[np.ndarray]
    entropies: list[float]
    metrics: dict[str, float]
    later_passes: Sequence[Mapping[int, np.ndarray]] = ()


class NonFiniteUpdate(ArithmeticError):
    """The loss or the gradient is not finite. dump: the rows of the optimiser step, for a look at what did it."""

    def __init__(self, message: str, dump: list[dict[str, Any]]) -> None:
        super().__init__(message)
        self.dump = dump

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.dump)  # an exception comes back from another process by its arguments


class EngineLost(RuntimeError):
    """An actor or engine of another process that died, failed or does not answer."""


class Engine(Protocol):
    """whole_batches: it cannot make an optimiser step of fewer questions than train.questions_per_step"""

    prompts: PromptEncoder
    whole_batches: bool

    def score(
        self,
        plan: Plan,
        to_score: Mapping[str, Sequence[Trajectory]],
        score: Callable[[float, np.ndarray], float],
    ) -> dict[str, list[float]]:
        """What the current policy makes of each stored response, in the order given.

        score: from mean token entropy (temperature 1, nats) and log-probs (T,) (sampling temperature) of the response
            to what is selected by (`TrajectorySelector.score`)
        """
        ...

    def rollout(self, plan: Plan, group_size: int) -> Iterable[RolloutGroup]:
        """As many fresh responses as `plan.rollouts` says; groups in any order, perhaps one by one as each is complete,
        ungraded. Raises EngineLost."""
        ...

    def answer(
        self, questions: Sequence[Question], seeds: Sequence[Sequence[int]], temperature: float, top_p: float
    ) -> list[list[Rollout]]:
        """For evaluation: a response to each question for each of its seeds, ungraded. temperature: 0 is greedy"""
        ...

    def decode(self, token_ids: np.ndarray) -> str:
        """The response as text, without special tokens; for verifiers and people, never encoded again."""
        ...

    def update(self, batch: MixedBatch, loss: MixedPolicyLoss) -> UpdateStats:
        """One or more optimiser steps on a batch. Raises NonFiniteUpdate."""
        ...

    def save(self, folder: Path) -> None:
        """Hugging Face files in `folder`, the rest of the engine's state in a subfolder of it."""
        ...

    def load(self, folder: Path) -> None:
        """The state beside the weights, as saved; the weights were loaded when the engine was made."""
        ...


class Loop(Protocol):
    """The training loop: training.TrainingRun. An engine that starts it in a process of its own is handed it."""

    def __call__(
        self,
        experiment: Experiment,
        engine: Callable[[Path | None], Engine],
        run: Path,
        tracking_uri: str,
        tags: Mapping[str, str],
    ) -> Going: ...


class Going(Protocol):
    def go(self, stop: Stop) -> Outcome: ...
