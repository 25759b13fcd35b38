#!/usr/bin/env python
"""What runs under CUDA in bfloat16, with a vocabulary of 151,936: is it right, how fast, how much memory?

For one GPU. torch and transformers suffice for sections 1 to 3; 4 and 5 run where OpenRLHF is installed and say so
where it is not. Each section is a process of its own, so that its memory peaks are its own. Goals:

1  token statistics, hidden size 3,584, 8,192 tokens, against the whole logits (float32 log_softmax and entropy of
   bfloat16 logits): peak extra memory at most a tenth (the weight's own gradient aside), time at most 1.1 times without
   gradients and 1.4 times with (the logits are computed again); values differ by less than 0.01 nats.
2  the local engine in bfloat16 over float32 master weights against float32 on the CPU, on the chain model: log-probs
   differ by less than 0.05 on average and 0.5 at most, the updates' cosine is above 0.9; an engine that continues from
   a checkpoint makes the step that the first one makes (within a hundredth of its length).
3  the local engine on a random Qwen2 of half a billion parameters against transformers alone (`model.generate`; a
   forward pass with the whole logits): generation, update and scoring no slower; peak memory of the update at most 0.7
   times, of scoring at most 0.5; the gradient norm within 2 %. The share of the GPU's peak counts 6 operations (scoring:
   2) a parameter and token, attention's own left out. No row of a random model ends early: what the local engine gains
   from rows that leave the batch does not show here.
4  OpenRLHF's actor with DeepSpeed ZeRO-2 on one rank, without Ray and vLLM, the same model and rows, attention 'sdpa':
   loss and gradient norm within 5 % of the local engine's in float32, log-probs and entropies that `measure` gives
   within 0.05 nats of its on average; `measure` at most half the peak memory of the update.
5  the same with packed rows and flash_attention_2, where flash_attn is installed.

`--device cpu --tiny` runs every section on the CPU in seconds, to test this script: goals of time and memory do not
count there (and a CPU has no memory figures). About five minutes on a GPU, and more the first time, when the chain
model is warmed up. DeepSpeed compiles its Adam with nvcc.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import operator
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from exgrpo_orlhf.engines.local import LocalEngine, LocalSettings
from exgrpo_orlhf.engines.rows import ForwardRow, micro_batches
from exgrpo_orlhf.objective import MixedPolicyLoss, token_stats
from exgrpo_orlhf.prompts import Prompts
from exgrpo_orlhf.replay import Grade, MixedBatch, Plan, Rollout, RolloutGroup, Row, Trajectory
from exgrpo_orlhf.settings import Optimizer, Sampling
from exgrpo_orlhf.tasks.chain_model import ChainModel, chain_tokenizer
from exgrpo_orlhf.tasks.modular_chains import ModularChains

Figures = dict[str, Any]
# Dense bfloat16, TFLOP/s, NVIDIA's data sheets; the first name that is part of the GPU's.
PEAKS = {"A100": 312, "H100 PCIe": 756, "H100": 989, "H200": 989, "L40S": 362, "RTX 4090": 165}
PROMPT = 32  # tokens at most
SECTIONS = {
    1: "token statistics",
    2: "the local engine against float32 on the CPU",
    3: "the local engine against transformers alone",
    4: "OpenRLHF's actor, sdpa",
    5: "OpenRLHF's actor, packed rows, flash_attention_2",
}


class Goal(NamedTuple):
    figure: str
    compare: Callable[[float, float], bool]
    limit: float
    on_gpu: bool = False  # of time or memory: says nothing about tiny shapes on a CPU


LE, GE = operator.le, operator.ge
ACTOR_GOALS = [
    Goal("loss, of float32's, off by", LE, 0.05),
    Goal("gradient norm, of float32's, off by", LE, 0.05),
    Goal("log-probs, nats off, mean", LE, 0.05),
    Goal("entropies, nats off, mean", LE, 0.05),
    Goal("measure: memory, of the update's", LE, 0.5, True),
]
GOALS = {
    1: [
        *(Goal(f"{case}: time, of plain", LE, limit, True) for case, limit in (("forward", 1.1), ("backward", 1.4))),
        *(Goal(f"{case}: extra memory, of plain", LE, 0.1, True) for case in ("forward", "backward")),
        *(Goal(f"{case}: nats off, largest", LE, 0.01) for case in ("forward", "backward")),
    ],
    2: [
        Goal("log-probs, nats off, mean", LE, 0.05),
        Goal("log-probs, nats off, largest", LE, 0.5),
        Goal("cosine of the updates", GE, 0.9),
        Goal("resumed step, off by, of its length", LE, 0.01),
    ],
    3: [
        *(Goal(f"{what}: speed, of plain", GE, 1.0, True) for what in ("generation", "update", "scoring")),
        Goal("update: memory, of plain", LE, 0.7, True),
        Goal("scoring: memory, of plain", LE, 0.5, True),
        Goal("gradient norm, of plain's, off by", LE, 0.02),
    ],
    4: ACTOR_GOALS,
    5: ACTOR_GOALS,
}


class Work(NamedTuple):
    """What a section is run on. tokens: padded, of a micro-batch; length: of a response, at most"""

    device: str
    tiny: bool
    tokens: int

    @property
    def length(self) -> int:
        return 24 if self.tiny else 512 - PROMPT

    @property
    def vocabulary(self) -> int:
        return 2048 if self.tiny else 151_936

    def model(self, folder: Path) -> Path:
        """A random Qwen2, of weights that bfloat16 holds exactly: what differs later is the arithmetic."""
        shape = (64, 2, 2, 1, 128) if self.tiny else (896, 24, 14, 2, 4864)  # of Qwen2.5-0.5B
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
        config = Qwen2Config(
            **dict(zip(names, shape, strict=True)),
            vocab_size=self.vocabulary,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
        torch.manual_seed(0)
        with torch.device(self.device):
            Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)
        chain_tokenizer().save_pretrained(folder)
        return folder

    def batch(self) -> MixedBatch:
        """Random tokens and advantages; the second half of the groups ends with a stored trajectory."""
        rng = np.random.default_rng(0)
        questions, k = ModularChains(count=4 if self.tiny else 16).load(), 4 if self.tiny else 8
        groups, rows = [], []
        for i, question in enumerate(questions):
            lengths = rng.integers(self.length // 2, self.length + 1, k)
            ids = [rng.integers(2, self.vocabulary, n).astype(np.int32) for n in lengths]
            behaviour = rng.normal(-np.log(self.vocabulary), 0.5, len(ids[-1])).astype(np.float32)
            stored = Trajectory(ids[-1], behaviour, 1.0, 0) if i >= len(questions) // 2 else None
            replayed = [None] * (k - 1) + [stored]
            fresh = tuple(Rollout(t, "length", Grade("wrong", 0.0)) for t in ids[: k if stored is None else k - 1])
            advantages = rng.normal(size=k)
            advantages -= advantages.mean()
            groups.append(RolloutGroup(question, fresh, replayed=stored is not None))
            members = zip(ids, advantages, replayed, strict=True)
            rows.append([Row(question, t, float(a), True, old) for t, a, old in members])
        return MixedBatch(groups, rows)

    def engine(self, model: Path, dtype: str, device: str | None = None, **more: Any) -> LocalEngine:
        settings = LocalSettings(device=device or self.device, dtype=dtype, micro_batch_tokens=self.tokens)
        sampling = Sampling(max_response_tokens=self.length)
        return LocalEngine(settings, Optimizer(), sampling, Prompts(max_tokens=PROMPT), model_path=model, **more)


class Timed(NamedTuple):
    first: Any  # what the first call, which is not timed, returned
    seconds: float  # the least of the others
    peak: float | None  # GB allocated at most, what was there before included; None on a CPU


def timed(function: Callable[[], Any], work: Work, repeats: int = 3) -> Timed:
    cuda = work.device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    first, seconds = function(), []
    for _ in range(1 if work.tiny else repeats):
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return Timed(first, min(seconds), torch.cuda.max_memory_allocated() / 1e9 if cuda else None)


def ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def free(work: Work) -> None:
    gc.collect()
    if work.device == "cuda":
        torch.cuda.empty_cache()


# -- 1 ----------------------------------------------------------------------------------------------------------------


def whole_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = (hidden @ weight.t()).float().log_softmax(1)  # (N, V)
    with torch.no_grad():
        entropies = -(log_p.exp() * log_p).sum(1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropies


def token_statistics(work: Work) -> Figures:
    n, h = (64, 32) if work.tiny else (8192, 3584)
    torch.manual_seed(0)
    with torch.device(work.device):
        hidden, weight = torch.randn(n, h).bfloat16(), torch.randn(work.vocabulary, h).mul_(h**-0.5).bfloat16()
        targets = torch.randint(work.vocabulary, (n,))
    gradient = weight.nbytes / 1e9
    figures: Figures = {}
    for case, backward in (("forward", False), ("backward", True)):
        measured = []
        for statistics in (whole_logits, token_stats):

            def step(statistics: Any = statistics, backward: bool = backward) -> Tensor:
                hidden.grad = weight.grad = None
                with torch.set_grad_enabled(backward):
                    outputs = statistics(hidden.requires_grad_(backward), weight.requires_grad_(backward), targets)
                    if backward:
                        outputs[0].mean().backward()
                return torch.stack([output.detach() for output in outputs]).cpu()

            hidden.grad = weight.grad = None
            free(work)
            before = (torch.cuda.memory_allocated() / 1e9 if work.device == "cuda" else 0.0) + backward * gradient
            found = timed(step, work)
            measured.append(found._replace(peak=None if found.peak is None else found.peak - before))
        plain, blocks = measured
        figures |= {
            f"{case}: plain, ms": plain.seconds * 1e3,
            f"{case}: in blocks, ms": blocks.seconds * 1e3,
            f"{case}: time, of plain": blocks.seconds / plain.seconds,
            f"{case}: plain, extra GB": plain.peak,
            f"{case}: in blocks, extra GB": blocks.peak,
            f"{case}: extra memory, of plain": ratio(blocks.peak, plain.peak),
            f"{case}: nats off, largest": float((plain.first - blocks.first).abs().max()),
        }
    return figures


# -- 2 ----------------------------------------------------------------------------------------------------------------


def local_engine(work: Work) -> Figures:
    small: Any = {"operands": (2, 3), "steps": 150, "width": 32, "layers": 2}
    model = ChainModel(**(small if work.tiny else {"operands": (3, 4, 5, 6, 7, 8)})).prepare()
    loss = MixedPolicyLoss(response_length=work.length)
    exact, ours = work.engine(model, "float32", "cpu"), work.engine(model, "bfloat16")
    questions = ModularChains(count=16, operands=(2, 3)).load()
    groups = ours.rollout(Plan(1, questions, [], {}), 8)
    rows = [[Row(g.question, r.token_ids, (-1.0) ** i, True, None) for i, r in enumerate(g.rollouts)] for g in groups]
    batch = MixedBatch(groups, rows)

    def weights(engine: LocalEngine) -> Tensor:
        return torch.cat([p.detach().cpu().flatten().clone() for p in engine.model.parameters()])

    begin, stats = weights(ours), [engine.update(batch, loss) for engine in (exact, ours)]
    off = np.abs(np.subtract(*(np.concatenate(s.policy_logprobs) for s in stats)))
    after = weights(ours)
    with tempfile.TemporaryDirectory() as folder:
        ours.save(Path(folder))
        resumed = work.engine(model, "bfloat16", weights_path=folder)
        resumed.load(Path(folder))
    for engine in (ours, resumed):
        engine.update(batch, loss)
    straight = weights(ours)
    return {
        "log-probs, nats off, mean": float(off.mean()),
        "log-probs, nats off, largest": float(off.max()),
        "cosine of the updates": float(torch.cosine_similarity(weights(exact) - begin, after - begin, dim=0)),
        "resumed step, off by, of its length": float((weights(resumed) - straight).norm() / (straight - after).norm()),
    }


# -- 3 ----------------------------------------------------------------------------------------------------------------


def ours(work: Work, model: Path, batch: MixedBatch) -> tuple[dict[str, Timed], int]:
    """By what is done, and the number of parameters."""
    engine = work.engine(model, "bfloat16")
    stored = {g.question.id: [Trajectory(r.token_ids, np.zeros(len(r.token_ids), np.float32), 1.0, 0)
                              for r in rows] for g, rows in zip(batch.groups, batch.rows, strict=True)}  # fmt: skip
    plan = Plan(1, [], [g.question for g in batch.groups], stored)
    loss, asked = MixedPolicyLoss(response_length=work.length), Plan(1, plan.replayed, [], {})
    found = {
        "generation": timed(lambda: engine.rollout(asked, len(batch.rows[0])), work, repeats=1),
        "scoring": timed(lambda: engine.score(plan, stored, lambda entropy, _: entropy), work),
        "update": timed(lambda: engine.update(batch, loss), work),
    }
    return found, sum(p.numel() for p in engine.model.parameters())


def transformers_alone(work: Work, path: Path, batch: MixedBatch) -> dict[str, Timed]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").to(work.device)
    encode, rows = chain_tokenizer().encode, batch.flat_rows()
    forward = [ForwardRow(encode(row.question.prompt), row.token_ids) for row in rows]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    autocast = lambda: torch.autocast(work.device, torch.bfloat16)

    def padded(sequences: list[list[int]], left: bool) -> tuple[Tensor, Tensor]:
        width = max(map(len, sequences))
        fill = [[0] * (width - len(s)) for s in sequences]
        ids = [f + s if left else s + f for f, s in zip(fill, sequences, strict=True)]
        mask = [[0] * len(f) + [1] * len(s) for f, s in zip(fill, sequences, strict=True)]
        return torch.tensor(ids, device=work.device), torch.tensor(mask, device=work.device)

    @torch.no_grad()
    def generate() -> int:
        ids, mask = padded([list(row.prompt) for row in forward], left=True)
        with autocast():
            options: Any = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "pad_token_id": 0}
            out = model.generate(ids, attention_mask=mask, max_new_tokens=work.length, **options)
        return int((out[:, ids.shape[1] :] != 0).sum())

    def statistics(part: list[int]) -> tuple[list[Tensor], list[Tensor]]:
        ids, _ = padded([[*forward[i].prompt, *forward[i].response.tolist()] for i in part], left=False)
        with autocast():
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        every = logits.float().log_softmax(2)
        chosen = every.gather(2, ids[:, 1:, None]).squeeze(2)
        with torch.no_grad():
            entropies = -(every.exp() * every).sum(2)
        places = [slice(len(forward[i].prompt) - 1, len(forward[i]) - 1) for i in part]
        return [[t[j, place] for j, place in enumerate(places)] for t in (chosen, entropies)]

    @torch.no_grad()
    def score() -> list[float]:
        return [float(e.mean()) for part in micro_batches(forward, work.tokens) for e in statistics(part)[1]]

    def update() -> float:
        for part in micro_batches(forward, work.tokens):
            loss = torch.zeros((), device=work.device)
            for i, logprobs in zip(part, statistics(part)[0], strict=True):
                old = rows[i].replayed
                if old is None:
                    weight = (logprobs - logprobs.detach()).exp()
                else:
                    w = (logprobs - torch.from_numpy(old.behaviour_logprobs).to(work.device)).exp()
                    weight = w / (w + 0.1)
                loss = loss - rows[i].advantage * weight.sum() / (len(rows) * work.length)
            loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    return {
        "generation": timed(generate, work, repeats=1),
        "scoring": timed(score, work),
        "update": timed(update, work),
    }


def throughput(work: Work, folder: Path) -> Figures:
    model, batch = work.model(folder), work.batch()
    mine, parameters = ours(work, model, batch)
    free(work)
    plain = transformers_alone(work, model, batch)
    prompts = [len(chain_tokenizer().encode(row.question.prompt)) for row in batch.flat_rows()]
    tokens = dict.fromkeys(("update", "scoring"), sum(prompts) + sum(len(row.token_ids) for row in batch.flat_rows()))
    generated = sum(len(r.token_ids) for group in mine["generation"].first for r in group.rollouts)
    name = torch.cuda.get_device_name() if work.device == "cuda" else ""
    peak = next((tflops for part, tflops in PEAKS.items() if part in name), None)
    figures: Figures = {"parameters, 10^6": parameters / 1e6}
    for what, operations in (("generation", None), ("update", 6), ("scoring", 2)):
        a, b = mine[what], plain[what]
        ours_s = tokens.get(what, generated) / a.seconds
        plain_s = tokens.get(what, b.first) / b.seconds
        figures |= {
            f"{what}: tokens/s": ours_s,
            f"{what}: plain, tokens/s": plain_s,
            f"{what}: speed, of plain": ours_s / plain_s,
            f"{what}: peak GB": a.peak,
            f"{what}: plain, peak GB": b.peak,
            f"{what}: memory, of plain": ratio(a.peak, b.peak),
        }
        if operations and peak:
            figures[f"{what}: share of {peak} TFLOP/s"] = operations * parameters * ours_s / (peak * 1e12)
    norm = mine["update"].first.metrics["policy/grad_norm"]
    return figures | {"gradient norm, of plain's, off by": abs(norm / plain["update"].first - 1)}


# -- 4, 5 -------------------------------------------------------------------------------------------------------------


def make_actor(work: Work, model: Path, batch: MixedBatch, packed: bool) -> Any:
    """OpenRLHF's policy actor in this process, as its trainer would make it."""
    from exgrpo_orlhf.engines.openrlhf import cpu

    if work.device == "cpu":
        os.environ.update(cpu.environment())
        cpu.install()
    from openrlhf.utils import get_strategy

    from exgrpo_orlhf import config
    from exgrpo_orlhf.engines.openrlhf import launch
    from exgrpo_orlhf.engines.openrlhf.actor import ActorSettings, MixedPolicyActor
    from exgrpo_orlhf.engines.openrlhf.flags import scheduler_steps

    flags = {
        "actor.num_gpus_per_node": 1,
        "vllm.num_engines": 1,  # OpenRLHF's parser wants one; none is started
        "ds.zero_stage": 2,
        "ds.attn_implementation": "flash_attention_2" if packed else "sdpa",
        "ds.packing_samples": packed,
        "train.micro_batch_size": 4 if work.tiny else work.tokens // (work.length + PROMPT),
    }
    bindings = [
        "train.engine = 'openrlhf'",
        f"OpenRLHF.cpu_bench = {work.device == 'cpu'}",
        f"OpenRLHF.flags = {flags!r}",
        "Work.model = @PretrainedModel()",
        f"PretrainedModel.path = {str(model)!r}",
        f"train.questions_per_step = {len(batch.rows)}",
        f"train.group_size = {len(batch.rows[0])}",
        f"MAX_RESPONSE_TOKENS = {work.length}",
        "Optimizer.learning_rate = 1e-6",
    ]
    x = config.load(["base.gin"], bindings)
    args = launch.parse(x, str(model), Path("nowhere"), resume=False)
    args.exgrpo = ActorSettings(MixedPolicyLoss(response_length=work.length), None)
    actor = MixedPolicyActor(1, 0, None, None)
    actor.init_model_from_pretrained(get_strategy(args), str(model), scheduler_steps(x), None)
    return actor


