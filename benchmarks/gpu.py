#!/usr/bin/env python
"""Under CUDA, in bfloat16, with a vocabulary of 151,936: is it right, how fast, how much memory? For one GPU.

torch and transformers suffice for sections 1 to 3 and 7; 6 needs TRL and SmolLM2 (make smollm2), the others OpenRLHF.
A section is a process of its own, for its own memory peaks. RIGHT and FAST below are the goals: each is met, missed or
not measured.

1  token statistics against the whole logits: float32 log_softmax and entropy of bfloat16 logits, without and with
   gradients; memory without the weight's own gradient
2  the local engine in bfloat16 over float32 master weights against float32 on the CPU; a step after save and load
3  the local engine on a random Qwen2 of half a billion parameters against transformers alone (`model.generate`; whole
   logits). The share of the peak counts 6 operations a parameter and token (scoring: 2) and leaves attention out
4  OpenRLHF's actor, ZeRO-2 on one rank without Ray and vLLM, same model and rows, sdpa, against the local engine in
   float32, and its update against the one with OpenRLHF's own forward pass, which makes logits
5  the same with packed rows, by flash-attn or, where it is not installed, by torch's varlen_attn
6  a step of 64 questions × 8 on SmolLM2 after its supervised start: the local engine by scripts/train.py against TRL's
   trainer, both with a loop of their own (TRL: `generate`), then both with vLLM in their process
7  the local engine's update of rows that share prompts: padded, packed, and with compiled layers
8  OpenRLHF's step on the work of 6 with replay, by scripts/train.py, in parts

On an H200 section 1 took half a minute and 6 five minutes; 4 and 5 together had not ended after two, 3 not after two
and a half, 2 and 7 not after one (2 and 3 have become shorter since). vLLM and DeepSpeed's Adam are compiled at their
first start. `--small` runs on the CPU.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from command_line import finish, make_parser
from gpu_openrlhf import openrlhf_actor
from gpu_runs import against_trl_here, openrlhf_step
from gpu_work import FULL, PROMPT, SMALL, Figures, Timed, Work, against, timed
from torch import Tensor
from transformers import AutoModelForCausalLM

from exgrpo_orlhf.engines.local import TorchEngine
from exgrpo_orlhf.engines.openrlhf.stack import version
from exgrpo_orlhf.engines.rows import ForwardRow, micro_batches
from exgrpo_orlhf.objective.token_stats import token_stats
from exgrpo_orlhf.records import MixedBatch, Row
from exgrpo_orlhf.replay import Plan
from exgrpo_orlhf.selftest.finding import PACKAGES
from exgrpo_orlhf.testbed.modular_chains import ModularChains
from exgrpo_orlhf.testbed.tiny_models import ChainModel

# Dense bfloat16, TFLOP/s, NVIDIA's data sheets; the first name that is part of the GPU's.
PEAKS = {"A100": 312, "H100 PCIe": 756, "H100": 989, "H200": 989, "L40S": 362, "RTX 4090": 165}
MOST, LEAST = "at most", "at least"
STATISTICS = [(case, h) for case in ("forward", "backward") for h in ("3,584", "896")]
# Goals of correctness by section and figure: at most.
RIGHT = {
    **{(1, f"{case} {h}: nats off, at most"): 0.01 for case, h in STATISTICS},
    **{(2, "log-probs, nats off"): 0.05, (2, "log-probs, nats off, at most"): 0.5},
    **{(2, "1 - cosine of the updates"): 0.1, (2, "step after resume, off by"): 0.01, (3, "grad_norm, off by"): 0.02},
    **{(s, f"{name} off"): 0.05 for s in (4, 5) for name in ("log-probs, nats", "entropies, nats")},
    **{(s, f"{name}, off by"): 0.05 for s in (4, 5) for name in ("loss", "grad_norm")},
}
# Goals of time and memory, which count on a GPU at full size.
FAST = {
    **{(1, f"{case} {h}: time, of plain"): (MOST, 1.05 if h == "3,584" else 0.7) for case, h in STATISTICS},
    **{(1, f"{case} {h}: memory, of plain"): (MOST, 0.2) for case, h in STATISTICS},
    **{(3, f"{what}: time, of plain"): (MOST, 1.0) for what in ("generation", "scoring", "update")},
    **{(3, "scoring: memory, of plain"): (MOST, 0.5), (3, "update: memory, of plain"): (MOST, 0.7)},
    **{(s, f"update: {what}, of plain"): (MOST, m) for s in (4, 5) for what, m in (("time", 1.1), ("memory", 0.7))},
    **{(6, "steps, times TRL's, vllm"): (LEAST, 1.3), (8, "sync: s"): (MOST, 0.3)},
    (8, "replay's part of a step"): (MOST, 0.05),
}


def whole_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """hidden (…, H), targets (…): log-probs and, without gradient, entropies (…)."""
    log_p = (hidden @ weight.t()).float().log_softmax(-1)
    with torch.no_grad():
        entropies = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets[..., None]).squeeze(-1), entropies


def token_statistics(work: Work) -> Figures:
    figures: Figures = {}
    for name, (n, h) in work.size.statistics.items():
        torch.manual_seed(0)
        with torch.device(work.device):
            hidden, weight = torch.randn(n, h).bfloat16(), (torch.randn(work.size.vocabulary, h) * h**-0.5).bfloat16()
            targets = torch.randint(work.size.vocabulary, (n,))
        for case in ("forward", "backward"):
            for tensor in (hidden, weight):
                tensor.requires_grad_(case == "backward")
            blocks, plain = (statistics_step(work, one, hidden, weight, targets) for one in (token_stats, whole_logits))
            off = float((blocks.first - plain.first).abs().max())
            figures |= against(f"{case} {name}", blocks, plain) | {f"{case} {name}: nats off, at most": off}
    return figures


def statistics_step(work: Work, statistics: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Timed:
    def step() -> Tensor:
        hidden.grad = weight.grad = None
        outputs = statistics(hidden, weight, targets)
        if weight.requires_grad:
            outputs[0].mean().backward()
        return torch.stack([output.detach() for output in outputs]).cpu()

    hidden.grad = weight.grad = None
    before = (torch.cuda.memory_allocated() + weight.requires_grad * weight.nbytes) / 1e9 if work.cuda else 0.0
    timing = timed(work, step)
    return timing._replace(gigabytes=timing.gigabytes - before)


def local_engine(work: Work) -> Figures:
    model = ChainModel(cache=work.folder, **work.size.chain).prepare()
    engine = partial(work.engine, response=min(64, work.size.row - PROMPT))  # the model has 256 positions
    exact, tested = engine("float32", model, "cpu"), engine("bfloat16", model)
    groups = list(tested.rollout(Plan(1, ModularChains(count=work.size.questions).load(), [], {}), 8))
    rows = [[Row(g.question, r, (-1.0) ** i, True) for i, r in enumerate(g.rollouts)] for g in groups]

    def weights_after_update(*engines: TorchEngine) -> list[Tensor]:
        stats.extend(engine.update(MixedBatch(groups, rows, len(rows[0])), work.loss) for engine in engines)
        return [torch.cat([p.detach().cpu().flatten() for p in engine.model.parameters()]) for engine in engines]

    stats: list[Any] = []
    begin = torch.cat([p.detach().flatten().clone() for p in exact.model.parameters()])
    right, after = weights_after_update(exact, tested)
    off = np.abs(np.subtract(*(np.concatenate(one.policy_logprobs) for one in stats)))
    tested.save(work.folder / "checkpoint")
    resumed = engine("bfloat16", model, weights_path=work.folder / "checkpoint")
    resumed.load(work.folder / "checkpoint")
    straight, continued = weights_after_update(tested, resumed)
    cosine = torch.cosine_similarity(right - begin, after - begin, dim=0)
    return {
        "log-probs, nats off": float(off.mean()),
        "log-probs, nats off, at most": float(off.max()),
        "1 - cosine of the updates": 1 - float(cosine),
        "step after resume, off by": float((continued - straight).norm() / (straight - after).norm()),
    }


def by_the_engine(work: Work, batch: MixedBatch, rows: list[ForwardRow]) -> dict[str, Timed]:
    engine, plan = work.engine("bfloat16"), Plan(1, [group.question for group in batch.groups], [], {})
    return {
        "generation": timed(work, lambda: list(engine.rollout(plan, len(batch.rows[0]))), repeats=1),
        "scoring": timed(work, lambda: engine.forward.measure(rows, work.size.tokens)),
        "update": timed(work, lambda: engine.update(batch, work.loss)),
    }


def by_transformers(work: Work, batch: MixedBatch, rows: list[ForwardRow]) -> dict[str, Timed]:
    model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.float32).to(work.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    of_batch = batch.flat_rows()
    prompts = ChainModel.tokenizer()([row.question.prompt for row in of_batch], padding=True, return_tensors="pt")

    def generate() -> None:
        options: Any = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "max_new_tokens": work.size.row - PROMPT}
        with torch.autocast(work.device, torch.bfloat16):
            model.generate(**prompts.to(work.device), **options)

    def statistics(part: list[int]) -> list[tuple[int, Tensor, Tensor]]:
        """Of each row its number, log-probs and entropies (T,)."""
        both = [torch.tensor([*rows[i].prompt, *rows[i].token_ids.tolist()]) for i in part]
        ids = torch.nn.utils.rnn.pad_sequence(both, batch_first=True).to(work.device)
        with torch.autocast(work.device, torch.bfloat16):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            logprobs, entropies = whole_logits(hidden[:, :-1], model.lm_head.weight, ids[:, 1:])
        spans = [slice(len(rows[i].prompt) - 1, len(rows[i]) - 1) for i in part]
        return [(i, logprobs[j, span], entropies[j, span]) for j, (i, span) in enumerate(zip(part, spans, strict=True))]

    @torch.no_grad()
    def score() -> list[float]:
        return [float(h.mean()) for part in micro_batches(rows, work.size.tokens) for _, _, h in statistics(part)]

    def update() -> float:
        for part in micro_batches(rows, work.size.tokens):
            terms = []
            for i, logprobs, _ in statistics(part):
                old = of_batch[i].trajectory
                past = logprobs.detach() if old is None else torch.from_numpy(old.behaviour_logprobs).to(work.device)
                w = (logprobs - past).exp()
                terms.append(-of_batch[i].advantage * (w if old is None else w / (w + work.loss.beta)).sum())
            (torch.stack(terms).sum() / (len(rows) * work.loss.response_length)).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    generation = timed(work, generate, repeats=1)
    return {"generation": generation, "scoring": timed(work, score), "update": timed(work, update)}


def throughput(work: Work) -> Figures:
    work.make_model()
    batch, rows = work.batch()
    ours, plain = by_the_engine(work, batch, rows), by_transformers(work, batch, rows)
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(work.folder).parameters())
    peak = next((t for name, t in PEAKS.items() if work.cuda and name in torch.cuda.get_device_name()), None)
    generated = sum(len(r.token_ids) for group in ours["generation"].first for r in group.rollouts)
    figures: Figures = {"parameters, 10^6": parameters / 1e6}
    for what, operations in (("generation", 0), ("scoring", 2), ("update", 6)):
        speed = (sum(map(len, rows)) if operations else generated) / ours[what].seconds
        figures |= {f"{what}: tokens/s": speed} | against(what, ours[what], plain[what])
        if operations and peak:
            figures[f"{what}: share of {peak} TFLOP/s"] = operations * parameters * speed / (peak * 1e12)
    off = abs(ours["update"].first.metrics["policy/grad_norm"] / plain["update"].first - 1)
    return figures | {"grad_norm, off by": off}


def update_layouts(work: Work) -> Figures:
    work.make_model()
    batch, rows = work.batch(prompt=90, longest=min(60, work.size.row - PROMPT))
    engine, figures = work.engine("bfloat16", prompt=96), {"tokens": float(sum(map(len, rows)))}
    packs = engine.forward.packs
    for name in ("padded", *(["packed"] if packs else []), "compiled layers"):
        engine.forward.packs = packs and name != "padded"
        if name == "compiled layers":
            for layer in engine.model.base_model.layers:
                layer.compile(dynamic=True, backend="inductor" if work.cuda else "aot_eager")
        timing = timed(work, lambda: engine.update(batch, work.loss))
        figures |= {f"{name}: ms": timing.seconds * 1e3} | ({f"{name}: GB": timing.gigabytes} if work.cuda else {})
    return figures


OPENRLHF = ("openrlhf", "vllm", "deepspeed", "ray")
SECTIONS: dict[int, tuple[str, Callable[[Work], Figures], tuple[str, ...]]] = {  # title, function, packages
    1: ("token statistics", token_statistics, ()),
    2: ("local engine against float32 on the CPU", local_engine, ()),
    3: ("local engine against transformers alone", throughput, ()),
    4: ("OpenRLHF's actor, sdpa", partial(openrlhf_actor, packed=False), OPENRLHF),
    5: ("OpenRLHF's actor, packed rows", partial(openrlhf_actor, packed=True), OPENRLHF),
    6: ("local engine against TRL", against_trl_here, ("trl",)),
    7: ("update: padded, packed, compiled", update_layouts, ()),
    8: ("OpenRLHF's step by parts", openrlhf_step, OPENRLHF),
}


def run(section: int, work: Work) -> Figures:
    """In a process of its own, silent but for its exceptions and what `timed` says."""
    work = work._replace(progress=os.fdopen(os.dup(1), "w"))
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    return SECTIONS[section][1](work)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--section", type=int, nargs="+", choices=SECTIONS, default=[*SECTIONS], help="these alone")
    arguments = parser.parse_args()
    cuda = not arguments.small
    if not cuda:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # OpenRLHF would take a GPU that is there
    elif not torch.cuda.is_available():
        print("skipped: torch sees no GPU here (--small tests this script on a CPU)")
        return 0
    card = torch.cuda.get_device_name() if cuda else "cpu"
    versions = {name: version(name) for name in (*PACKAGES, "flash-attn", "triton", "trl")}  # None: not installed
    sections: dict[int, Figures] = {}
    failed: dict[int, str] = {}
    for number in arguments.section:
        title, _, needed = SECTIONS[number]
        print(f"{number}  {title}", flush=True)
        if missing := [package for package in needed if importlib.util.find_spec(package) is None]:
            print(f"   left out, not installed: {', '.join(missing)}")
            continue
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, get_context("spawn")) as pool:
            try:
                sections[number] = pool.submit(
                    run, number, Work(cuda, SMALL if arguments.small else FULL, Path(folder))
                ).result()
            except Exception as error:  # whatever it is, the other sections go on
                failed[number] = str(error.__cause__ or repr(error))
                print(f"   FAILED: {failed[number]}")
        for name, value in sections.get(number, {}).items():
            print(f"   {name:44}{value:>14,.4g}", flush=True)
    goals: list[dict[str, Any]] = []
    for (number, name), (sense, limit) in {**{goal: (MOST, limit) for goal, limit in RIGHT.items()}, **FAST}.items():
        value = sections.get(number, {}).get(name)
        measured = value is not None and (cuda or (number, name) in RIGHT)
        met = measured and (value >= limit if sense == LEAST else value <= limit)  # false for nan
        outcome = "met" if met else "missed" if measured else "not measured"
        goals.append(
            {"section": number, "figure": name, "goal": f"{sense} {limit}", "outcome": outcome, "value": value}
        )
        if number in arguments.section:
            print(f"{outcome:14}{number}  {name:44}{sense} {limit}")
    count = Counter(goal["outcome"] for goal in goals)
    results = {"card": card, "date": f"{datetime.now(UTC):%Y-%m-%d}", "versions": versions, "failed": failed}
    results |= {"sections": {SECTIONS[n][0]: f for n, f in sections.items()}, "goals": goals}
    results["met"] = not failed and not count["missed"]
    return finish(arguments, results, f"{card}; goals {dict(count)}")


if __name__ == "__main__":
    sys.exit(main())
