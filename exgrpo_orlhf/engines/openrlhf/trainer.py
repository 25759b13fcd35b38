"""OpenRLHF's trainer with our training loop: the controller of actors and engines, and the buffer's only owner."""

from __future__ import annotations

import itertools
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_trainer import BasePPOTrainer
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from openrlhf.utils.utils import get_tokenizer

from ...checkpoints import CheckpointError, name_end_tokens
from ...experiment import Experiment
from ...objective import MixedPolicyLoss
from ...questions.prompts import PromptEncoder
from ...records import MixedBatch, Question, Rollout, RolloutGroup, Trajectory
from ...replay import Plan
from ..engine import Engine, Loop, NonFiniteUpdate, UpdateStats
from ..rows import ForwardRow
from .dealing import deal_passes
from .experience_maker import MixedExperienceMaker, as_experience, deal, keep_order
from .flags import scheduler_steps
from .samples import Request, Sampler
from .waiting import answer

Measured = tuple[np.ndarray, float]  # log-probs (T,) of a response, and its mean entropy

log = logging.getLogger(__name__)
_METRICS = ("policy/", "rollout/logprob_gap", "rollout/filtered_share")
# OpenRLHF's times of a step, under our names.
_TIMES = {"timing/make_experience": "reference", "timing/ppo_train": "train", "timing/broadcast": "sync"}


@dataclass(frozen=True, repr=False)
class Job:
    """What the trainer needs beside OpenRLHF's arguments; travels as `args.exgrpo_job`."""

    experiment: Experiment
    loop: Loop
    run: Path
    tracking_uri: str
    tags: Mapping[str, str]


class StopFile:
    """A signal to the driver, on another machine perhaps, reaches the trainer as a file in the run's folder."""

    def __init__(self, run: Path) -> None:
        self.path = run / ".stop"

    @property
    def signal(self) -> signal.Signals | None:
        try:
            return signal.Signals[self.path.read_text(encoding="ascii").strip()]
        except (FileNotFoundError, KeyError):  # none, or not written to its end yet
            return None


