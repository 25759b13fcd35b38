"""Builders for tests of the engines: engines, models, batches and plain references."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from exgrpo_orlhf.engines.local import LocalParts, TorchEngine
from exgrpo_orlhf.io.weights import save as save_model
from exgrpo_orlhf.objective import MixedPolicyLoss
from exgrpo_orlhf.objective.divisors import weighted
from exgrpo_orlhf.questions.prompts import Prompts
from exgrpo_orlhf.records import MixedBatch, Question, Rollout, Row, Trajectory
from exgrpo_orlhf.replay import Plan
from exgrpo_orlhf.rewards import Verifier
from exgrpo_orlhf.settings import LocalEngine, Optimizer, Sampling
from exgrpo_orlhf.testbed.modular_chains import ModularChains

K = 4
SMALL = {  # a model that the tokenizer of the chain models fits
    "vocab_size": 18,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
SMALL_GPT2 = {
    "vocab_size": 18,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
# A logit is a sum of 32 products and at most 6 here, so the output layer's rounding error is at most 32 · 2^-24 · 6 =
# 1.1e-5. As much again for the layers below it, and twice that for another CPU's order of summation.
LOGPROB_ERROR = 4e-5


def make_engine(model: Path, *, settings=None, optimizer=None, sampling=None, prompts=None, **more) -> TorchEngine:
    """more: of `LocalParts`, lora, copies and environment; the rest is TorchEngine's"""
    parts = LocalParts(
        settings or LocalEngine(device="cpu"),
        optimizer or Optimizer(learning_rate=1e-3),
        sampling or Sampling(max_response_tokens=24),
        prompts or Prompts(max_tokens=32),
        **{name: more.pop(name) for name in ("lora", "copies", "environment") if name in more},
    )
    return TorchEngine(parts, model_path=model, **more)


def questions(n: int) -> list[Question]:
    return ModularChains(count=n, operands=(2, 3, 4)).load()


def trajectory(rng: np.random.Generator, length: int, step: int = 0) -> Trajectory:
    ids = rng.integers(2, 18, length).astype(np.int32)
    return Trajectory(ids, rng.normal(-1.5, 0.5, length).astype(np.float32), 1.0, step)


def stored_responses(
    chains: list[Question], rng: np.random.Generator, each: int, shortest: int = 2, longest: int = 23
) -> dict[Question, list[Trajectory]]:
    """Random stored trajectories, this many for each question."""
    return {q: [trajectory(rng, int(n)) for n in rng.integers(shortest, longest + 1, each)] for q in chains}


