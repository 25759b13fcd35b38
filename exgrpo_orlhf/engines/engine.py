"""An engine: what the training loop calls. Questions, groups and batches become prompts and rows here."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..environments.outdated import outdated
from ..environments.playing import Player, episode_seeds, play
from ..environments.start import Start
from ..experiment import Experiment, Outcome
from ..grader.grade import Grade
from ..io.files import Files
from ..io.stopping import Stop
from ..objective import MixedPolicyLoss
from ..questions.prompts import PromptEncoder
from ..questions.special_tokens import response_text
from ..records import Measured, MixedBatch, Question, Rollout, RolloutGroup, Row, Trajectory
from ..replay import Plan, ReplayBuffer
from ..rewards import Written
from ..rewards.grading import written_to
from ..sampling import Request, Sampler, StepSeed
from ..settings import Sampling
from .rows import ForwardRow

if TYPE_CHECKING:
    from ..attention.packing import PackedRow

log = logging.getLogger(__name__)
Item = TypeVar("Item")
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


class Engine(ABC):
    """Generates from token ids, measures rows of prompt and response, updates and saves.

    whole_batches: True if an optimiser step cannot have fewer questions than train.questions_per_step
    overlaps_update: whether it can generate while it makes an update
    model_path: folder or hub id of the model that the run begins with
    player: where a response is an episode, else None
    sampler_logprobs: whether rollouts come with the sampler's own log-probs
    seed: of the run
    """

    prompts: PromptEncoder
    tokenizer: Any
    player: Player | None
    sampler: Sampler
    sampling: Sampling
    sampler_logprobs: bool = False
    seed: int
    model_path: str | Path
    whole_batches: bool
    overlaps_update: bool

    def request(self, temperature: float, top_p: float = 1.0) -> Request:
        """For any prompt and seed."""
        tokens, end = self.sampling.max_response_tokens, tuple(self.prompts.turn_ends())
        return Request((), 0, tokens, temperature, top_p, end=end, logprobs=self.sampler_logprobs)

    def rollout(self, plan: Plan, group_size: int) -> Generator[RolloutGroup, None, None]:
        """Fresh ungraded responses, of each question as many as `Plan.rollout_counts` says. Groups come in any order,
        one by one as they are completed. Raises EngineLost."""
        questions, counts = [*plan.fresh, *plan.replayed], plan.rollout_counts(group_size)
        request = self.request(self.sampling.temperature)
        if self.player:
            owners = [i for i, count in enumerate(counts) for _ in range(count)]
            seeds = episode_seeds(self.seed, plan.step, plan.round, len(owners))
            rollouts: list[dict[int, Rollout]] = [{} for _ in questions]
            asked = [questions[i] for i in owners]
            starts = {
                n: Start.of(plan.stored[question][0], plan.given[question.id])
                for n, question in enumerate(asked)
                if question.id in plan.given
            }
            episodes = play(self.sampler, self.player, asked, seeds, request, given=starts)
            for position, rollout in chain.from_iterable(episodes):
                rollouts[i := owners[position]][position] = rollout
                if len(rollouts[i]) == counts[i]:
                    in_order = [response for _, response in sorted(rollouts[i].items(), key=itemgetter(0))]
                    yield self._group(questions[i], in_order, planned_replay=i >= len(plan.fresh))
            return
        seed = StepSeed(self.seed, plan.step, plan.round)
        # What a continued group is given follows its prompt as token ids: to a sampler it is a part of the prompt.
        given = [plan.given_to(question) for question in questions]
        requests = [
            replace(
                request,
                prompt_ids=[*self.prompts.encode(question), *tokens.tolist()],
                n=count,
                seed=seed,
                max_tokens=request.max_tokens - len(tokens),
            )
            for question, count, tokens in zip(questions, counts, given, strict=True)
        ]
        with closing(self.sampler.sample(requests)) as portions:  # a caller that stops early cancels the other requests
            for i, group in chain.from_iterable(portions):
                continued = [_behind(given[i], rollout) for rollout in group] if len(given[i]) else group
                yield self._group(questions[i], continued, planned_replay=i >= len(plan.fresh))

    def _group(self, question: Question, rollouts: Sequence[Rollout], planned_replay: bool) -> RolloutGroup:
        """A rollout with a token that the tokenizer does not have, of the rows that pad an embedding, is ungradable: no
        grader sees that token. Masked wherever tokens are sampled and in the update's softmax, the log-probs would
        not be those of the saved model, which whoever serves it does not mask."""
        group = []
        for rollout in rollouts:
            others = {*rollout.token_ids.tolist()} - self._token_ids  # a vocabulary has only one id of a text
            if unknown := sorted(token for token in others if not self.tokenizer.decode([token])):
                log.warning("not graded: the tokenizer has no tokens %s; question %s", unknown, question.id)
                rollout = replace(rollout, grade=Grade("error", None))
            group.append(rollout)
        return RolloutGroup(question, tuple(group), planned_replay)

    @cached_property
    def _token_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.get_vocab().values())

    def generate_for(
        self, questions: Sequence[Question], seeds: Sequence[Sequence[int]], temperature: float, top_p: float
    ) -> list[list[Rollout]]:
        """For evaluation: an ungraded response to each question for each of its seeds. temperature: 0 is greedy"""
        request = self.request(temperature, top_p)
        seed_questions = [question for question, its_seeds in zip(questions, seeds, strict=True) for _ in its_seeds]
        all_seeds = [seed for its_seeds in seeds for seed in its_seeds]
        if self.player:
            episodes = play(self.sampler, self.player, seed_questions, all_seeds, request)
            rollouts = dict(chain.from_iterable(episodes))
        else:
            requests = [
                replace(request, prompt_ids=self.prompts.encode(question), seed=seed)
                for question, seed in zip(seed_questions, all_seeds, strict=True)
            ]
            rollouts = {i: rollout for i, (rollout,) in chain.from_iterable(self.sampler.sample(requests))}
        positions = iter(range(len(all_seeds)))
        return [[rollouts[next(positions)] for _ in its_seeds] for its_seeds in seeds]

    def decode(self, token_ids: npt.NDArray[np.int32]) -> str:
        """The response as text (`response_text`). For verifiers and people; it is never encoded again."""
        return response_text(self.tokenizer, token_ids.tolist(), *self.prompts.settings.thought_tags)

    def written(self, question: Question, rollouts: Sequence[Rollout]) -> list[Written]:
        """Responses to a question as a verifier gets them."""
        observations = self.player is not None and self.player.environment.observations_graded
        return written_to(self.prompts, question, rollouts, observations)

    @abstractmethod
    def measure(self, rows: Sequence[PackedRow]) -> list[Measured]:
        """Each row under the current policy, without gradient."""

    def score(self, stored: Mapping[Question, Sequence[Trajectory]]) -> dict[Question, list[Measured]]:
        """What scores are made of (`TrajectorySelector`): each stored response under the current policy, in order."""
        measured = self._measure(
            (question, response) for question, responses in stored.items() for response in responses
        )
        return {question: [next(measured) for _ in responses] for question, responses in stored.items()}

    def outdated(self, stored: Sequence[tuple[Question, Trajectory]]) -> list[bool]:
        """Of each stored episode, whether its environment would answer to its actions otherwise by now."""
        return outdated(self.player, stored) if self.player else [False] * len(stored)

    def behaviour_logprobs(self, groups: Sequence[RolloutGroup]) -> list[LogProbs]:
        """With train.generate_ahead: log-probs of each rollout under the policy that has just sampled it, float32 (A,),
        to be weighed by when the weights have changed. Of all groups' rollouts, in order."""
        measured = self._measure((group.question, rollout) for group in groups for rollout in group.rollouts)
        return [result.logprobs for result in measured]

    def _measure(self, responses: Iterator[tuple[Question, Rollout | Trajectory]]) -> Iterator[Measured]:
        rows = [ForwardRow.of(self.prompts.encode(question), response) for question, response in responses]
        return iter(self.measure(rows))

    def forward_rows(self, batch: MixedBatch) -> list[Row]:
        """The rows of the flattened batch; those without a prompt get one."""
        return [
            row if row.prompt else replace(row, prompt=self.prompts.encode(row.question)) for row in batch.flat_rows()
        ]

    @abstractmethod
    def update(self, batch: MixedBatch, loss: MixedPolicyLoss) -> UpdateStats:
        """One or more optimiser steps on a batch. Raises NonFiniteUpdate."""

    @abstractmethod
    def reincarnate(self) -> None:
        """The reference of a KL term becomes the policy, and the optimiser begins anew."""

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


