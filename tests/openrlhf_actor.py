"""OpenRLHF's policy actor in this very process: DeepSpeed on one rank, no Ray, no vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.engine import UpdateStats
from exgrpo_orlhf.engines.openrlhf import launch
from exgrpo_orlhf.engines.openrlhf.actor import ActorSettings, MixedPolicyActor
from exgrpo_orlhf.engines.openrlhf.experience_maker import MixedExperienceMaker, as_experience, deal
from exgrpo_orlhf.engines.openrlhf.flags import scheduler_steps
from exgrpo_orlhf.engines.rows import ForwardRow
from exgrpo_orlhf.objective import MixedPolicyLoss
from exgrpo_orlhf.prompts import PromptEncoder
from exgrpo_orlhf.replay import MixedBatch

FLAGS = {"actor.num_gpus_per_node": 1, "vllm.num_engines": 1, "train.micro_batch_size": 4}


def make_actor(
    model: Path,
    loss: MixedPolicyLoss,
    *bindings: str,
    questions_per_step: int,
    group_size: int,
    resume: Path | None = None,
    **flags: Any,
):
    """An actor of the CPU bench, from the checkpoint `resume`; its trainer's half of the work is `update`."""
    from openrlhf.utils import get_strategy

    x = config.load(
        ["base.gin"],
        [
            "train.engine = 'openrlhf'",
            "OpenRLHF.cpu_bench = True",
            "Work.model = @PretrainedModel()",
            f"PretrainedModel.path = {str(model)!r}",
            f"train.questions_per_step = {questions_per_step}",
            f"train.group_size = {group_size}",
            "MAX_RESPONSE_TOKENS = 24",
            f"OpenRLHF.flags = {FLAGS | flags!r}",
            *bindings,
        ],
    )
    args = launch.parse(x, str(model), resume or Path("nowhere"), resume=resume is not None)
    args.exgrpo = ActorSettings(loss, x.optimizer.skip_above_grad_norm)
    actor = MixedPolicyActor(1, 0, None, None)
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
    rows = experience_of(actor, batch)
    steps = len(rows) // actor.strategy.args.train.batch_size
    order = deal([int(row.total_length) for row in rows], batch.width, steps, 1)
    maker = MixedExperienceMaker(None, None, None, None, None, actor.strategy, actor.tokenizer)
    for experience in maker.make_experience_batch([rows[i] for i in order]):
        actor.append(experience)
    return actor.fit()


def actor_weights(actor: Any) -> torch.Tensor:
    """float32 master weights would be finer; these are what the model computes with. Of ZeRO-3 they are gathered."""
    import deepspeed

    parameters = list(actor.actor.model.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=actor.strategy.stage == 3):
        return torch.cat([parameter.detach().flatten().float().clone() for parameter in parameters])
