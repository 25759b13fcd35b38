"""OpenRLHF's policy actor in this very process: DeepSpeed on one rank, no Ray, no vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.engine import UpdateStats
from exgrpo_orlhf.engines.openrlhf import launch
from exgrpo_orlhf.engines.openrlhf.actor import ActorSettings, MixedPolicyActor
from exgrpo_orlhf.engines.openrlhf.experience_maker import MixedExperienceMaker, as_experience, deal, keep_order
from exgrpo_orlhf.engines.openrlhf.flags import scheduler_steps
from exgrpo_orlhf.engines.rows import ForwardRow
from exgrpo_orlhf.objective import MixedPolicyLoss
from exgrpo_orlhf.questions.prompts import PromptEncoder
from exgrpo_orlhf.records import MixedBatch

FLAGS = {"actor.num_gpus_per_node": 1, "vllm.num_engines": 1, "train.micro_batch_size": 4}


def make_actor(
    model: Path,
    loss: MixedPolicyLoss,
    *bindings: str,
    questions_per_step: int,
    group_size: int,
    resume: Path | None = None,
    rank: tuple[int, int, int | None] = (0, 1, None),
    dtype: str | None = None,
    layout: str | None = None,
    **flags: Any,
):
    """An actor of the CPU bench, from the checkpoint `resume`; its trainer's half of the work is `update`.

    rank: which of how many, and the port on which they meet; dtype: in the place of bfloat16 (a program of its own can
    teach OpenRLHF another); layout: a gin file whose flags count, those of `flags` over them
    """
    from openrlhf.utils import get_strategy

    number, ranks, port = rank
    flags = {**({} if layout else FLAGS), "actor.num_gpus_per_node": ranks, **flags}
    x = config.load(
        ["base.gin", *([layout] if layout else [])],
        [
            "train.engine = 'openrlhf'",
            "OpenRLHF.cpu_bench = True",
            "Work.model = @PretrainedModel()",
            f"PretrainedModel.path = {str(model)!r}",
            f"train.questions_per_step = {questions_per_step}",
            f"train.group_size = {group_size}",
            "MAX_RESPONSE_TOKENS = 24",
            f"OpenRLHF.{'more_flags' if layout else 'flags'} = {flags!r}",
            *bindings,
        ],
    )
    args = launch.parse(x, str(model), resume or Path("nowhere"), resume=resume is not None)
    args.exgrpo = ActorSettings(loss, x.optimizer.skip_above_grad_norm)
    args.ds.param_dtype = dtype or args.ds.param_dtype
    actor = MixedPolicyActor(ranks, number, port and "localhost", port)
    actor.init_model_from_pretrained(get_strategy(args), str(model), scheduler_steps(x), None)
    actor.encoder = PromptEncoder(x.prompts, actor.tokenizer)
    return actor


def rows_of(actor: Any, batch: MixedBatch) -> list[ForwardRow]:
    return [ForwardRow(actor.encoder.encode(row.question), row.token_ids) for row in batch.flat_rows()]


def experience_of(actor: Any, batch: MixedBatch) -> list[Any]:
    """A row each, with what the actor's policy says of the fresh ones."""
    rows = rows_of(actor, batch)
    policy, _ = actor.measure(rows)
    return as_experience(batch, rows, behaviour(batch, policy))


def behaviour(batch: MixedBatch, policy: list[Any]) -> list[Any]:
    rows = zip(batch.flat_rows(), policy, strict=True)
    return [now if row.replayed is None else row.replayed.behaviour_logprobs for row, now in rows]


def update(actor: Any, batch: MixedBatch) -> UpdateStats:
    """What MixedTrainer.update does, without Ray between."""
    known = dict(enumerate(zip(*actor.measure(rows_of(actor, batch)), strict=True)))
    metrics = {name: value for name, value in fit(actor, batch).items() if name.startswith("policy/")}
    known |= actor.recorded()
    policy, entropies = zip(*(known[i] for i in range(len(known))), strict=True)
    return UpdateStats(list(policy), behaviour(batch, policy), list(entropies), metrics)


def fit(actor: Any, batch: MixedBatch) -> dict[str, Any]:
    fill(actor, batch)
    return actor.fit()


def fill(actor: Any, batch: MixedBatch, ranks: int = 1, number: int = 0, reference: Any = None) -> None:
    """What MixedTrainer.update and OpenRLHF's train_step hand to rank `number`. reference: OpenRLHF's model wrapper"""
    rows, args = experience_of(actor, batch), actor.strategy.args
    steps = len(rows) // args.train.batch_size
    order = deal([int(row.total_length) for row in rows], batch.width, steps, ranks)
    maker = MixedExperienceMaker(None, None, None, None, None, actor.strategy, actor.tokenizer)
    experiences = maker.make_experience_batch([rows[i] for i in order])
    for experience in experiences if reference else ():
        with torch.no_grad():
            experience.base_action_log_probs = reference(
                experience.sequences, experience.action_mask, attention_mask=experience.attention_mask
            )
    if args.train.dynamic_batch_enable:
        experiences = keep_order(experiences, args)
    each = len(experiences) // ranks
    for experience in experiences[number * each : (number + 1) * each]:
        actor.append(experience)


def actor_weights(actor: Any) -> torch.Tensor:
    """float32 master weights would be finer; these are what the model computes with. Of ZeRO-3 they are gathered."""
    import deepspeed

    parameters = list(actor.actor.model.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=actor.strategy.stage == 3):
        return torch.cat([parameter.detach().flatten().float().clone() for parameter in parameters])