def mixed_batch(engine: TorchEngine, n: int = 6, seed: int = 0, beside: int | None = None) -> MixedBatch:
    """Real rollouts with made-up advantages, so that every group has a signal. The groups of the second half replay a
    trajectory beside this many fresh rollouts (None: K − 1)."""
    rng = np.random.default_rng(seed)
    chains = questions(n)
    plan = Plan(1, chains[: n // 2], chains[n // 2 :], {}, rollouts_per_replayed=beside)
    groups = plan.in_order(Verifier("modular_chain").grade_groups(engine.rollout(plan, K), engine.written))
    rows = []
    for group in groups:
        members = [*group.rollouts, trajectory(rng, 9)] if group.planned_replay else group.rollouts
        advantages = rng.permutation([0.75, -0.25, -0.25, -0.25])[: len(members)]
        rows.append([Row(group.question, one, float(a), True) for one, a in zip(members, advantages, strict=True)])
    return MixedBatch(groups, rows, K)


def sampled_batch(model: Path, n: int = 8, beside: int | None = None) -> MixedBatch:
    """`mixed_batch` of an engine with this model, which is sampled once: a copy, whose rows a test may replace."""
    batch = _sampled_once(model, n, beside)
    return MixedBatch([*batch.groups], [[*rows] for rows in batch.rows], batch.group_size)


@cache
def _sampled_once(model: Path, n: int, beside: int | None) -> MixedBatch:
    return mixed_batch(make_engine(model), n=n, beside=beside)


def as_episodes(batch: MixedBatch) -> MixedBatch:
    """The same tokens, of which the first half of every third and fourth is an environment's: an episode begins with
    an observation or an action, and has several turns. The first group continues a response, and is no episode; the
    second is one that continues an episode."""

    def of(g: int, i: int, response: Rollout | Trajectory) -> Rollout | Trajectory:
        given = min(len(row.token_ids) for row in batch.rows[g]) // 2 if g < 2 else 0
        ids = np.concatenate((batch.rows[g][0].token_ids[:given], response.token_ids[given:]))
        actions = (np.arange(len(ids)) + i) % 4 < 2
        actions[-1] = True
        its = {"token_ids": ids, "actions": actions if g else None} | ({"given": given} if g < 2 else {})
        own, learned = response.behaviour_logprobs, (np.arange(len(ids)) >= given) & (actions if g else True)
        return replace(response, **its, behaviour_logprobs=None if own is None else own[learned])

    rows = [
        [replace(row, response=of(g, i, row.response)) for i, row in enumerate(members)]
        for g, members in enumerate(batch.rows)
    ]
    fresh = [tuple(row.response for row in members if row.trajectory is None) for members in rows]
    groups = [replace(group, rollouts=own) for group, own in zip(batch.groups, fresh, strict=True)]
    return replace(batch, groups=groups, rows=rows)


ADDED = 4  # stored rows of a group, at most
ADDING = (  # bindings of a run that adds them
    "ReplayMixer.injection = @StoredGroup()", f"StoredGroup.rows = {ADDED}", "StoredGroup.least = 2",
    "ReplayMixer.store_rule = @AllFinished()", "ReplayBuffer.per_question = 8", "MixedPolicyLoss.shaping = False",
    "MixedPolicyLoss.clips_replayed = True", "RetirementPolicy.at_accuracy = None",
)  # fmt: skip


def with_added(batch: MixedBatch, loss: MixedPolicyLoss) -> MixedBatch:
    """The batch with up to ADDED stored rows behind the fresh ones of each group, with made-up advantages. They are
    instead of those that stand in a group; the first group has none."""
    rng, rows = np.random.default_rng(3), []
    for g, (group, members) in enumerate(zip(batch.groups, batch.rows, strict=True)):
        fresh = [row for row in members if row.trajectory is None]
        stored = [trajectory(rng, int(n)) for n in rng.integers(2, 20, min(g, ADDED))]
        values = rng.normal(size=len(stored))
        # The first is of another question: single stored rows may be.
        asked = [batch.groups[g - 1].question, *[group.question] * ADDED]
        rows.append([*fresh, *(Row(q, t, float(a), True) for q, t, a in zip(asked, stored, values, strict=False))])
    return weighted(replace(batch, rows=rows, added_size=ADDED), loss)


def behaviour_of(model, engine: TorchEngine, batch: MixedBatch) -> list[torch.Tensor]:
    """Log-probs of each row under its behaviour policy, float64: stored ones, and of fresh rows those under `model`."""
    return [
        plain_stats(model, engine.prompts.encode(row.question), row.response)[0]
        if row.trajectory is None
        else torch.from_numpy(row.trajectory.behaviour_logprobs).double()
        for row in batch.flat_rows()
    ]


def weights(engine: TorchEngine) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in engine.model.parameters()])


def own_tokens(response: Rollout | Trajectory) -> torch.Tensor | slice:
    return slice(None) if response.learned is None else torch.from_numpy(response.learned)


def plain_stats(model, prompt: list[int], response: np.ndarray | Rollout | Trajectory, temperature: float = 1.0):
    """Log-probs and entropies of the response's tokens, or of an episode's actions, from the whole logits of one
    unpadded row."""
    own = slice(None) if isinstance(response, np.ndarray) else own_tokens(response)
    ids = torch.tensor([*prompt, *(response if isinstance(response, np.ndarray) else response.token_ids).tolist()])
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].double()
    logprobs = (logits / temperature).log_softmax(1).gather(1, ids[len(prompt) :, None]).squeeze(1)
    p = logits.softmax(1)
    return logprobs[own], -(p * p.log()).sum(1)[own]


