#!/usr/bin/env python
"""What LoRA costs and saves on the local engine, against training of all weights.

Memory and time of a step: processes of their own, in turns, each with one rollout of a few questions and two updates on
it (the second one has Adam's states), with large and with small micro-batches, since LoRA does not save activations.
Peak memory is the process's, imports included; trained parameters and bytes of Adam's states are counted. The model is
SmolLM2-135M, without its supervised start (make smollm2).

Generation: tokens per second of the same responses with the adapter merged into the weights and beside them, in turns
in one process; merged includes merging. The engine merges.

Goal: with small micro-batches a quarter less peak memory than training of all weights, and merged generation at most
5 % slower than beside.
With --small a tiny model, whose memory is all imports: the goals do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from command_line import TINY, finish, make_parser

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.local import LocalParts, TorchEngine
from exgrpo_orlhf.experiment import Experiment
from exgrpo_orlhf.records import MixedBatch, Row
from exgrpo_orlhf.replay import Plan
from exgrpo_orlhf.settings import LoRA

ROOT = Path(__file__).resolve().parent.parent
K = 4
TOKENS = (2048, 512)  # of a micro-batch
LARGE = ("gin/testbed/smollm2_one_step.gin", ["Work.model = @PretrainedModel()", "LocalEngine.threads = 1"])


def load(small: bool) -> Experiment:
    file, bindings = ("gin/toy.gin", TINY) if small else LARGE
    return config.load([file], bindings)


def make_engine(experiment: Experiment, lora: LoRA) -> TorchEngine:
    return TorchEngine(replace(LocalParts.of(experiment), lora=lora), model_path=experiment.model.prepare())


def batch(engine: TorchEngine, experiment: Experiment, questions: int) -> MixedBatch:
    """Rollouts with made-up advantages."""
    groups = list(engine.rollout(Plan(1, experiment.questions.load()[:questions], [], {}), K))
    advantages = (0.75, -0.25, -0.25, -0.25)
    rows = [[Row(g.question, one, a, True) for one, a in zip(g.rollouts, advantages, strict=True)] for g in groups]
    return MixedBatch(groups, rows, K)


def step(rank: int, tokens: int, small: bool) -> dict[str, float]:
    experiment = load(small)
    assert experiment.local is not None
    experiment = replace(experiment, local=replace(experiment.local, micro_batch_tokens=tokens))
    torch.set_num_threads(1)
    engine = make_engine(experiment, LoRA(rank=rank or None))
    made, seconds = batch(engine, experiment, 2 if small else 8), []
    for _ in range(2):
        begin = time.perf_counter()
        engine.update(made, experiment.loss)
        seconds.append(time.perf_counter() - begin)
    states = [value for state in engine._update.optimizer.state.values() for value in state.values()]
    return {
        "peak_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
        "trained": float(sum(p.numel() for p in engine.model.parameters() if p.requires_grad)),
        "adam_MB": sum(value.numel() * value.element_size() for value in states) / 1e6,
        "update_seconds": seconds[-1],
    }


def in_process(rank: int, tokens: int, small: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "--rank", str(rank), "--tokens", str(tokens), *(["--small"] if small else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def generation(rank: int, small: bool, turns: int) -> dict[str, float]:
    experiment = load(small)
    torch.set_num_threads(1)
    experiment = replace(experiment, sampling=replace(experiment.sampling, max_response_tokens=16 if small else 64))
    engine = make_engine(experiment, LoRA(rank=rank))
    adapter = engine.adapter
    assert adapter is not None
    merged = adapter.merged
    plan = Plan(1, experiment.questions.load()[: 2 if small else 8], [], {})
    rates: dict[str, list[float]] = {"merged": [], "beside": []}
    for turn in range(turns + 1):
        for name, context in (("merged", merged), ("beside", nullcontext)):
            adapter.merged = context  # type: ignore[method-assign]
            begin = time.perf_counter()
            groups = list(engine.rollout(plan, 8))
            tokens = sum(len(one.token_ids) for group in groups for one in group.rollouts)
            if turn:  # the first one warms up
                rates[name].append(tokens / (time.perf_counter() - begin))
    return {f"{name}_tokens_per_second": statistics.median(values) for name, values in rates.items()}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--lora-rank", type=int, default=16, help="of the matrices (default 16)")
    parser.add_argument("--turns", type=int, default=3, help="of generation (default 3)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # what this program starts: one step
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        print(json.dumps(step(arguments.rank, arguments.tokens, arguments.small)))
        return 0
    ranks, small = {"all weights": 0, f"LoRA {arguments.lora_rank}": arguments.lora_rank}, arguments.small
    columns = {f"{name}, {tokens}": in_process(ranks[name], tokens, small) for tokens in TOKENS for name in ranks}
    print(f"{'':18}" + "".join(f"{name:>19}" for name in columns))
    for name in next(iter(columns.values())):
        print(f"{name:18}" + "".join(f"{column[name]:19,.2f}" for column in columns.values()))
    rates = generation(arguments.lora_rank, small, 1 if small else arguments.turns)
    for name, value in rates.items():
        print(f"{name:28}{value:10,.1f}")
    full, adapter = list(columns.values())[-2:]
    saved = 1 - adapter["peak_MB"] / full["peak_MB"]
    faster = rates["merged_tokens_per_second"] / rates["beside_tokens_per_second"]
    met = small or (saved >= 0.25 and faster >= 0.95)
    summary = (
        f"{saved:.0%} less peak memory with small micro-batches, generation merged {faster:.2f} times as fast as beside"
    )
    return finish(arguments, {"step": columns, **rates, "saved": saved, "faster": faster, "met": met}, summary)


if __name__ == "__main__":
    sys.exit(main())