def openrlhf_actor(work: Work, folder: Path, packed: bool) -> Figures:
    model, batch = work.model(folder), work.batch()
    loss = MixedPolicyLoss(response_length=work.length)
    local = {}
    for dtype in ("float32", "bfloat16"):
        engine = work.engine(model, dtype)
        local[dtype] = timed(lambda engine=engine: engine.update(batch, loss), work)
        del engine
        free(work)
    actor = make_actor(work, model, batch, packed)
    from exgrpo_orlhf.engines.openrlhf.experience_maker import MixedExperienceMaker, as_experience

    encode, flat = chain_tokenizer().encode, batch.flat_rows()
    rows = [ForwardRow(encode(row.question.prompt), row.token_ids) for row in flat]
    parts = list(micro_batches(rows, work.tokens))
    order = np.argsort([i for part in parts for i in part])

    def measure() -> tuple[list[np.ndarray], list[float]]:
        found = [actor.measure([rows[i] for i in part]) for part in parts]
        logprobs, entropies = ([value for part in found for value in part[j]] for j in (0, 1))
        return [logprobs[i] for i in order], [entropies[i] for i in order]

    measured = timed(measure, work)
    policy, entropies = measured.first
    old = [p if r.replayed is None else r.replayed.behaviour_logprobs for r, p in zip(flat, policy, strict=True)]
    maker = MixedExperienceMaker(None, None, None, None, None, actor.strategy, actor.tokenizer)
    makes = maker.make_experience_batch

    def update() -> dict[str, float]:
        for experience in makes(as_experience(batch, rows, old)):
            actor.append(experience)
        return actor.fit()

    updated = timed(update, work)
    exact, rounded = local["float32"], local["bfloat16"]
    figures: Figures = {}
    for name, metric in (("loss", "policy/loss"), ("gradient norm", "policy/grad_norm")):
        right, local_value = exact.first.metrics[metric], rounded.first.metrics[metric]
        figures |= {
            f"{name}: local, float32": right,
            f"{name}: local, bfloat16": local_value,
            f"{name}: OpenRLHF": updated.first[metric],
            f"{name}, of float32's, off by": abs(updated.first[metric] / right - 1),
        }

    def off(a: Any, b: Any) -> float:
        return float(np.abs(np.subtract(a, b)).mean())

    right = np.concatenate(exact.first.policy_logprobs)
    return figures | {
        "log-probs, nats off, mean": off(np.concatenate(policy), right),
        "log-probs, nats off, mean: local, bfloat16": off(np.concatenate(rounded.first.policy_logprobs), right),
        "entropies, nats off, mean": off(entropies, exact.first.entropies),
        "update, s": updated.seconds,
        "update, s: local, bfloat16": rounded.seconds,
        "update, peak GB": updated.peak,
        "update, peak GB: local, bfloat16": rounded.peak,
        "measure, s": measured.seconds,
        "measure, peak GB": measured.peak,
        "measure: memory, of the update's": ratio(measured.peak, updated.peak),
    }


