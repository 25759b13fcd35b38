"""The engine with OpenRLHF: it samples from vLLM engines, measures and trains with policy actors, all of them behind
Ray."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from openrlhf.trainer.ppo_utils.experience import Experience

from ...attention.packing import PackedRow
from ...checkpoints import CheckpointError, name_end_tokens
from ...environments.playing import player_of
from ...experiment import Experiment
from ...io.files import Files
from ...objective import MixedPolicyLoss
from ...questions.prompts import PromptEncoder
from ...records import Measured, MixedBatch, RolloutGroup
from ...sampling import EngineLost
from ...sampling.ray_engines import RaySampler, results
from ..engine import Clock, Engine, LogProbs, NonFiniteUpdate, UpdateStats
from ..rows import ForwardRow, behaviour_logprobs, row_dump
from . import universal
from .experience_maker import as_experience, deal
from .rank_passes import passes_by_rank

_METRICS = ("policy/", "rollout/logprob_gap", "rollout/filtered_share")
# OpenRLHF's times of a step, under our names.
_TIMES = {"timing/make_experience": "reference", "timing/ppo_train": "train", "timing/broadcast": "sync"}
TrainStep = Callable[[list[Experience], int], tuple[dict[str, Any], int]]


class OpenRLHFEngine(Engine):
    """The engine with DeepSpeed and vLLM, in the process of OpenRLHF's trainer.

    Of that trainer it knows two methods: `train_step` makes an update and ends with `sync`, which calls `broadcast`.
    """

    # DeepSpeed accumulates a fixed number of micro-batches: the rest of a smaller step would go into the next one.
    whole_batches = overlaps_update = True

    def __init__(
        self,
        args: Any,
        tokenizer: Any,
        *,
        actors: Any,
        vllm_engines: Sequence[Any],
        train_step: TrainStep,
        broadcast: Callable[[], None],
    ) -> None:
        """args: OpenRLHF's, with the experiment; actors: OpenRLHF's group of the policy actors; train_step: takes the
        experience of a batch and the number of the step, and returns metrics and the next number; broadcast: sends the
        actors' weights to the vLLM engines"""
        self.args, self.tokenizer, self.actors = args, tokenizer, actors
        self._train_step, self._broadcast = train_step, broadcast
        self.experiment: Experiment = args.exgrpo
        experiment = self.experiment
        assert experiment.openrlhf is not None
        self.settings = experiment.openrlhf
        self.prompts = PromptEncoder(experiment.prompts, tokenizer)
        self.model_path = args.actor.model_name_or_path
        self.ranks = args.actor.num_nodes * args.actor.num_gpus_per_node
        self.sampler = RaySampler(vllm_engines, self.settings.timeout, bool(args.vllm.enable_sleep))
        self.sampler_logprobs = args.algo.advantage.is_correction_level != "off"
        self.sampling, self.seed = experiment.sampling, experiment.settings.seed
        self.player = player_of(experiment.environment, self.prompts, experiment.sampling.max_response_tokens)
        self.step = 0  # of the latest update

    # -- sample -------------------------------------------------------------------------------------------------------

    def behaviour_logprobs(self, groups: Sequence[RolloutGroup]) -> list[LogProbs]:
        """Of the vLLM engine that sampled them: the actors are at work on the batch before. Raises EngineLost."""
        logprobs: list[LogProbs] = []
        for group in groups:
            for rollout in group.rollouts:
                if rollout.sampler_logprobs is None:
                    raise EngineLost(f"vLLM gave a response to question {group.question.id} without its log-probs")
                logprobs.append(rollout.sampler_logprobs)
        return logprobs

    def sync(self) -> None:
        self._broadcast()

    # -- score and update ---------------------------------------------------------------------------------------------

    def measure(self, rows: Sequence[PackedRow], method: str = "measure") -> list[Measured]:
        """Each row under the current policy, in passes spread over all ranks. method: of the actors"""
        if not rows:
            return []
        of_ranks = passes_by_rank(rows, self.settings.score_tokens, self.ranks, self.args.ds.packing_samples)
        parts = list(itertools.chain.from_iterable(of_ranks))  # rank after rank, the same number for each
        references = self.actors.async_run_method_batch(
            method_name=method, rows=[[ForwardRow.of(rows[i].prompt, rows[i]) for i in part] for part in parts]
        )
        measured: dict[int, Measured] = {}
        for part, ones in zip(parts, itertools.chain.from_iterable(self._results(references)), strict=True):
            measured.update(zip(part, ones, strict=True))
        if self.args.train.colocate_all:  # torch keeps memory for later use, which vLLM needs
            self.on_ranks("empty_cache")
        return [measured[i] for i in range(len(rows))]

    def update(self, batch: MixedBatch, loss: MixedPolicyLoss) -> UpdateStats:
        """OpenRLHF's train_step. π_old of fresh rows is the policy at the beginning of the batch; of those that were
        generated ahead, the one that sampled them.

        With several optimiser steps all rows are measured before them. With a single step, or where the rows brought
        π_old along, their log-probs come from their first forward pass of the update; only rows that could not be
        graded, which that pass leaves out, are measured before it.
        """
        self.step += 1
        flat, rows = batch.flat_rows(), self.forward_rows(batch)
        steps = self.experiment.optimizer.steps_per_batch
        passes = 1 if batch.reincarnated else self.experiment.optimizer.passes_per_batch
        around_policy = steps * passes > 1 and loss.clip_around == "policy"
        measures = around_policy or (steps * passes > 1 and not self.experiment.settings.generate_ahead)
        clock = Clock()
        before = [i for i, row in enumerate(flat) if measures or not row.in_loss]
        measured = dict(zip(before, self.measure([rows[i] for i in before]), strict=True))
        clock.lap("measure")
        references = self._references(batch, rows)
        clock.lap("reference")
        if around_policy:
            references["returns"] = [measured[i].logprobs for i in range(len(rows))]
        logprobs = [measured[i].logprobs if i in measured else None for i in range(len(rows))]
        experience = as_experience(batch, rows, logprobs, references)
        if batch.reincarnated:
            self.on_ranks("go_through", passes)
        places = batch.group_size + batch.added_size
        order = deal([int(e.total_length) for e in experience], places, steps, self.ranks)
        status, _ = self._train_step([experience[i] for i in order], self.step)
        for recorded in self.on_ranks("recorded"):
            measured = recorded | measured
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
                self.on_ranks("exchange", name)
                references[fields[name]] = [result.logprobs for result in self.measure(rows)]
                self.on_ranks("exchange", name)
        if "preceding" in experiment.copies:
            self.on_ranks("take", "preceding")
        if experiment.loss.kl_coef and experiment.lora.rank is not None and "base" not in experiment.copies:
            references[fields["base"]] = [result.logprobs for result in self.measure(rows, "measure_base")]
        return references

    def reincarnate(self) -> None:
        self.on_ranks("reincarnate")

    # -- save ---------------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> Files:
        parts = self.on_ranks("save_state", str(folder.absolute()), self.step)
        name_end_tokens(folder, self.prompts.turn_ends())
        written = {name: entry for part in parts for name, entry in part.items()}
        written.pop("generation_config.json", None)  # it may just have been changed: it is hashed with the rest
        return written

    def load(self, folder: Path) -> None:
        """Checks that the actors loaded this checkpoint when they started (launch.py names it to them), and sends its
        weights to the vLLM engines."""
        for states in self.on_ranks("get_checkpoint_states"):
            if folder.name != f"checkpoint-{states.get('global_step')}":
                raise CheckpointError(f"{folder}: an actor has loaded step {states.get('global_step')} instead")
            self.step = int(states["global_step"])
        shutil.rmtree(folder.parent / universal.FOLDER, ignore_errors=True)
        self.sync()

    def on_ranks(self, method: str, *args: Any) -> list[Any]:
        """What a method of the policy actors returns, rank by rank. Raises EngineLost."""
        return list(self._results(self.actors.async_run_method(method, *args)))

    def _results(self, references: list[Any]) -> Any:
        return results(references, "a policy actor", self.settings.timeout)
