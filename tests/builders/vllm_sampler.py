"""Examines the local engine with vLLM in its process, on a CPU, and prints its findings as JSON. It is a program of its
own, because vLLM changes the process that it runs in.

    python vllm_sampler.py FOLDER    # of a tied and an untied chain model: FOLDER/tied, FOLDER/untied
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_builders import K, make_engine, mixed_batch, questions
from run_builders import ROOT

from exgrpo_orlhf.engines.local import TorchEngine
from exgrpo_orlhf.engines.rows import ForwardRow
from exgrpo_orlhf.environments import Environment
from exgrpo_orlhf.objective import MixedPolicyLoss
from exgrpo_orlhf.replay import Plan
from exgrpo_orlhf.settings import LocalEngine, LoRA, Optimizer, Sampling
from exgrpo_orlhf.workers.fork_server import close_workers

LOSS = MixedPolicyLoss(response_length=24)
OPTIMIZER = Optimizer(learning_rate=1e-2)  # a stale weight shows
CALCULATOR = Environment(str(ROOT / "exgrpo_orlhf" / "testbed" / "chain_calculator.py"), stop=("=",), timeout=60.0)


def engine(model: Path, sampler: str, tokens: int = 24, **more: Any) -> TorchEngine:
    settings = LocalEngine(device="cpu", sampler=sampler, generation_rows=64)
    sampling = Sampling(temperature=1.3, max_response_tokens=tokens)
    return make_engine(model, settings=settings, sampling=sampling, optimizer=OPTIMIZER, **more)


def gap(policy: TorchEngine) -> float:
    """The largest difference between vLLM's log-probs and the trainer's, of rollouts with the weights as they are."""
    groups = list(policy.rollout(Plan(1, questions(6), [], {}), K))
    rows = [ForwardRow.of(policy.prompts.encode(g.question), one) for g in groups for one in g.rollouts]
    sampled = [one.sampler_logprobs for group in groups for one in group.rollouts]
    return max(float(abs(ours.logprobs - own).max()) for ours, own in zip(policy.measure(rows), sampled, strict=True))


def updated(model: Path, updates: int, **more: Any) -> dict[str, Any]:
    """Log-probs before and after updates, and which of vLLM's weights with a name of the policy's are not the same."""
    policy = engine(model, "vllm", **more)
    before, weights = gap(policy), {name: one.detach().clone() for name, one in policy.model.named_parameters()}
    gaps = [policy.update(mixed_batch(policy, seed=i), LOSS).metrics["rollout/logprob_gap"] for i in range(updates)]
    after = gap(policy)  # it takes the weights
    with policy._weights() as own:
        state = {name: one.detach().clone() for name, one in own}
    # vLLM pads the vocabulary
    [theirs] = policy.sampler._llm.apply_model(
        lambda model: {n: p.detach().clone() for n, p in model.named_parameters()}
    )
    copies = {name: one[: len(state[name])] for name, one in theirs.items() if name in state}
    policy.sampler.close()
    return {
        "before": before,
        "after": after,
        "metric": max(gaps),
        "moved": max(float((one - weights[name]).abs().max()) for name, one in policy.model.named_parameters()),
        "compared": sorted(copies),
        "stale": [name for name in copies if not torch.equal(copies[name], state[name])],
    }


def first_tokens(model: Path) -> dict[str, Any]:
    policy, [question] = engine(model, "vllm", tokens=1), questions(1)
    [group] = policy.rollout(Plan(1, [question], [], {}), 10_000)
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([policy.prompts.encode(question)])).logits[0, -1]
    [again] = policy.rollout(Plan(1, [question], [], {}), 10_000)
    both = zip(group.rollouts, again.rollouts, strict=True)
    policy.sampler.close()
    return {
        "counts": np.bincount([one.token_ids[0] for one in group.rollouts], minlength=len(logits)).tolist(),
        "probabilities": (logits.double() / 1.3).softmax(0).tolist(),
        "repeats": all(np.array_equal(one.token_ids, other.token_ids) for one, other in both),
    }


def compared_with_the_loop(model: Path) -> dict[str, Any]:
    """Greedy responses and episodes by both samplers; a caller that stops early; the end of each response."""
    answers: dict[str, list[list[int]]] = {}
    for sampler in ("vllm", "loop"):
        policy = engine(model, sampler)
        greedy = policy.generate_for(questions(20), [[0]] * 20, 0.0, 1.0)
        answers[sampler] = [one.token_ids.tolist() for [one] in greedy]
        if sampler == "vllm":
            next(rest := policy.rollout(Plan(1, questions(12), [], {}), K))
            rest.close()
            rollouts = [one for group in policy.rollout(Plan(2, questions(12), [], {}), K) for one in group.rollouts]
            ends = {(one.finish, one.token_ids[-1] in policy.end) for one in rollouts}
            policy.sampler.close()
        policy = engine(model, sampler, environment=CALCULATOR)
        played = policy.generate_for(questions(12), [[0]] * 12, 0.0, 1.0)
        answers[f"{sampler} episodes"] = [one.token_ids.tolist() for [one] in played]
        turns = [one.turns for [one] in played]
        if sampler == "vllm":
            [logprobs] = {
                len(one.sampler_logprobs) == one.length
                for group in policy.rollout(Plan(1, questions(6), [], {}), K)
                for one in group.rollouts
            }
            policy.sampler.close()
    close_workers()
    return {"answers": answers, "turns": turns, "ends": sorted(ends), "logprobs_of_actions": logprobs}


if __name__ == "__main__":
    models = Path(sys.argv[1])
    torch.manual_seed(0)
    findings = {
        "tied": updated(models / "tied", 10),
        "untied": updated(models / "untied", 10),
        "lora": updated(models / "tied", 3, lora=LoRA(rank=4)),
        "first": first_tokens(models / "tied"),
        "loop": compared_with_the_loop(models / "tied"),
    }
    print(json.dumps(findings))