def _behind(given: npt.NDArray[np.int32], rollout: Rollout) -> Rollout:
    """The rollout that continues these tokens."""
    return replace(rollout, token_ids=np.concatenate((given, rollout.token_ids)), given=len(given))


class Clock:
    """Seconds of each part of a step."""

    def __init__(self) -> None:
        self.begin = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self.last
        self.last = now

    def add(self, other: Clock) -> None:
        """The parts of a clock that ran beside this one."""
        self.laps |= {name: self.laps.get(name, 0.0) + seconds for name, seconds in other.laps.items()}

    def timed(self, name: str, items: Iterable[Item]) -> Generator[Item, None, None]:
        """The same items; the lap ends when there are no more."""
        yield from items
        self.lap(name)

    def times(self) -> dict[str, float]:
        """Seconds of each part and of all."""
        metrics = {f"time/{name}": seconds for name, seconds in self.laps.items()}
        return {**metrics, "time/step": time.perf_counter() - self.begin}


MakeEngine = Callable[[Path | None], Engine]  # with the weights of a checkpoint if there is one
# `training.preparation.prepare_and_run`, as a value: an engine cannot import what lies above it.
Loop = Callable[["RunSpec", MakeEngine, Stop], Outcome]
LoadBuffer = Callable[[Experiment, Sequence[Question], PromptEncoder], ReplayBuffer]  # `training.initial_buffer.load`


@dataclass(frozen=True, repr=False)
class RunSpec:
    """What the OpenRLHF driver hands to the trainer, which is an actor of Ray, and what a local run is made of.

    run: its folder; questions: of training and of validation, where they were loaded already
    load_buffer: loads `Work.experience`, as a check before Ray starts; None only where there is none
    checkpoint: from which the run goes on; None for the newest, if there is one
    """

    experiment: Experiment
    run: Path
    tracking_uri: str
    tags: Mapping[str, str]
    loop: Loop
    questions: tuple[list[Question], list[Question]] | None = None
    load_buffer: LoadBuffer | None = None
    checkpoint: Path | None = None
