"""OpenRLHF's trainer with our training loop. It controls actors and engines, and holds the replay buffer."""

from __future__ import annotations

import itertools
import logging
import math
import signal
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_trainer import BasePPOTrainer
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from openrlhf.utils.utils import get_tokenizer

from ...checkpoints import CheckpointError, name_end_tokens
from ...environments.playing import episode_seeds, player_of
from ...files import Files
from ...objective import MixedPolicyLoss
from ...progress import Clock
from ...questions.prompts import PromptEncoder
from ...records import Measured, MixedBatch, Question, Rollout, RolloutGroup
from ...replay import Plan
from ..engine import Engine, EngineLost, LogProbs, NonFiniteUpdate, UpdateStats
from ..job import Job
from ..rows import ForwardRow, behaviour_logprobs, row_dump
from .dealing import deal_passes
from .experience_maker import MixedExperienceMaker, as_experience, deal, keep_order
from .output import mark_messages
from .samples_generator import Request, Sampler, results

log = logging.getLogger(__name__)
_METRICS = ("policy/", "rollout/logprob_gap", "rollout/filtered_share")
# OpenRLHF's times of a step, under our names.
_TIMES = {"timing/make_experience": "reference", "timing/ppo_train": "train", "timing/broadcast": "sync"}


class StopFile:
    """`Stop` by a file in the run's folder, which the driver writes when it gets a signal. The driver may be on another
    machine than the trainer."""

    def __init__(self, run: Path) -> None:
        self.path = run / ".stop"

    @property
    def signal(self) -> signal.Signals | None:
        try:
            return signal.Signals[self.path.read_text(encoding="ascii").strip()]
        except (FileNotFoundError, KeyError):  # there is none, or it is only half written
            return None


