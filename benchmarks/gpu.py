#!/usr/bin/env python
"""Under CUDA, in bfloat16, with a vocabulary of 151,936: is it right, how fast, how much memory? For one GPU.

torch and transformers suffice for sections 1 to 3; 4 and 5 (gpu_openrlhf.py) say so where OpenRLHF is not installed.
Each section is a process of its own, for its own memory peaks. Goals:

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
   the update against the one with OpenRLHF's own forward pass, which makes logits: memory at most 0.7 times, time 1.2.
5  the same with packed rows and flash_attention_2.

About five minutes, and more where the chain model has not been warmed up yet; DeepSpeed compiles its Adam with nvcc.
`--small` runs on the CPU unless a device is named, in a minute or two.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from command_line import finish, make_parser
from gpu_openrlhf import openrlhf_actor
from gpu_work import PROMPT, ROW, Figures, Timed, Work, against, timed
from torch import Tensor
from transformers import AutoModelForCausalLM

from exgrpo_orlhf.engines.local import TorchEngine
from exgrpo_orlhf.engines.local.forward import measure
from exgrpo_orlhf.engines.rows import ForwardRow, micro_batches
from exgrpo_orlhf.models.tiny_models import ChainModel, chain_tokenizer
from exgrpo_orlhf.objective import MixedPolicyLoss
from exgrpo_orlhf.objective.token_stats import token_stats
from exgrpo_orlhf.records import MixedBatch, Row
from exgrpo_orlhf.replay import Plan
from exgrpo_orlhf.tasks.modular_chains import ModularChains

# Dense bfloat16, TFLOP/s, NVIDIA's data sheets; the first name that is part of the GPU's.
PEAKS = {"A100": 312, "H100 PCIe": 756, "H100": 989, "H200": 989, "L40S": 362, "RTX 4090": 165}
TITLES = ("token statistics", "local engine against float32 on the CPU", "local engine against transformers alone")
TITLES += ("OpenRLHF's actor, sdpa", "OpenRLHF's actor, packed rows, flash_attention_2")


def whole_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """hidden (…, H), targets (…): log-probs and, without gradient, entropies (…)."""
    log_p = (hidden @ weight.t()).float().log_softmax(-1)
    with torch.no_grad():
        entropies = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets[..., None]).squeeze(-1), entropies


def token_statistics(work: Work) -> Figures:
    n, h = (64, 32) if work.small else (8192, 3584)
    torch.manual_seed(0)
    with torch.device(work.device):
        hidden, weight = torch.randn(n, h).bfloat16(), (torch.randn(work.vocabulary, h) * h**-0.5).bfloat16()
        targets = torch.randint(work.vocabulary, (n,))

    def step(statistics: Any) -> Tensor:
        hidden.grad = weight.grad = None
        outputs = statistics(hidden, weight, targets)
        if weight.requires_grad:
            outputs[0].mean().backward()
        return torch.stack([output.detach() for output in outputs]).cpu()

    def measured(statistics: Any) -> Timed:
        hidden.grad = weight.grad = None
        before = (torch.cuda.memory_allocated() + weight.requires_grad * weight.nbytes) / 1e9 if work.cuda else 0.0
        timing = timed(work, lambda: step(statistics))
        return timing._replace(gigabytes=timing.gigabytes - before)

    figures: Figures = {}
    for case, limit in (("forward", 1.1), ("backward", 1.4)):
        for tensor in (hidden, weight):
            tensor.requires_grad_(case == "backward")
        blocks, plain = measured(token_stats), measured(whole_logits)
        off = float((blocks.first - plain.first).abs().max())
        figures |= against(case, blocks, plain, limit, 0.1) | {f"{case}: nats off, at most": (off, 0.01)}
    return figures


def local_engine(work: Work) -> Figures:
    shape: Any = {"steps": 1, "width": 32, "cache": work.folder} if work.small else {"operands": (3, 4, 5, 6, 7, 8)}
    model = ChainModel(**shape).prepare()
    exact, tested = work.engine("float32", model, "cpu"), work.engine("bfloat16", model)
    groups = tested.rollout(Plan(1, ModularChains(count=16).load(), [], {}), 8)
    rows = [[Row(g.question, r, (-1.0) ** i, True) for i, r in enumerate(g.rollouts)] for g in groups]

    def weights_after_update(*engines: TorchEngine) -> list[Tensor]:
        stats.extend(engine.update(MixedBatch(groups, rows, len(rows[0])), work.loss) for engine in engines)
        return [torch.cat([p.detach().cpu().flatten() for p in engine.model.parameters()]) for engine in engines]

    stats: list[Any] = []
    begin = torch.cat([p.detach().flatten().clone() for p in exact.model.parameters()])
    right, after = weights_after_update(exact, tested)
    off = np.abs(np.subtract(*(np.concatenate(one.policy_logprobs) for one in stats)))
    tested.save(work.folder / "checkpoint")
    resumed = work.engine("bfloat16", model, weights_path=work.folder / "checkpoint")
    resumed.load(work.folder / "checkpoint")
    straight, continued = weights_after_update(tested, resumed)
    cosine = torch.cosine_similarity(right - begin, after - begin, dim=0)
    return {
        "log-probs, nats off": (float(off.mean()), 0.05),
        "log-probs, nats off, at most": (float(off.max()), 0.5),
        "1 - cosine of the updates": (1 - float(cosine), 0.1),
        "step after resume, off by": (float((continued - straight).norm() / (straight - after).norm()), 0.01),
    }


def by_the_engine(work: Work, batch: MixedBatch, rows: list[ForwardRow]) -> dict[str, Timed]:
    engine, plan = work.engine("bfloat16"), Plan(1, [group.question for group in batch.groups], [], {})
    return {
        "generation": timed(work, lambda: engine.rollout(plan, len(batch.rows[0])), 1),
        "scoring": timed(work, lambda: measure(engine.forward, rows, work.tokens)),
        "update": timed(work, lambda: engine.update(batch, work.loss)),
    }


def by_transformers(work: Work, batch: MixedBatch, rows: list[ForwardRow]) -> dict[str, Timed]:
    model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.float32).to(work.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    of_batch = batch.flat_rows()
    prompts = chain_tokenizer()([row.question.prompt for row in of_batch], padding=True, return_tensors="pt")

    def generate() -> None:
        options: Any = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "max_new_tokens": work.length}
        with torch.autocast(work.device, torch.bfloat16):
            model.generate(**prompts.to(work.device), **options)

    def statistics(part: list[int]) -> list[tuple[int, Tensor, Tensor]]:
        """Of each row its number, log-probs and entropies (T,)."""
        both = [torch.tensor([*rows[i].prompt, *rows[i].response.tolist()]) for i in part]
        ids = torch.nn.utils.rnn.pad_sequence(both, batch_first=True).to(work.device)
        with torch.autocast(work.device, torch.bfloat16):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            logprobs, entropies = whole_logits(hidden[:, :-1], model.lm_head.weight, ids[:, 1:])
        spans = [slice(len(rows[i].prompt) - 1, len(rows[i]) - 1) for i in part]
        return [(i, logprobs[j, span], entropies[j, span]) for j, (i, span) in enumerate(zip(part, spans, strict=True))]

    @torch.no_grad()
    def score() -> list[float]:
        return [float(h.mean()) for part in micro_batches(rows, work.tokens) for _, _, h in statistics(part)]

    def update() -> float:
        for part in micro_batches(rows, work.tokens):
            terms = []
            for i, logprobs, _ in statistics(part):
                old = of_batch[i].trajectory
                past = logprobs.detach() if old is None else torch.from_numpy(old.behaviour_logprobs).to(work.device)
                w = (logprobs - past).exp()
                terms.append(-of_batch[i].advantage * (w if old is None else w / (w + work.loss.beta)).sum())
            (torch.stack(terms).sum() / (len(rows) * work.length)).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    steps = {"generation": (generate, 1), "scoring": (score, 3), "update": (update, 3)}
    return {what: timed(work, step, repeats) for what, (step, repeats) in steps.items()}


def throughput(work: Work) -> Figures:
    work.make_model()
    batch, rows = work.batch()
    ours, plain = by_the_engine(work, batch, rows), by_transformers(work, batch, rows)
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(work.folder).parameters())
    peak = next((t for name, t in PEAKS.items() if work.cuda and name in torch.cuda.get_device_name()), None)
    generated = sum(len(r.token_ids) for group in ours["generation"].first for r in group.rollouts)
    figures: Figures = {"parameters, 10^6": parameters / 1e6}
    for what, operations, memory in (("generation", 0, None), ("scoring", 2, 0.5), ("update", 6, 0.7)):
        speed = (sum(map(len, rows)) if operations else generated) / ours[what].seconds
        figures |= {f"{what}: tokens/s": speed} | against(what, ours[what], plain[what], 1.0, memory)
        if operations and peak:
            figures[f"{what}: share of {peak} TFLOP/s"] = operations * parameters * speed / (peak * 1e12)
    off = abs(ours["update"].first.metrics["policy/grad_norm"] / plain["update"].first - 1)
    return figures | {"grad_norm, off by": (off, 0.02)}


def run(section: int, work: Work) -> Figures:
    """In a process of its own, silent but for its exceptions: OpenRLHF and DeepSpeed print much."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    if section > 3:
        return openrlhf_actor(work, packed=section == 5)
    return (token_statistics, local_engine, throughput)[section - 1](work)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--section", type=int, nargs="+", choices=range(1, 6), default=range(1, 6), help="these alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="the default is cuda, and with --small cpu")
    many = "padded, of a micro-batch; 8192 (the default) need an estimated 45 GB where the logits are whole"
    parser.add_argument("--tokens", type=int, choices=(2048, 4096, 8192, 16384), default=8192, help=many)
    arguments = parser.parse_args()
    device = arguments.device or ("cpu" if arguments.small else "cuda")
    cuda = device == "cuda"
    if not cuda:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # OpenRLHF would take a GPU that is there
    elif not torch.cuda.is_available():
        print("skipped: torch sees no GPU here (--small tests this script on a CPU)")
        return 0
    tokens, length, vocabulary = (256, 24, 2048) if arguments.small else (arguments.tokens, ROW - PROMPT, 151_936)
    loss = MixedPolicyLoss(response_length=length)
    timed_goals = cuda and not arguments.small
    results: Figures = {"device": torch.cuda.get_device_name() if cuda else "cpu", "met": True}
    for section, title in ((section, TITLES[section - 1]) for section in arguments.section):
        print(f"{section}  {title}", flush=True)
        needed = (("openrlhf", "vllm", "deepspeed", "ray") + ("flash_attn",) * cuda) * (section > 3)
        if missing := [package for package in needed if importlib.util.find_spec(package) is None]:
            print(f"   left out, not installed: {', '.join(missing)}")
            continue
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, get_context("spawn")) as pool:
            work = Work(device, cuda, arguments.small, tokens, length, vocabulary, loss, Path(folder))
            try:
                results[title] = pool.submit(run, section, work).result()
            except Exception as error:  # whatever it is, the other sections go on
                print(f"   FAILED: {error.__cause__ or error!r}")
                results["met"] = False
        for name, figure in results.get(title, {}).items():
            (value, limit), verdict = figure if isinstance(figure, tuple) else (figure, None), ""
            if limit is not None and (timed_goals or not any(word in name for word in ("time", "memory"))):
                met = bool(value <= limit)  # false for nan
                verdict, results["met"] = f"  {'PASS' if met else 'MISS'} (at most {limit})", results["met"] and met
            print(f"   {name:40}{value:>14,.4g}{verdict}", flush=True)
    return finish(arguments, results, str(results["device"]))


if __name__ == "__main__":
    sys.exit(main())
