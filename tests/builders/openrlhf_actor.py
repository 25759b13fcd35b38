"""Builders for the tests of OpenRLHF's policy actor in this process: DeepSpeed on one rank, no Ray, no vLLM.

Without CUDA import openrlhf_on_cpu before this.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine_builders import K

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.lora import gathered
from exgrpo_orlhf.engines.openrlhf import launch
from exgrpo_orlhf.engines.openrlhf.actor import MixedPolicyActor
from exgrpo_orlhf.engines.openrlhf.experience_maker import MixedExperienceMaker, as_experience, deal, keep_order
from exgrpo_orlhf.engines.openrlhf.openrlhf_engine import OpenRLHFEngine
from exgrpo_orlhf.engines.rows import ForwardRow
from exgrpo_orlhf.objective import MixedPolicyLoss
from exgrpo_orlhf.questions.prompts import PromptEncoder
from exgrpo_orlhf.records import MixedBatch

LOSS = MixedPolicyLoss(response_length=24)
FLAGS = {"actor.num_gpus_per_node": 1, "vllm.num_engines": 1, "train.micro_batch_size": 4}


def make_actor(
    model: Path,
    *bindings: str,
    loss: MixedPolicyLoss = LOSS,
    questions_per_step: int = 8,
    resume: Path | None = None,
    rank: tuple[int, int, int | None] = (0, 1, None),
    dtype: str | None = None,
    layout: str | None = None,
    **flags: Any,
):
    """An actor of the CPU test layout, from the checkpoint `resume`.

    Args:
        rank: its number, the number of ranks, and the port on which they meet
        dtype: instead of bfloat16, if the program has made OpenRLHF accept it
        layout: a gin file whose flags are used, overridden by `flags`
    """
    from openrlhf.utils import get_strategy

    number, ranks, port = rank
    flags = {**({} if layout else FLAGS), "actor.num_gpus_per_node": ranks, **flags}
    experiment = config.load(
        ["toy.gin", *([layout] if layout else [])],
        [
            "train.engine = 'openrlhf'",
            "OpenRLHF.cpu_bench = True",
            "Work.model = @PretrainedModel()",
            f"PretrainedModel.path = {str(model)!r}",
            f"train.questions_per_step = {questions_per_step}",
            f"train.group_size = {K}",
            "MAX_RESPONSE_TOKENS = 24",
            f"OpenRLHF.{'more_flags' if layout else 'flags'} = {flags!r}",
            *bindings,
        ],
    )
    args = launch.parse(experiment, str(model), resume or Path("nowhere"), resume=resume is not None)
    args.exgrpo = replace(experiment, loss=loss)
    args.ds.param_dtype = dtype or args.ds.param_dtype
    actor = MixedPolicyActor(ranks, number, port and "localhost", port)
    actor.init_model_from_pretrained(get_strategy(args), str(model), 1, None)
    actor.experiment, actor.encoder = experiment, PromptEncoder(experiment.prompts, actor.tokenizer)
    return actor


def rows_of(actor: Any, batch: MixedBatch) -> list[ForwardRow]:
    return [ForwardRow.of(actor.encoder.encode(row.question), row.response) for row in batch.flat_rows()]


def experience_of(actor: Any, batch: MixedBatch) -> list[Any]:
    """An experience per row; log-probs of fresh rows are those of the actor's policy."""
    rows = rows_of(actor, batch)
    measured = [one.logprobs for one in actor.measure(rows)]
    references = EngineWithoutRay(actor)._references(batch, rows)
    if actor.strategy.args.exgrpo.loss.clip_around == "policy":
        references["returns"] = measured
    return as_experience(batch, rows, measured, references)


class EngineWithoutRay(OpenRLHFEngine):
    """OpenRLHFEngine.update with one actor, in this process. measured: the rows that it has measured before the step"""

    def __init__(self, actor: Any) -> None:
        self.actor, self.measured = actor, []
        calls = {"train_step": self.train_step, "broadcast": lambda: None}
        super().__init__(actor.strategy.args, actor.tokenizer, actors=self, vllm_engines=[], **calls)

    def async_run_method(self, method_name: str, *args: Any) -> list[Any]:
        return [getattr(self.actor, method_name)(*args)]

    def async_run_method_batch(self, method_name: str, rows: list[Any]) -> list[Any]:
        self.measured += [row for part in rows for row in part]
        return [[getattr(self.actor, method_name)(part) for part in rows]]

    def _results(self, references: list[Any]) -> list[Any]:
        return references

    def train_step(self, rollout_samples: list[Any], global_step: int) -> tuple[dict[str, Any], int]:
        append(self.actor, rollout_samples)
        times = dict.fromkeys(("timing/make_experience", "timing/ppo_train", "timing/broadcast"), 0.0)
        return {**self.actor.fit(), **times}, global_step + 1


def update(actor: Any, batch: MixedBatch) -> dict[str, float]:
    """Its metrics."""
    return EngineWithoutRay(actor).update(batch, LOSS).metrics


def fit(actor: Any, batch: MixedBatch) -> dict[str, Any]:
    """OpenRLHF's own metrics too. π_old was measured, whatever the number of optimiser steps."""
    fill(actor, batch)
    return actor.fit()


def fill(actor: Any, batch: MixedBatch, ranks: int = 1, number: int = 0, reference: Any = None) -> None:
    """Appends what rank `number` gets from OpenRLHFEngine.update and OpenRLHF's train_step.

    reference: OpenRLHF's model wrapper
    """
    rows = experience_of(actor, batch)
    steps = len(rows) // actor.strategy.args.train.batch_size
    order = deal([int(row.total_length) for row in rows], batch.group_size + batch.added_size, steps, ranks)
    append(actor, [rows[i] for i in order], ranks, number, reference)


def append(actor: Any, samples: list[Any], ranks: int = 1, number: int = 0, reference: Any = None) -> None:
    maker = MixedExperienceMaker(None, None, None, None, None, actor.strategy, actor.tokenizer)
    experiences = maker.make_experience_batch(samples)
    for experience in experiences if reference else ():
        with torch.no_grad():
            experience.base_action_log_probs = reference(
                experience.sequences, experience.action_mask, attention_mask=experience.attention_mask
            )
    if actor.strategy.args.train.dynamic_batch_enable:
        experiences = keep_order(experiences, actor.strategy.args)
    each = len(experiences) // ranks
    for experience in experiences[number * each : (number + 1) * each]:
        actor.append(experience)


def actor_weights(actor: Any) -> torch.Tensor:
    """All weights that the model computes with, in one float32 tensor."""
    parameters = list(actor.actor.model.module.parameters())
    with gathered(parameters):
        return torch.cat([parameter.detach().flatten().float().clone() for parameter in parameters])
