#!/usr/bin/env python
"""Under CUDA, in bfloat16, with a vocabulary of 151,936: is it right, how fast, how much memory? For one GPU.

torch and transformers suffice for sections 1 to 3; 4 and 5 say so where OpenRLHF is not installed. Each section is a
process of its own, for its own memory peaks. Goals:

1  token statistics, 8,192 tokens, hidden size 3,584, against the whole logits (float32 log_softmax and entropy of
   bfloat16 logits): extra memory at most a tenth (the weight's own gradient aside), time at most 1.1 times without
   gradients and 1.4 times with (the logits are computed again), values at most 0.01 nats apart.
2  the local engine in bfloat16 over float32 master weights against float32 on the CPU, on the chain model: log-probs at
   most 0.05 nats apart on average and 0.5 anywhere, cosine of the updates at least 0.9; after save and load the next
   step is the one that would have been made, within a hundredth of its length.
3  the local engine on a random Qwen2 of half a billion parameters against transformers alone (`model.generate`; whole
   logits): generation, scoring and update take no longer; memory at most 0.5 times for scoring and 0.7 times for the
   update; gradient norms within 2 %. The share of the GPU's peak counts 6 operations a parameter and token (scoring: 2)
   and leaves attention out. No row of a random model ends early: what the engine gains there does not show.
4  OpenRLHF's actor, DeepSpeed ZeRO-2 on one rank without Ray and vLLM, same model and rows, sdpa: loss and gradient
   norm within 5 % of the local engine's in float32, log-probs and entropies of `measure` within 0.05 nats on average;
   memory of `measure`, which makes no logits, at most half of the update's, which is OpenRLHF's own.
5  the same with packed rows and flash_attention_2.

Takes about five minutes, and more when the chain model has not been warmed up before; DeepSpeed compiles its Adam with
nvcc. `--device cpu --tiny` tests this script in a minute: goals of time and memory do not count there.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
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
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from exgrpo_orlhf.engines.local import LocalEngine, LocalSettings
from exgrpo_orlhf.engines.rows import ForwardRow, micro_batches
from exgrpo_orlhf.objective import MixedPolicyLoss, token_stats
from exgrpo_orlhf.prompts import Prompts
from exgrpo_orlhf.replay import Grade, MixedBatch, Plan, Rollout, RolloutGroup, Row, Trajectory
from exgrpo_orlhf.settings import Optimizer, Sampling
from exgrpo_orlhf.tasks.chain_model import ChainModel, chain_tokenizer
from exgrpo_orlhf.tasks.modular_chains import ModularChains

Figures = dict[str, float]
PROMPT, ROW = 32, 512  # tokens at most, of a prompt and of a whole row
SECTIONS = ("token statistics", "local engine: float32 on the CPU", "local engine: transformers alone")
SECTIONS += ("OpenRLHF's actor, sdpa", "OpenRLHF's actor, packed rows, flash_attention_2")
ACTOR = {"loss, off by": 0.05, "grad_norm, off by": 0.05, "log-probs, nats off": 0.05, "entropies, nats off": 0.05}
ACTOR["measure: memory, of the update's"] = 0.5
GOALS: list[Figures] = [  # at most
    {"forward: time, of plain": 1.1, "backward: time, of plain": 1.4, "forward: nats off, at most": 0.01}
    | {"forward: memory, of plain": 0.1, "backward: memory, of plain": 0.1, "backward: nats off, at most": 0.01},
    {"log-probs, nats off": 0.05, "log-probs, nats off, at most": 0.5, "1 - cosine of the updates": 0.1}
    | {"resumed step, off by, of its length": 0.01},
    {"generation: time, of plain": 1, "scoring: time, of plain": 1, "update: time, of plain": 1}
    | {"scoring: memory, of plain": 0.5, "update: memory, of plain": 0.7, "grad_norm, off by": 0.02},
    ACTOR,
    ACTOR,
]
# Dense bfloat16, TFLOP/s, NVIDIA's data sheets; the first name that is part of the GPU's.
PEAKS = {"A100": 312, "H100 PCIe": 756, "H100": 989, "H200": 989, "L40S": 362, "RTX 4090": 165}


class Timed(NamedTuple):
    first: Any  # what the first call, which is not timed, returned
    seconds: float  # the least of the others
    gigabytes: float  # allocated at most; nan on a CPU


class Work(NamedTuple):
    """What a section works on. tokens: padded, of a micro-batch; folder: for a model"""

    device: str
    tiny: bool
    tokens: int
    folder: Path

    @property
    def length(self) -> int:
        return 24 if self.tiny else ROW - PROMPT

    @property
    def vocabulary(self) -> int:
        return 2048 if self.tiny else 151_936

    def model(self) -> Path:
        """A random Qwen2 whose weights bfloat16 holds exactly: what differs later is the arithmetic."""
        shape = (64, 2, 2, 1, 128) if self.tiny else (896, 24, 14, 2, 4864)  # of Qwen2.5-0.5B
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
        sizes = dict(zip(names, shape, strict=True), vocab_size=self.vocabulary, tie_word_embeddings=True)
        torch.manual_seed(0)
        with torch.device(self.device):
            model = Qwen2ForCausalLM(Qwen2Config(**sizes, pad_token_id=0, bos_token_id=None, eos_token_id=1))
        model.bfloat16().save_pretrained(self.folder)
        chain_tokenizer().save_pretrained(self.folder)
        return self.folder

    def batch(self) -> MixedBatch:
        """Random tokens and advantages; the second half of the groups ends with a stored trajectory."""
        rng, k = np.random.default_rng(0), 4 if self.tiny else 8
        groups, rows = [], []
        for i, question in enumerate(questions := ModularChains(count=4 if self.tiny else 16).load()):
            lengths = rng.integers(self.length // 2, self.length + 1, k)
            responses = [rng.integers(2, self.vocabulary, n).astype(np.int32) for n in lengths]
            advantages, replayed = rng.normal(size=k), i >= len(questions) // 2
            behaviour = rng.normal(-np.log(self.vocabulary), 0.5, lengths[-1]).astype(np.float32)
            stored = [None] * (k - 1) + [Trajectory(responses[-1], behaviour, 1.0, 0) if replayed else None]
            fresh = tuple(Rollout(ids, "length", Grade("wrong", 0.0)) for ids in responses[: k - replayed])
            groups.append(RolloutGroup(question, fresh, replayed))
            parts = zip(responses, (advantages - advantages.mean()).tolist(), stored, strict=True)
            rows.append([Row(question, ids, a, True, old) for ids, a, old in parts])
        return MixedBatch(groups, rows)

    @property
    def loss(self) -> MixedPolicyLoss:
        return MixedPolicyLoss(response_length=self.length)

    def engine(self, model: Path, dtype: Any, device: str | None = None, **more: Any) -> LocalEngine:
        settings = LocalSettings(device=device or self.device, dtype=dtype, micro_batch_tokens=self.tokens)
        sampling = Sampling(max_response_tokens=self.length)
        return LocalEngine(settings, Optimizer(), sampling, Prompts(max_tokens=PROMPT), model_path=model, **more)

    def allocated(self) -> float:
        """GB; what nobody holds any more is freed first."""
        gc.collect()
        return torch.cuda.memory_allocated() / 1e9 if self.device == "cuda" else float("nan")

    def timed(self, function: Callable[[], Any], repeats: int = 3) -> Timed:
        synchronize = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        self.allocated()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        first, seconds = function(), []
        for _ in range(1 if self.tiny else repeats):
            synchronize()
            begin = time.perf_counter()
            function()
            synchronize()
            seconds.append(time.perf_counter() - begin)
        peak = torch.cuda.max_memory_allocated() / 1e9 if self.device == "cuda" else float("nan")
        return Timed(first, min(seconds), peak)


def against(what: str, ours: Timed, plain: Timed) -> Figures:
    figures = {f"{what}: ms": ours.seconds * 1e3, f"{what}: plain, ms": plain.seconds * 1e3}
    figures |= {f"{what}: time, of plain": ours.seconds / plain.seconds}
    figures |= {f"{what}: GB": ours.gigabytes, f"{what}: plain, GB": plain.gigabytes}
    return figures | {f"{what}: memory, of plain": ours.gigabytes / plain.gigabytes}


def whole_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """hidden (…, H), targets (…): log-probs and, without gradient, entropies (…)."""
    log_p = (hidden @ weight.t()).float().log_softmax(-1)
    with torch.no_grad():
        entropies = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets[..., None]).squeeze(-1), entropies


def token_statistics(work: Work) -> Figures:
    n, h = (64, 32) if work.tiny else (8192, 3584)
    torch.manual_seed(0)
    with torch.device(work.device):
        hidden, weight = torch.randn(n, h).bfloat16(), (torch.randn(work.vocabulary, h) * h**-0.5).bfloat16()
        targets = torch.randint(work.vocabulary, (n,))
    figures: Figures = {}
    for case in ("forward", "backward"):
        for tensor in (hidden, weight):
            tensor.requires_grad_(case == "backward")

        def step(statistics: Any) -> Tensor:
            hidden.grad = weight.grad = None
            outputs = statistics(hidden, weight, targets)
            if hidden.requires_grad:
                outputs[0].mean().backward()
            return torch.stack([output.detach() for output in outputs]).cpu()

        found = []
        for statistics in (token_stats, whole_logits):
            hidden.grad = weight.grad = None
            before = work.allocated() + (weight.nbytes / 1e9 if case == "backward" else 0.0)
            one = work.timed(lambda statistics=statistics, step=step: step(statistics))
            found.append(one._replace(gigabytes=one.gigabytes - before))
        figures |= against(case, *found)
        figures[f"{case}: nats off, at most"] = float((found[0].first - found[1].first).abs().max())
    return figures


def local_engine(work: Work) -> Figures:
    shape: Any = {"steps": 1, "width": 32, "cache": work.folder} if work.tiny else {"operands": (3, 4, 5, 6, 7, 8)}
    model = ChainModel(**shape).prepare()
    exact, tested = work.engine(model, "float32", "cpu"), work.engine(model, "bfloat16")
    groups = tested.rollout(Plan(1, ModularChains(count=16).load(), [], {}), 8)
    rows = [[Row(g.question, r.token_ids, (-1.0) ** i, True, None) for i, r in enumerate(g.rollouts)] for g in groups]
    batch = MixedBatch(groups, rows)

    def weights(engine: LocalEngine) -> Tensor:
        return torch.cat([p.detach().cpu().flatten().clone() for p in engine.model.parameters()])

    begin, stats = weights(tested), [engine.update(batch, work.loss) for engine in (exact, tested)]
    off = np.abs(np.subtract(*(np.concatenate(one.policy_logprobs) for one in stats)))
    after = weights(tested)
    tested.save(work.folder)
    resumed = work.engine(model, "bfloat16", weights_path=work.folder)
    resumed.load(work.folder)
    for engine in (tested, resumed):
        engine.update(batch, work.loss)
    straight = weights(tested)
    return {
        "log-probs, nats off": float(off.mean()),
        "log-probs, nats off, at most": float(off.max()),
        "1 - cosine of the updates": 1 - float(torch.cosine_similarity(weights(exact) - begin, after - begin, dim=0)),
        "resumed step, off by, of its length": float((weights(resumed) - straight).norm() / (straight - after).norm()),
    }


def rows_of(batch: MixedBatch) -> list[ForwardRow]:
    return [ForwardRow(chain_tokenizer().encode(row.question.prompt), row.token_ids) for row in batch.flat_rows()]


def by_the_engine(work: Work, batch: MixedBatch) -> dict[str, Timed]:
    engine = work.engine(work.folder, "bfloat16")
    questions, k = [group.question for group in batch.groups], len(batch.rows[0])
    zeros = lambda ids: np.zeros(len(ids), np.float32)
    stored = {r[0].question.id: [Trajectory(x.token_ids, zeros(x.token_ids), 1.0, 0) for x in r] for r in batch.rows}
    plan = Plan(1, [], questions, stored)
    return {
        "generation": work.timed(lambda: engine.rollout(Plan(1, questions, [], {}), k), repeats=1),
        "scoring": work.timed(lambda: engine.score(plan, stored, lambda entropy, _: entropy)),
        "update": work.timed(lambda: engine.update(batch, work.loss)),
    }


def by_transformers(work: Work, batch: MixedBatch) -> dict[str, Timed]:
    model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.float32).to(work.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    rows, forward = batch.flat_rows(), rows_of(batch)
    prompts = chain_tokenizer()([row.question.prompt for row in rows], padding=True, return_tensors="pt")
    options: Any = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "max_new_tokens": work.length}

    def generate() -> None:
        with torch.autocast(work.device, torch.bfloat16):
            model.generate(**prompts.to(work.device), **options)

    def statistics(part: list[int]) -> list[tuple[int, Tensor, Tensor]]:
        """Of each row its number, log-probs and entropies (T,)."""
        both = [torch.tensor([*forward[i].prompt, *forward[i].response.tolist()]) for i in part]
        ids = pad_sequence(both, batch_first=True).to(work.device)
        with torch.autocast(work.device, torch.bfloat16):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            logprobs, entropies = whole_logits(hidden[:, :-1], model.lm_head.weight, ids[:, 1:])
        spans = {i: slice(len(forward[i].prompt) - 1, len(forward[i]) - 1) for i in part}
        return [(i, logprobs[j, spans[i]], entropies[j, spans[i]]) for j, i in enumerate(part)]

    @torch.no_grad()
    def score() -> list[float]:
        return [float(h.mean()) for part in micro_batches(forward, work.tokens) for _, _, h in statistics(part)]

    def update() -> float:
        for part in micro_batches(forward, work.tokens):
            terms = []
            for i, logprobs, _ in statistics(part):
                old = rows[i].replayed
                past = logprobs.detach() if old is None else torch.from_numpy(old.behaviour_logprobs).to(work.device)
                w = (logprobs - past).exp()
                terms.append(-rows[i].advantage * (w if old is None else w / (w + work.loss.beta)).sum())
            (torch.stack(terms).sum() / (len(rows) * work.length)).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    return {"generation": work.timed(generate, repeats=1), "scoring": work.timed(score), "update": work.timed(update)}


def throughput(work: Work) -> Figures:
    parameters, batch = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(work.model()).parameters()), None
    batch = work.batch()
    ours, plain = by_the_engine(work, batch), by_transformers(work, batch)
    name = torch.cuda.get_device_name() if work.device == "cuda" else ""
    peak = next((tflops for part, tflops in PEAKS.items() if part in name), None)
    generated = sum(len(r.token_ids) for group in ours["generation"].first for r in group.rollouts)
    figures: Figures = {"parameters, 10^6": parameters / 1e6}
    for what, operations in (("generation", 0), ("scoring", 2), ("update", 6)):
        speed = (sum(map(len, rows_of(batch))) if operations else generated) / ours[what].seconds
        figures |= {f"{what}: tokens/s": speed} | against(what, ours[what], plain[what])
        if operations and peak:
            figures[f"{what}: share of {peak} TFLOP/s"] = operations * parameters * speed / (peak * 1e12)
    off = abs(ours["update"].first.metrics["policy/grad_norm"] / plain["update"].first - 1)
    return figures | {"grad_norm, off by": off}


def make_actor(work: Work, batch: MixedBatch, packed: bool) -> Any:
    """OpenRLHF's policy actor in this process, as its trainer makes it."""
    from exgrpo_orlhf.engines.openrlhf import cpu

    if work.device == "cpu":
        os.environ.update(cpu.environment())
        cpu.install()
    from openrlhf.utils import get_strategy

    from exgrpo_orlhf import config
    from exgrpo_orlhf.engines.openrlhf import actor, flags, launch

    given = {"actor.num_gpus_per_node": 1, "vllm.num_engines": 1, "ds.zero_stage": 2, "ds.packing_samples": packed}
    given["ds.attn_implementation"] = "flash_attention_2" if packed else "sdpa"
    given["train.micro_batch_size"] = 4 if work.tiny else work.tokens // ROW
    bindings = ["train.engine = 'openrlhf'", "Work.model = @PretrainedModel()", "Optimizer.learning_rate = 1e-6"]
    bindings += [f"PretrainedModel.path = {str(work.folder)!r}", f"MAX_RESPONSE_TOKENS = {work.length}"]
    bindings += [f"train.questions_per_step = {len(batch.rows)}", f"train.group_size = {len(batch.rows[0])}"]
    bindings += [f"OpenRLHF.cpu_bench = {work.device == 'cpu'}", f"OpenRLHF.flags = {given!r}"]
    x = config.load(["base.gin"], bindings)
    args = launch.parse(x, str(work.folder), Path("nowhere"), resume=False)
    args.exgrpo = actor.ActorSettings(work.loss, None)
    made = actor.MixedPolicyActor(1, 0, None, None)
    made.init_model_from_pretrained(get_strategy(args), str(work.folder), flags.scheduler_steps(x), None)
    return made