def plain_update(
    model,
    engine: TorchEngine,
    batch: MixedBatch,
    behaviour: list[torch.Tensor],
    normalizer: str = "constant",
    reference=None,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    ratio: str = "token",
) -> list[torch.Tensor]:
    """Adds the gradient of the loss over the whole batch, from the whole logits row by row; returns the log-probs."""
    rows, measured = batch.flat_rows(), []
    tokens, places = sum(row.length for row in rows), len(batch.rows) * K
    divisors = {"constant": lambda n: places * 24, "sequences": lambda n: places * n, "tokens": lambda n: tokens}
    total = torch.zeros((), dtype=torch.float64)
    for row, old in zip(rows, behaviour, strict=True):
        prompt = engine.prompts.encode(row.question)
        ids = torch.tensor([*prompt, *row.token_ids.tolist()])
        own = own_tokens(row.response)
        logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1][own]
        logprobs = logits.log_softmax(1).gather(1, ids[len(prompt) :, None][own]).squeeze(1)
        measured.append(logprobs.detach())
        if not row.in_loss:
            continue
        w = torch.exp(logprobs - old)
        if row.trajectory is None:
            w = w if ratio == "token" else torch.exp((logprobs - old).mean()).expand(len(w))
            terms = torch.minimum(w * row.advantage, w.clamp(0.8, 1.2) * row.advantage)
        else:
            terms = w / (w + 0.1) * row.advantage
        total = total - terms.sum() / divisors[normalizer](len(terms))
        if reference is not None:
            x = plain_stats(reference, prompt, row.response)[0] - logprobs
            kl_divisor = divisors["sequences" if normalizer == "sequences" else "tokens"](len(x))
            total = total + kl_coef * (torch.exp(x) - x - 1).sum() / kl_divisor
            entropy = torch.distributions.Categorical(logits=logits).entropy().sum()
            total = total - entropy_coef * entropy / tokens
    total.backward()
    return measured


def use_sgd(engine: TorchEngine, rate: float) -> None:
    engine._update.optimizer = torch.optim.SGD(engine.model.parameters(), lr=rate)
    engine._update.scheduler.optimizer = engine._update.optimizer


def float32_error(start: torch.Tensor, batch: MixedBatch, moved: torch.Tensor, *, steps: int) -> float:
    """A bound on the rounding error of a weight after this many optimiser steps in float32.

    A gradient is a sum over the batch's tokens, with an error of up to tokens · 2^-24 of its size; a weight is stored
    with an error of 2^-24 of its own. Both occur in each step; four times that for another CPU's order of summation.
    """
    tokens = sum(len(row.token_ids) for row in batch.flat_rows())
    return 4 * steps * 2.0**-24 * (tokens * float(moved.abs().max()) + float(start.abs().max()))


def gradient(engine: TorchEngine, batch: MixedBatch, loss: MixedPolicyLoss) -> torch.Tensor:
    """The gradient of one optimiser step, as the change of the weights by SGD with rate 1, and rounded as they are."""
    before = weights(engine)
    use_sgd(engine, 1.0)
    engine.update(batch, loss)
    return before - weights(engine)


def move_adapter(model: torch.nn.Module, seed: int = 0, spread: float = 0.1) -> None:
    """Gives A and B of every layer random values, as if they had learned."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))


def random_model(config, biases: bool = False) -> torch.nn.Module:
    """With weights so large that not all tokens are about equally probable. biases: whether those are not 0"""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter *= 8
            elif biases and name.endswith("bias"):
                parameter.normal_()
    return model


def saved_model(model, tokenizer_of: Path, folder: Path) -> Path:
    """A model, or one of a configuration, beside the tokenizer of another."""
    if not isinstance(model, torch.nn.Module):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(model)
    save_model(model, folder)
    AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(folder)
    return folder


def repeated_prompts(lengths, times) -> list[list[int]]:
    """Random prompts of these lengths. times: how often each comes, a number for all or for each"""
    rng = np.random.default_rng(0)
    counts = [times] * len(lengths) if isinstance(times, int) else times
    prompts = [rng.integers(2, 18, n).tolist() for n in lengths]
    return [prompt for prompt, count in zip(prompts, counts, strict=True) for _ in range(count)]