class MixedTrainer(Engine, BasePPOTrainer):  # type: ignore[misc]
    """The trainer that OpenRLHF's program starts, and at the same time the engine that the training loop uses.

    It keeps the model groups of OpenRLHF's trainer, the experience maker's splitting and balancing, the update
    (`train_step`: append, ppo_train, broadcast) and the loggers. OpenRLHF's loop over prompts is replaced by
    `Job.loop`.
    """

    # DeepSpeed accumulates a fixed number of micro-batches: the rest of a smaller step would go into the next one.
    whole_batches = True
    overlaps_update = True

    def __init__(self, pretrain: str, strategy: Any, *groups: Any, **generate_kwargs: Any) -> None:
        """OpenRLHF's program calls this with the arguments of its PPOTrainer.

        groups: of the policy actors, of a critic and a reward model (None here), of the reference model; vLLM engines
        """
        mark_messages()
        args = strategy.args
        tokenizer = get_tokenizer(pretrain, None, "left", strategy, use_fast=not args.data.disable_fast_tokenizer)
        super().__init__(strategy, *groups, tokenizer)
        ppo_trainer.balance_experiences = keep_order  # train_step looks it up as a global
        self.experience_maker = MixedExperienceMaker(
            self.actor_model_group, None, None, self.reference_model_group, self.kl_ctl, strategy, tokenizer
        )
        self.job: Job = args.exgrpo_job
        self.experiment = experiment = self.job.experiment
        assert experiment.openrlhf is not None
        self.settings = experiment.openrlhf
        self.prompts = PromptEncoder(experiment.prompts, tokenizer)
        self.model_path = pretrain
        self.ranks = args.actor.num_nodes * args.actor.num_gpus_per_node
        self.sampler = Sampler(
            self.vllm_engines,
            experiment.sampling.max_response_tokens,
            args.algo.advantage.is_correction_level != "off",
            self.settings.timeout,
            self.prompts.turn_ends(),
        )
        self.player = player_of(experiment.environment, self.prompts, experiment.sampling.max_response_tokens)
        self.step = 0  # of the latest update

    # -- what OpenRLHF's program calls --------------------------------------------------------------------------------

    def get_max_steps(self) -> int:
        return 1  # of OpenRLHF's own schedule, whose place actor.py gives to ours

    def fit(self) -> None:
        self.job.loop(self.job, lambda checkpoint: self, StopFile(self.job.run))
        for logger in filter(None, (self.wandb_logger, self.tensorboard_logger)):
            logger.close()

    # -- what the training loop calls ---------------------------------------------------------------------------------

    def rollout(self, plan: Plan, group_size: int) -> Iterator[RolloutGroup]:
        questions = [*plan.fresh, *plan.replayed]
        if self.player:
            yield from self._episodes(questions, plan, group_size)
            return
        requests = [
            Request(self.prompts.encode(question), count, self.experiment.sampling.temperature, self._seed(plan, i))
            for i, (question, count) in enumerate(zip(questions, plan.rollout_counts(group_size), strict=True))
        ]
        with closing(self._sample(requests)) as sampled:  # a caller that stops early cancels the other requests
            for i, rollouts in sampled:
                yield RolloutGroup(questions[i], tuple(rollouts), planned_replay=i >= len(plan.fresh))

    def _episodes(self, questions: list[Question], plan: Plan, group_size: int) -> Iterator[RolloutGroup]:
        assert self.player is not None
        owners = [i for i, count in enumerate(plan.rollout_counts(group_size)) for _ in range(count)]
        seeds = episode_seeds(self.experiment.settings.seed, plan.step, plan.round, len(owners))
        left = Counter(owners)
        with (
            self.engines_awake(),
            self.player.episodes([questions[i] for i in owners], seeds) as plays,
            closing(self.sampler.play(plays, self.experiment.sampling.temperature)) as over,
        ):
            for position in over:
                i = owners[position]
                left[i] -= 1
                if not left[i]:
                    rollouts = tuple(one.rollout() for one, owner in zip(plays, owners, strict=True) if owner == i)
                    yield RolloutGroup(questions[i], rollouts, planned_replay=i >= len(plan.fresh))

    def play(
        self, questions: Sequence[Question], seeds: Sequence[int], temperature: float, top_p: float
    ) -> list[Rollout]:
        assert self.player is not None
        with self.engines_awake(), self.player.episodes(questions, seeds) as plays:
            for _ in self.sampler.play(plays, temperature, top_p):
                pass
            return [one.rollout() for one in plays]

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], temperature: float, top_p: float
    ) -> list[Rollout]:
        requests = [Request(one, 1, temperature, seed, top_p) for one, seed in zip(prompts, seeds, strict=True)]
        rollouts = dict(self._sample(requests))
        return [rollouts[i][0] for i in range(len(prompts))]

    def _seed(self, plan: Plan, position: int) -> int:
        # vLLM gives the responses of one request consecutive seeds, so the seeds of requests must be far apart.
        entropy = [self.experiment.settings.seed, 4, plan.step, position, *([plan.round] if plan.round else [])]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0]) >> 1

    def _sample(self, requests: Sequence[Request]) -> Generator[tuple[int, list[Rollout]], None, None]:
        with self.engines_awake(), closing(self.sampler(requests)) as sampled:
            yield from sampled

    @contextmanager
    def engines_awake(self) -> Iterator[None]:
        """Wakes the vLLM engines up, and after success lets them sleep again, if the layout lets them sleep."""
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "wake_up")
        yield
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "sleep")

    def behaviour_logprobs(self, groups: Sequence[RolloutGroup]) -> list[LogProbs]:
        """Of the vLLM engine that sampled them: the actors are at work on the batch before. Raises EngineLost."""
        logprobs: list[LogProbs] = []
        for group in groups:
            for rollout in group.rollouts:
                if rollout.sampler_logprobs is None:
                    raise EngineLost(f"vLLM gave a response to question {group.question.id} without its log-probs")
                logprobs.append(rollout.sampler_logprobs)
        return logprobs

    def broadcast_to_vllm(self) -> None:
        """OpenRLHF's train_step ends with it. With train.generate_ahead the engines are then still generating with the
        weights before the update, and get the new ones by `sync`."""
        if not self.experiment.settings.generate_ahead:
            self.sync()

    def sync(self) -> None:
        super().broadcast_to_vllm()

    def measure(self, rows: Sequence[ForwardRow], method: str = "measure") -> list[Measured]:
        """Each row under the current policy, in passes spread over all ranks. method: of the actors"""
        if not rows:
            return []
        of_ranks = deal_passes(rows, self.settings.score_tokens, self.ranks, self.args.ds.packing_samples)
        parts = list(itertools.chain.from_iterable(of_ranks))  # rank after rank, the same number for each
        references = self.actor_model_group.async_run_method_batch(
            method_name=method, rows=[[rows[i] for i in part] for part in parts]
        )
        measured: dict[int, Measured] = {}
        for part, ones in zip(parts, itertools.chain.from_iterable(self._results(references)), strict=True):
            measured.update(zip(part, ones, strict=True))
        if self.args.train.colocate_all:  # torch keeps memory for later use, which vLLM needs
            self._results(self.actor_model_group.async_run_method("empty_cache"))
        return [measured[i] for i in range(len(rows))]

    def update(self, batch: MixedBatch, loss: MixedPolicyLoss) -> UpdateStats:
        """OpenRLHF's train_step. π_old of fresh rows is the policy at the beginning of the batch; of those that were
        generated ahead, the one that sampled them.

        With several optimiser steps all rows are measured before them. With a single step their log-probs come from its
        own forward pass; only rows that could not be graded, which that pass leaves out, are measured before it.
        """
        self.step += 1
        flat, rows = batch.flat_rows(), self.forward_rows(batch)
        steps, passes = self.experiment.optimizer.steps_per_batch, self.experiment.optimizer.passes_per_batch
        clock = Clock()
        before = [i for i, row in enumerate(flat) if steps * passes > 1 or not row.in_loss]
        measured = dict(zip(before, self.measure([rows[i] for i in before]), strict=True))
        clock.lap("measure")
        base = None
        if self.experiment.loss.kl_coef and self.experiment.lora.rank is not None:
            base = [one.logprobs for one in self.measure(rows, "measure_base")]
        clock.lap("reference")
        logprobs = [measured[i].logprobs if i in measured else None for i in range(len(rows))]
        experience = as_experience(batch, rows, logprobs, base)
        order = deal([int(e.total_length) for e in experience], batch.group_size, steps, self.ranks)
        status, _ = self.train_step([experience[i] for i in order], self.step)
        for recorded in self._results(self.actor_model_group.async_run_method("recorded")):
            measured |= recorded
        policy = [measured[i].logprobs for i in range(len(rows))]
        behaviour = [behaviour_logprobs(row, now) for row, now in zip(flat, policy, strict=True)]
        for logger in filter(None, (self.wandb_logger, self.tensorboard_logger)):
            logger.log_train(self.step, status)
        metrics = {name: float(status[name]) for name in status if name.startswith(_METRICS)}
        if not all(map(math.isfinite, metrics.values())):
            raise NonFiniteUpdate(
                f"the update is not finite (loss {metrics['policy/loss']}, gradient norm "
                f"{metrics['policy/grad_norm']}): that optimiser step was skipped",
                [row_dump(*row) for row in zip(flat, policy, behaviour, strict=True)],
            )
        for theirs, ours in _TIMES.items():
            metrics[f"time/{ours}"] = float(status[theirs]) + clock.laps.get(ours, 0.0)
        metrics["time/measure"] = clock.laps["measure"]
        return UpdateStats(policy, behaviour, [measured[i].entropy for i in range(len(rows))], metrics)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> Files:
        parts = self._results(self.actor_model_group.async_run_method("save_state", str(folder.absolute()), self.step))
        name_end_tokens(folder, self.prompts.turn_ends())
        written = {name: entry for part in parts for name, entry in part.items()}
        written.pop("generation_config.json", None)  # it may just have been changed: it is hashed with the rest
        return written

    def load(self, folder: Path) -> None:
        """Checks that the actors loaded this checkpoint when they started (launch.py names it to them), and sends its
        weights to the engines."""
        for states in self._results(self.actor_model_group.async_run_method("get_checkpoint_states")):
            if folder.name != f"checkpoint-{states.get('global_step')}":
                raise CheckpointError(f"{folder}: an actor has loaded step {states.get('global_step')} instead")
            self.step = int(states["global_step"])
        self.sync()

    def _results(self, references: list[Any]) -> Any:
        return results(references, "a policy actor", self.settings.timeout)
