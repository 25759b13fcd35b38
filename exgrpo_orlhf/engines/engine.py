"""What the training loop asks of an engine, and what both engines share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..checkpoints.manifest import Files
from ..experiment import Experiment, Outcome
from ..objective import MixedPolicyLoss
from ..questions.prompts import PromptEncoder
from ..records import Measured, MixedBatch, Question, Rollout, RolloutGroup, Row, Trajectory
from ..replay import Plan
from ..settings import OpenRLHF
from ..stopping import Stop
from .rows import ForwardRow

LogProbs = npt.NDArray[np.float32]


@dataclass(frozen=True)
class UpdateStats:
    """What an update measured, per row of the flattened batch.

    policy_logprobs: float32 (T,), of the current policy when the row's first optimiser step began
    behaviour_logprobs: float32 (T,), stored for replayed rows; for fresh ones measured here, by the policy that
        sampled them, unless they were generated ahead and came with them
    entropies: mean token entropy of the response, nats, measured with policy_logprobs
    later_passes: for each pass after the first, the log-probs of the rows that have a gradient, by position
    """

    policy_logprobs: list[LogProbs]
    behaviour_logprobs: list[LogProbs]
    entropies: list[float]
    metrics: dict[str, float]
    later_passes: Sequence[Mapping[int, LogProbs]] = ()


class NonFiniteUpdate(ArithmeticError):
    """The loss or the gradient is not finite. dump: the rows of the optimiser step (`dumped`), to find the cause."""

    def __init__(self, message: str, dump: list[dict[str, Any]]) -> None:
        super().__init__(message)
        self.dump = dump

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.dump)  # pickle makes an exception anew from these arguments


def dumped(row: Row, policy: LogProbs, behaviour: LogProbs) -> dict[str, Any]:
    """One row for `NonFiniteUpdate.dump`, as JSON; with its log-probs under the current and the behaviour policy."""
    return {
        "question_id": row.question.id,
        "token_ids": row.token_ids.tolist(),
        "advantage": row.advantage,
        "in_loss": row.in_loss,
        "replayed_from_step": None if row.trajectory is None else row.trajectory.step,
        "policy_logprobs": policy.tolist(),
        "behaviour_logprobs": behaviour.tolist(),
    }


class EngineLost(RuntimeError):
    """An actor or an engine in another process died, failed or does not answer."""


class Engine(ABC):
    """Both engines are of this class. The methods with a body are the same in both.

    whole_batches: True if an optimiser step cannot have fewer questions than train.questions_per_step
    generates_beside: whether it can generate while it makes an update
    model_path: folder or hub id of the model that the run begins with
    """

    prompts: PromptEncoder
    model_path: str | Path
    tokenizer: Any
    whole_batches: bool
    generates_beside = False

    @abstractmethod
    def rollout(self, plan: Plan, group_size: int) -> Iterable[RolloutGroup]:
        """Fresh ungraded responses, of each question as many as `Plan.rollout_counts` says. Groups come in any order,
        and may come one by one as they are completed. Raises EngineLost."""

    @abstractmethod
    def respond(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], temperature: float, top_p: float
    ) -> list[Rollout]:
        """An ungraded response to each prompt (token ids), each with its own seed. temperature: 0 is greedy"""

    def answer(
        self, questions: Sequence[Question], seeds: Sequence[Sequence[int]], temperature: float, top_p: float
    ) -> list[list[Rollout]]:
        """For evaluation: an ungraded response to each question for each of its seeds. temperature: 0 is greedy"""
        prompts = [self.prompts.encode(question) for question, own in zip(questions, seeds, strict=True) for _ in own]
        rollouts = iter(self.respond(prompts, [seed for own in seeds for seed in own], temperature, top_p))
        return [[next(rollouts) for _ in own] for own in seeds]

    def decode(self, token_ids: npt.NDArray[np.int32]) -> str:
        """The response as text, without special tokens. For verifiers and people; it is never encoded again."""
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    @abstractmethod
    def measure(self, rows: Sequence[ForwardRow]) -> list[Measured]:
        """Each row under the current policy, without gradient."""

    def score(self, candidates: Mapping[Question, Sequence[Trajectory]]) -> dict[Question, list[Measured]]:
        """What scores are made of (`TrajectorySelector`): each stored response under the current policy, in order."""
        rows = [
            ForwardRow(self.prompts.encode(question), trajectory.token_ids)
            for question, stored in candidates.items()
            for trajectory in stored
        ]
        measured = iter(self.measure(rows))
        return {question: [next(measured) for _ in stored] for question, stored in candidates.items()}

    def behaviour(self, groups: Sequence[RolloutGroup]) -> list[LogProbs]:
        """With train.generate_ahead: log-probs of each rollout under the policy that has just sampled it, float32 (T,),
        to be weighed by when the weights have changed. Of all groups' rollouts, in order."""
        sampled = [(group.question, rollout) for group in groups for rollout in group.rollouts]
        rows = [ForwardRow(self.prompts.encode(question), rollout.token_ids) for question, rollout in sampled]
        return [measured.logprobs for measured in self.measure(rows)]

    def forward_rows(self, batch: MixedBatch) -> list[ForwardRow]:
        """Prompt and response of each row of the flattened batch."""
        return [ForwardRow(self.prompts.encode(row.question), row.token_ids) for row in batch.flat_rows()]

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


class Loop(Protocol):
    """`training.preparation.prepare_and_run`. The OpenRLHF engine calls it in another process and takes it as an
    argument, because it cannot import what lies above it."""

    def __call__(
        self,
        experiment: Experiment,
        make_engine: Callable[[Path | None], Engine],
        folder: Path,
        tracking_uri: str,
        tags: Mapping[str, str],
        stop: Stop,
        questions: tuple[list[Question], list[Question]] | None = None,
    ) -> Outcome: ...


@dataclass(frozen=True, repr=False)
class Job:
    """What the OpenRLHF engine's trainer needs to start the loop. settings: the experiment's, of that engine"""

    experiment: Experiment
    settings: OpenRLHF
    loop: Loop
    run: Path
    tracking_uri: str
    tags: Mapping[str, str]