def openrlhf_actor(work: Work, packed: bool) -> Figures:
    model, batch, local = work.model(), work.batch(), {}
    for dtype in ("float32", "bfloat16"):
        engine = work.engine(model, dtype)
        local[dtype] = work.timed(lambda engine=engine: engine.update(batch, work.loss))
        del engine
    actor = make_actor(work, batch, packed)
    from exgrpo_orlhf.engines.openrlhf.experience_maker import MixedExperienceMaker, as_experience

    rows, flat = rows_of(batch), batch.flat_rows()
    parts = list(micro_batches(rows, work.tokens))

    def measure() -> list[tuple[np.ndarray, float]]:
        found = [one for part in parts for one in zip(*actor.measure([rows[i] for i in part]), strict=True)]
        return [found[j] for j in np.argsort(np.concatenate(parts))]

    measured = work.timed(measure)
    logprobs, entropies = zip(*measured.first, strict=True)
    old = [now if row.replayed is None else row.replayed.behaviour_logprobs
           for row, now in zip(flat, logprobs, strict=True)]  # fmt: skip
    maker = MixedExperienceMaker(None, None, None, None, None, actor.strategy, actor.tokenizer)

    def update() -> Figures:
        for experience in maker.make_experience_batch(as_experience(batch, rows, old)):
            actor.append(experience)
        return actor.fit()

    updated, figures = work.timed(update), {}
    exact, rounded = local["float32"].first, local["bfloat16"].first
    for name in ("loss", "grad_norm"):
        right, near, found = (m[f"policy/{name}"] for m in (exact.metrics, rounded.metrics, updated.first))
        figures |= {name: found, f"{name}, off by": abs(found / right - 1), f"{name}, local": abs(near / right - 1)}
    off = lambda a, b: float(np.abs(np.hstack(a) - np.hstack(b)).mean())
    figures["log-probs, nats off"] = off(logprobs, exact.policy_logprobs)
    figures["log-probs, nats off, local"] = off(rounded.policy_logprobs, exact.policy_logprobs)
    figures["entropies, nats off"] = off(entropies, exact.entropies)
    for name, one in (("measure", measured), ("update", updated), ("update, local", local["bfloat16"])):
        figures |= {f"{name}: ms": one.seconds * 1e3, f"{name}: GB": one.gigabytes}
    return figures | {"measure: memory, of the update's": measured.gigabytes / updated.gigabytes}


def run(section: int, work: Work) -> bool | None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    functions = (token_statistics, local_engine, throughput)
    with contextlib.redirect_stdout(sys.stderr):
        figures = functions[section - 1](work) if section <= 3 else openrlhf_actor(work, section == 5)
    return figures


def report(section: int, figures: Figures, memory: bool) -> bool: ...


def missing(section: int, device: str) -> list[str]:
    packages = ["openrlhf", "vllm", "deepspeed", "ray"] * (section > 3) + ["flash_attn"] * (section > 3 and device == "cuda")
    return [package for package in packages if importlib.util.find_spec(package) is None]