class MixedTrainer(BasePPOTrainer):
    """Both things at once: the trainer that OpenRLHF's program starts, and the engine that the training loop drives.

    Of OpenRLHF's trainer it keeps the model groups, the experience maker's splitting and balancing, the update
    (`train_step`: append, ppo_train, broadcast) and the loggers; its loop over prompts is replaced by `Job.loop`.
    """

    whole_batches = True  # DeepSpeed accumulates a fixed number of micro-batches; a rest would go into the next step

    def __init__(
        self,
        pretrain: str,
        strategy: Any,
        actor_model_group: Any,
        critic_model_group: Any,
        reward_model_group: Any,
        reference_model_group: Any,
        vllm_engines: Any,
        **generate_kwargs: Any,
    ) -> None:
        """Called by OpenRLHF's program with what its PPOTrainer takes."""
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
        args = strategy.args
        tokenizer = get_tokenizer(pretrain, None, "left", strategy, use_fast=not args.data.disable_fast_tokenizer)
        super().__init__(
            strategy,
            actor_model_group,
            critic_model_group,
            reward_model_group,
            reference_model_group,
            vllm_engines,
            tokenizer,
        )
        ppo_trainer.balance_experiences = keep_order  # a global, looked up by train_step
        self.experience_maker = MixedExperienceMaker(
            actor_model_group, None, None, reference_model_group, self.kl_ctl, strategy, tokenizer
        )
        self.job: Job = args.exgrpo_job
        x = self.job.experiment
        assert x.openrlhf is not None
        self.x, self.settings = x, x.openrlhf
        self.prompts = PromptEncoder(x.prompts, tokenizer)
        self.ranks = args.actor.num_nodes * args.actor.num_gpus_per_node
        self.sampler = Sampler(
            vllm_engines,
            x.sampling.max_response_tokens,
            args.algo.advantage.is_correction_level != "off",
            self.settings.timeout,
            self.prompts.turn_ends(),
        )
        self.step = 0  # of the batch in work; what is done is the training loop's

    # -- what OpenRLHF's program calls --------------------------------------------------------------------------------

    def get_max_steps(self) -> int:
        return scheduler_steps(self.x)

    def fit(self) -> None:
        job = self.job

        def engine(checkpoint: Path | None) -> Engine:
            return self

        job.loop(self.x, engine, job.run, job.tracking_uri, job.tags).go(StopFile(job.run))
        for logger in filter(None, (self.wandb_logger, self.tensorboard_logger)):
            logger.close()

    # -- what the training loop calls ---------------------------------------------------------------------------------

    def rollout(self, plan: Plan, group_size: int) -> Iterator[RolloutGroup]:
        questions = [*plan.fresh, *plan.replayed]
        self.step = plan.step
        requests = [
            Request(self.prompts.encode(question), count, self.x.sampling.temperature, self._seed(plan, i))
            for i, (question, count) in enumerate(zip(questions, plan.rollouts(group_size), strict=True))
        ]
        with closing(self._sample(requests)) as sampled:  # whoever stops early cancels the other requests
            for i, rollouts in sampled:
                yield RolloutGroup(questions[i], tuple(rollouts), replayed=i >= len(plan.fresh))

    def answer(
        self, questions: Sequence[Question], seeds: Sequence[Sequence[int]], temperature: float, top_p: float
    ) -> list[list[Rollout]]:
        requests = [
            Request(self.prompts.encode(question), 1, temperature, seed if temperature else None, top_p)
            for question, own in zip(questions, seeds, strict=True)
            for seed in own
        ]
        rollouts = (rollout for _, (rollout,) in sorted(self._sample(requests), key=lambda sampled: sampled[0]))
        return [[next(rollouts) for _ in own] for own in seeds]

    def _seed(self, plan: Plan, position: int) -> int | None:
        if not self.settings.seed_requests:
            return None
        # Responses of one request get consecutive seeds from vLLM: far apart, no two requests meet.
        entropy = [self.x.settings.seed, 4, plan.step, position, *([plan.round] if plan.round else [])]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0]) >> 1

    def _sample(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[Rollout]]]:
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "wake_up")
        with closing(self.sampler(requests)) as sampled:
            yield from sampled
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "sleep")

    def decode(self, token_ids: np.ndarray) -> str:
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def score(
        self,
        plan: Plan,
        to_score: Mapping[str, Sequence[Trajectory]],
        score: Callable[[float, np.ndarray], float],
    ) -> dict[str, list[float]]:
        questions = {question.id: question for question in plan.replayed}
        rows = [
            ForwardRow(self.prompts.encode(questions[question_id]), trajectory.token_ids)
            for question_id, stored in to_score.items()
            for trajectory in stored
        ]
        scores = iter([score(entropy, logprobs) for logprobs, entropy in self._measure(rows)])
        return {question_id: [next(scores) for _ in stored] for question_id, stored in to_score.items()}

    def _measure(self, rows: Sequence[ForwardRow]) -> list[Measured]:
        """Each row under the current policy, in passes spread over all ranks."""
        if not rows:
            return []
        dealt = deal_passes(rows, self.settings.score_tokens, self.ranks, self.args.ds.packing_samples)
        parts = list(itertools.chain.from_iterable(dealt))  # rank after rank, equally many of each
        references = self.actor_model_group.async_run_method_batch(
            method_name="measure", rows=[[rows[i] for i in part] for part in parts]
        )
        results = list(itertools.chain.from_iterable(self._answer(references)))
        if self.args.train.colocate_all:  # vLLM wants the memory that torch keeps for later
            self._answer(self.actor_model_group.async_run_method("empty_cache"))
        found: dict[int, Measured] = {}
        for part, measured in zip(parts, results, strict=True):
            found.update(zip(part, zip(*measured, strict=True), strict=True))
        return [found[i] for i in range(len(rows))]

    def update(self, batch: MixedBatch, loss: MixedPolicyLoss) -> UpdateStats:
        """OpenRLHF's train_step. π_old of fresh rows is the policy as it is when the batch begins.

        With several optimiser steps all rows are measured before them. With one, their log-probs come from its own
        pass; only the rows that it leaves out, because they could not be graded, are measured before.
        """
        flat = batch.flat_rows()
        rows = [ForwardRow(self.prompts.encode(row.question), row.token_ids) for row in flat]
        steps, passes = self.x.optimizer.steps_per_batch, self.x.optimizer.passes_per_batch
        begin = time.perf_counter()
        before = [i for i, row in enumerate(flat) if steps * passes > 1 or not row.in_loss]
        known = dict(zip(before, self._measure([rows[i] for i in before]), strict=True))
        measured = time.perf_counter() - begin
        experience = as_experience(batch, rows, [known[i][0] if i in known else None for i in range(len(rows))])
        order = deal([int(e.total_length) for e in experience], batch.width, steps, self.ranks)
        status, _ = self.train_step([experience[i] for i in order], self.step)
        for recorded in self._answer(self.actor_model_group.async_run_method("recorded")):
            known |= recorded
        policy, entropies = [known[i][0] for i in range(len(rows))], [known[i][1] for i in range(len(rows))]
        behaviour = [
            now if row.replayed is None else row.replayed.behaviour_logprobs
            for row, now in zip(flat, policy, strict=True)
        ]
        for logger in filter(None, (self.wandb_logger, self.tensorboard_logger)):
            logger.log_train(self.step, status)
        metrics = {name: float(status[name]) for name in status if name.startswith(_METRICS)}
        if not all(map(math.isfinite, metrics.values())):
            raise NonFiniteUpdate(
                f"the update is not finite (loss {metrics['policy/loss']}, gradient norm "
                f"{metrics['policy/grad_norm']}): that optimiser step was not made",
                [_describe(*row) for row in zip(flat, policy, behaviour, strict=True)],
            )
        times = {f"time/{ours}": float(status[theirs]) for theirs, ours in _TIMES.items()}
        return UpdateStats(policy, behaviour, entropies, {**metrics, **times, "time/measure": measured})

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        self._answer(self.actor_model_group.async_run_method("save_state", str(folder.absolute()), self.step))
        name_end_tokens(folder, self.prompts.turn_ends())

    def load(self, folder: Path) -> None:
        """The actors loaded the checkpoint when they started (launch.py says which); the engines get its weights."""
        for states in self._answer(self.actor_model_group.async_run_method("get_checkpoint_states")):
            if folder.name != f"checkpoint-{states.get('global_step')}":
                raise CheckpointError(f"{folder}: an actor has loaded step {states.get('global_step')} instead")
        self.broadcast_to_vllm()

    def _answer(self, references: list[Any]) -> Any:
        return answer(references, "a policy actor", self.settings.timeout)


def _describe(row: Any, policy: np.ndarray, behaviour: np.ndarray) -> dict[str, Any]:
    return {
        "question_id": row.question.id,
        "token_ids": row.token_ids.tolist(),
        "advantage": row.advantage,
        "in_loss": row.in_loss,
        "replayed_from_step": None if row.replayed is None else row.replayed.step,
        "policy_logprobs": policy.tolist(),
        "behaviour_logprobs": behaviour.tolist(),
    }