# ---------------------------------------------------------------------------------------------------------------------


def left_out(section: int, work: Work) -> str | None:
    """Why a section cannot run here."""
    needed = ("openrlhf", "vllm", "deepspeed", "ray") if section >= 4 else ()
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if section >= 4 and work.device == "cuda" and importlib.util.find_spec("flash_attn") is None:
        missing.append("flash_attn")  # OpenRLHF cannot be imported without it
    return f"not installed: {', '.join(missing)}" if missing else None


def run(section: int, work: Work) -> Figures:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if section == 3:
            return throughput(work, Path(folder))
        if section >= 4:
            return openrlhf_actor(work, Path(folder), packed=section == 5)
    return (token_statistics if section == 1 else local_engine)(work)


def report(section: int, work: Work, figures: Figures) -> bool:
    """Prints the section; whether its goals are met."""
    goals = {goal.figure: goal for goal in GOALS[section]}
    met = True
    for name, value in figures.items():
        verdict, goal = "", goals.get(name)
        if goal and not (goal.on_gpu and work.device == "cpu"):
            passed = goal.compare(value, goal.limit)
            met &= passed
            sign = "at most" if goal.compare is LE else "at least"
            verdict = f"  {'PASS' if passed else 'MISS'} ({sign} {goal.limit})"
        print(f"   {name:46}{'–' if value is None else f'{value:,.4g}':>12}{verdict}", flush=True)
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--section", type=int, choices=SECTIONS, help="this one alone, in this process")
    parser.add_argument("--sections", type=int, nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that take seconds on a CPU")
    tokens = "padded tokens of a micro-batch; 8192 (the default) reach about 45 GB in the plain update"
    parser.add_argument("--tokens", type=int, choices=(2048, 4096, 8192, 16384), default=8192, help=tokens)
    given = parser.parse_args()
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or OpenRLHF would take a GPU that is there
    elif not torch.cuda.is_available():
        print("skipped: torch sees no GPU here (--device cpu --tiny tests this script on a CPU)")
        return 0
    work = Work(given.device, given.tiny, 256 if given.tiny else given.tokens)
    if given.section:
        figures = run(given.section, work)
        met = report(given.section, work, figures)
        if given.json:
            given.json.write_text(json.dumps(figures, indent=1) + "\n")
        return 0 if met else 1
    results: dict[str, Any] = {"device": given.device if given.device == "cpu" else torch.cuda.get_device_name()}
    all_met = True
    for section in given.sections:
        print(f"{section}  {SECTIONS[section]}", flush=True)
        reason = left_out(section, work)
        if reason:
            print(f"   left out, {reason}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "figures.json"
            command = [sys.executable, __file__, "--section", str(section), "--json", str(file)]
            command += ["--device", given.device, "--tokens", str(given.tokens), *(["--tiny"] if given.tiny else [])]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            figures = json.loads(file.read_text()) if file.exists() else None
        if figures is None:
            print("   FAILED:", *done.stdout.splitlines()[-30:], sep="\n   ")
        results[SECTIONS[section]] = figures
        all_met &= figures is not None and report(section, work, figures)
    if given.json:
        given.json.write_text(json.dumps({**results, "met": all_met}, indent=1) + "\n")
    print("met" if all_met else "MISSED")
    return 0 if all_met else 1


if __name__ == "__main__":
    sys.exit(main())
