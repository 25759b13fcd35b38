"""Sections 4 and 5 of gpu.py: OpenRLHF's actor with DeepSpeed on one rank, in one process, against the local engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from gpu_work import PROMPT, Figures, Timed, Work, against, timed

from exgrpo_orlhf.engines.rows import micro_batches
from exgrpo_orlhf.records import MixedBatch


def make_actor(work: Work, batch: MixedBatch, packed: bool) -> Any:
    """OpenRLHF's policy actor in this process, as its trainer makes it."""
    from exgrpo_orlhf import config
    from exgrpo_orlhf.engines.openrlhf import launch

    values = {"actor.num_gpus_per_node": 1, "vllm.num_engines": 1, "ds.zero_stage": 2, "ds.packing_samples": packed}
    values["ds.attn_implementation"] = "flash_attention_2" if packed else "sdpa"
    values["train.micro_batch_size"] = max(4, work.size.tokens // work.size.row)
    bindings = ["train.engine = 'openrlhf'", "Work.model = @PretrainedModel()", "Optimizer.learning_rate = 1e-6"]
    bindings += [f"PretrainedModel.path = {str(work.folder)!r}", f"MAX_RESPONSE_TOKENS = {work.size.row - PROMPT}"]
    bindings += [f"train.questions_per_step = {len(batch.rows)}", f"train.group_size = {len(batch.rows[0])}"]
    bindings += [f"OpenRLHF.cpu_bench = {not work.cuda}", f"OpenRLHF.flags = {values!r}"]
    experiment = config.load(["toy.gin"], bindings)
    assert experiment.openrlhf is not None
    launch.prepare(experiment.openrlhf)
    from openrlhf.utils import get_strategy

    from exgrpo_orlhf.engines.openrlhf import actor

    args = launch.parse(experiment, str(work.folder), work.folder, resume=False)
    args.exgrpo = replace(experiment, loss=work.loss)
    made = actor.MixedPolicyActor(1, 0, None, None)
    made.init_model_from_pretrained(get_strategy(args), str(work.folder), 1, None)  # 1: its own schedule's steps
    return made


def openrlhf_actor(work: Work, packed: bool) -> Figures:
    work.make_model()
    batch, rows = work.batch()

    def by_the_engine(dtype: str) -> Timed:  # its memory is free again when it is done
        engine = work.engine(dtype)
        return timed(work, lambda: engine.update(batch, work.loss))

    exact, rounded = by_the_engine("float32"), by_the_engine("bfloat16")
    actor, parts = make_actor(work, batch, packed), list(micro_batches(rows, work.size.tokens))
    from openrlhf.models import Actor

    from exgrpo_orlhf.engines.openrlhf.actor import MixedActor
    from exgrpo_orlhf.engines.openrlhf.experience_maker import MixedExperienceMaker, as_experience

    def measure_all() -> list[tuple[np.ndarray, float]]:
        measurements = [one for part in parts for one in actor.measure([rows[i] for i in part])]
        return [measurements[j] for j in np.argsort(np.concatenate(parts))]

    measured = timed(work, measure_all)
    logprobs, entropies = zip(*measured.first, strict=True)
    pairs = zip(batch.flat_rows(), logprobs, strict=True)
    old = [now if row.trajectory is None else row.trajectory.behaviour_logprobs for row, now in pairs]
    maker = MixedExperienceMaker(None, None, None, None, None, actor.strategy, actor.tokenizer)

    def update() -> Figures:
        for experience in maker.make_experience_batch(as_experience(batch, rows, old)):
            actor.append(experience)
        return actor.fit()

    updated = timed(work, update)
    MixedActor.forward = Actor.forward
    actor.trainer.actor_loss_fn.single_step = False  # nothing is recorded, for which it has no entropies
    with_logits, figures = timed(work, update), {}
    for name in ("loss", "grad_norm"):
        figures[f"{name}, off by"] = abs(updated.first[f"policy/{name}"] / exact.first.metrics[f"policy/{name}"] - 1)
    off = lambda a, b: float(np.abs(np.hstack(a) - np.hstack(b)).mean())
    figures["log-probs, nats off"] = off(logprobs, exact.first.policy_logprobs)
    figures["entropies, nats off"] = off(entropies, exact.first.entropies)
    figures |= against("update", updated, with_logits)
    for name, one in (("update, local", rounded), ("measure", measured)):
        figures |= {f"{name}: ms": one.seconds * 1e3} | ({f"{name}: GB": one.gigabytes} if work.cuda else {})
    return figures
