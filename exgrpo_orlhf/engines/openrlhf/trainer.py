"""OpenRLHF's trainer with our training loop. It controls actors and engines, and holds the replay buffer."""

from __future__ import annotations

import itertools
import logging
import math
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf.trainer.ppo_trainer import BasePPOTrainer

from ...attention.packing import PackedRow
from ...checkpoints import CheckpointError, name_end_tokens
from ...environments.playing import player_of
from ...io import tokenizer_file
from ...io.files import Files
from ...objective import MixedPolicyLoss
from ...questions.prompts import PromptEncoder
from ...records import Measured, MixedBatch, RolloutGroup
from ...sampling import EngineLost
from ...sampling.ray_engines import RaySampler, results
from ..engine import Clock, Engine, LogProbs, NonFiniteUpdate, RunSpec, UpdateStats
from ..rows import ForwardRow, behaviour_logprobs, row_dump
from . import patches, universal
from .experience_maker import MixedExperienceMaker, as_experience, deal, keep_order
from .output import mark_messages
from .rank_passes import passes_by_rank

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

    It keeps the model groups of OpenRLHF's trainer, the experience maker's splitting and balancing, and the update
    (`train_step`: append, ppo_train, broadcast). OpenRLHF's loop over prompts is replaced by `RunSpec.loop`.
    """

    # DeepSpeed accumulates a fixed number of micro-batches: the rest of a smaller step would go into the next one.
    whole_batches = overlaps_update = True

    def __init__(self, pretrain: str, strategy: Any, *groups: Any, **generate_kwargs: Any) -> None:
        """OpenRLHF's program calls this with the arguments of its PPOTrainer.

        groups: of the policy actors, of a critic and a reward model (None here), of the reference model; vLLM engines
        """
        mark_messages()
        args = strategy.args
        tokenizer = tokenizer_file.load(pretrain)
        tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
        super().__init__(strategy, *groups, tokenizer)
        patches.balancing(keep_order)
        self.experience_maker = MixedExperienceMaker(
            self.actor_model_group, None, None, self.reference_model_group, self.kl_ctl, strategy, tokenizer
        )
        self.spec: RunSpec = args.exgrpo_spec
        self.experiment = experiment = self.spec.experiment
        assert experiment.openrlhf is not None
        self.settings = experiment.openrlhf
        self.prompts = PromptEncoder(experiment.prompts, tokenizer)
        self.model_path = pretrain
        self.ranks = args.actor.num_nodes * args.actor.num_gpus_per_node
        self.sampler = RaySampler(self.vllm_engines, self.settings.timeout, bool(args.vllm.enable_sleep))
        self.sampler_logprobs = args.algo.advantage.is_correction_level != "off"
        self.sampling, self.seed = experiment.sampling, experiment.settings.seed
        self.player = player_of(experiment.environment, self.prompts, experiment.sampling.max_response_tokens)
        self.step = 0  # of the latest update

    # -- what OpenRLHF's program calls --------------------------------------------------------------------------------

    def get_max_steps(self) -> int:
        return 1  # of OpenRLHF's own schedule, whose place actor.py gives to ours

    def fit(self) -> None:
        self.spec.loop(self.spec, lambda checkpoint: self, StopFile(self.spec.run))

    # -- what the training loop calls ---------------------------------------------------------------------------------

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

    def measure(self, rows: Sequence[PackedRow], method: str = "measure") -> list[Measured]:
        """Each row under the current policy, in passes spread over all ranks. method: of the actors"""
        if not rows:
            return []
        of_ranks = passes_by_rank(rows, self.settings.score_tokens, self.ranks, self.args.ds.packing_samples)
        parts = list(itertools.chain.from_iterable(of_ranks))  # rank after rank, the same number for each
        references = self.actor_model_group.async_run_method_batch(
            method_name=method, rows=[[ForwardRow.of(rows[i].prompt, rows[i]) for i in part] for part in parts]
        )
        measured: dict[int, Measured] = {}
        for part, ones in zip(parts, itertools.chain.from_iterable(self._results(references)), strict=True):
            measured.update(zip(part, ones, strict=True))
        if self.args.train.colocate_all:  # torch keeps memory for later use, which vLLM needs
            self._on_actors("empty_cache")
        return [measured[i] for i in range(len(rows))]

    def update(self, batch: MixedBatch, loss: MixedPolicyLoss) -> UpdateStats:
        """OpenRLHF's train_step. π_old of fresh rows is the policy at the beginning of the batch; of those that were
        generated ahead, the one that sampled them.

        With several optimiser steps all rows are measured before them. With a single step their log-probs come from its
        own forward pass; only rows that could not be graded, which that pass leaves out, are measured before it.
        """
        self.step += 1
        flat, rows = batch.flat_rows(), self.forward_rows(batch)
        steps = self.experiment.optimizer.steps_per_batch
        passes = 1 if batch.reincarnated else self.experiment.optimizer.passes_per_batch
        clock = Clock()
        before = [i for i, row in enumerate(flat) if steps * passes > 1 or not row.in_loss]
        measured = dict(zip(before, self.measure([rows[i] for i in before]), strict=True))
        clock.lap("measure")
        references = self._references(batch, rows)
        clock.lap("reference")
        if steps * passes > 1 and loss.clip_around == "policy":
            references["returns"] = [measured[i].logprobs for i in range(len(rows))]
        logprobs = [measured[i].logprobs if i in measured else None for i in range(len(rows))]
        experience = as_experience(batch, rows, logprobs, references)
        if batch.reincarnated:
            self._on_actors("go_through", passes)
        places = batch.group_size + batch.added_size
        order = deal([int(e.total_length) for e in experience], places, steps, self.ranks)
        status, _ = self.train_step([experience[i] for i in order], self.step)
        for recorded in self._on_actors("recorded"):
            measured |= recorded
        policy = [measured[i].logprobs for i in range(len(rows))]
        behaviour = [behaviour_logprobs(row, now) for row, now in zip(flat, policy, strict=True)]
        metrics = {name: float(status[name]) for name in status if name.startswith(_METRICS)}
        if not all(map(math.isfinite, metrics.values())):
            raise NonFiniteUpdate(
                f"the update is not finite (loss {metrics['policy/loss']}, gradient norm "
                f"{metrics['policy/grad_norm']}): that optimiser step was skipped",
                [row_dump(*row) for row in zip(flat, policy, behaviour, strict=True)],
            )
        for openrlhf_name, name in _TIMES.items():
            metrics[f"time/{name}"] = float(status[openrlhf_name]) + clock.laps.get(name, 0.0)
        metrics["time/measure"] = clock.laps["measure"]
        return UpdateStats(policy, behaviour, [measured[i].entropy for i in range(len(rows))], metrics)

    def _references(self, batch: MixedBatch, rows: Sequence[PackedRow]) -> dict[str, list[LogProbs]]:
        """Of each row under the policies of the KL term that are no models of their own, as `as_experience` takes them.
        The copy of the preceding policy becomes the present one."""
        experiment, references = self.experiment, {}
        fields = {"base": "base_action_log_probs", "preceding": "values"}
        for name in experiment.copies:
            if name == "base" or batch.base_share < 1:
                self._on_actors("exchange", name)
                references[fields[name]] = [result.logprobs for result in self.measure(rows)]
                self._on_actors("exchange", name)
        if "preceding" in experiment.copies:
            self._on_actors("take", "preceding")
        if experiment.loss.kl_coef and experiment.lora.rank is not None and "base" not in experiment.copies:
            references[fields["base"]] = [result.logprobs for result in self.measure(rows, "measure_base")]
        return references

    def reincarnate(self) -> None:
        self._on_actors("reincarnate")

    def _on_actors(self, method: str, *arguments: Any) -> Any:
        return self._results(self.actor_model_group.async_run_method(method, *arguments))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> Files:
        parts = self._on_actors("save_state", str(folder.absolute()), self.step)
        name_end_tokens(folder, self.prompts.turn_ends())
        written = {name: entry for part in parts for name, entry in part.items()}
        written.pop("generation_config.json", None)  # it may just have been changed: it is hashed with the rest
        return written

    def load(self, folder: Path) -> None:
        """Checks that the actors loaded this checkpoint when they started (launch.py names it to them), and sends its
        weights to the engines."""
        for states in self._on_actors("get_checkpoint_states"):
            if folder.name != f"checkpoint-{states.get('global_step')}":
                raise CheckpointError(f"{folder}: an actor has loaded step {states.get('global_step')} instead")
            self.step = int(states["global_step"])
        shutil.rmtree(self.spec.run / universal.FOLDER, ignore_errors=True)
        self.sync()

    def _results(self, references: list[Any]) -> Any:
        return results(references, "a policy actor", self.settings.timeout)
