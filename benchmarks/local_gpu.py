#!/usr/bin/env python
"""The local engine on a GPU: that it computes what the CPU does, and how fast. Skips where there is none.

Goal: in bfloat16 over float32 master weights, the log-probs of the same tokens differ from the CPU's float32 ones by
less than 0.05 on average and 0.5 at most, and the updated weights point the same way (cosine of the two updates above
0.9); training goes on from a checkpoint. Reported besides: generated tokens a second, tokens through the update a
second and peak memory, for a randomly initialised Qwen2 of about half a billion parameters. `--device cpu` runs the
same checks on the CPU with the small model alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from exgrpo_orlhf import config
from exgrpo_orlhf.engines.local import LocalEngine, LocalSettings
from exgrpo_orlhf.objective import MixedPolicyLoss
from exgrpo_orlhf.prompts import Prompts
from exgrpo_orlhf.replay import MixedBatch, Plan, Row
from exgrpo_orlhf.settings import Optimizer, Sampling
from exgrpo_orlhf.tasks.chain_model import ChainModel
from exgrpo_orlhf.tasks.modular_chains import ModularChains
from exgrpo_orlhf.training import train

MEAN, LARGEST, COSINE = 0.05, 0.5, 0.9
QUESTIONS = ModularChains(count=16).load()


def engine(model: Path, device: str, dtype: str, response: int = 64) -> LocalEngine:
    settings = LocalSettings(device=device, dtype=dtype, micro_batch_tokens=8192)
    return LocalEngine(
        settings, Optimizer(), Sampling(max_response_tokens=response), Prompts(max_tokens=32), model_path=model
    )


def batch_of(made_by: LocalEngine, k: int) -> MixedBatch:
    """Rollouts with alternating advantages: every row has a gradient."""
    groups = made_by.rollout(Plan(1, QUESTIONS, [], {}), k)
    rows = [[Row(g.question, r.token_ids, (-1.0) ** i, True, None) for i, r in enumerate(g.rollouts)] for g in groups]
    return MixedBatch(groups, rows)


def update_of(used: LocalEngine, batch: MixedBatch) -> tuple[np.ndarray, torch.Tensor]:
    before = torch.cat([p.detach().cpu().flatten().clone() for p in used.model.parameters()])
    stats = used.update(batch, MixedPolicyLoss(response_length=64))
    after = torch.cat([p.detach().cpu().flatten() for p in used.model.parameters()])
    return np.concatenate(stats.policy_logprobs), after - before


def compare(model: Path, device: str) -> dict[str, float]:
    reference, tested = engine(model, "cpu", "float32"), engine(model, device, "bfloat16")
    batch = batch_of(tested, 8)
    expected, expected_update = update_of(reference, batch)
    measured, update = update_of(tested, batch)
    difference = np.abs(expected - measured)
    cosine = torch.nn.functional.cosine_similarity(expected_update, update, dim=0)
    return {"mean": float(difference.mean()), "largest": float(difference.max()), "cosine": float(cosine)}


def resume(device: str) -> int:
    bindings = ["train.eval_every = None", "train.save_every = 2", "Tracking.enabled = False"]
    bindings += [f"LocalEngine.device = {device!r}", "LocalEngine.dtype = 'bfloat16'"]
    with tempfile.TemporaryDirectory() as folder:
        for steps in (2, 4):
            experiment = config.load(["base.gin"], [*bindings, f"train.steps = {steps}"])
            outcome = train(experiment, Path(folder) / "run", resume=True, tracking_uri="", tags={})
    return outcome.steps


def speed(device: str, tokenizer_from: Path) -> dict[str, float]:
    torch.manual_seed(0)
    shape = {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
    with tempfile.TemporaryDirectory() as folder:
        model = Qwen2Config(
            **shape, vocab_size=151_936, intermediate_size=4864, tie_word_embeddings=True, eos_token_id=0
        )
        Qwen2ForCausalLM(model).save_pretrained(folder)
        AutoTokenizer.from_pretrained(tokenizer_from).save_pretrained(folder)
        large = engine(Path(folder), device, "bfloat16", response=512)
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        batch = batch_of(large, 8)
        generated = time.perf_counter()
        large.update(batch, MixedPolicyLoss(response_length=512))
        torch.cuda.synchronize()
        updated = time.perf_counter()
    tokens = sum(len(row.token_ids) for row in batch.flat_rows())
    return {
        "generated_tokens_s": tokens / (generated - began),
        "updated_tokens_s": tokens / (updated - generated),
        "peak_GB": torch.cuda.max_memory_allocated() / 1e9,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("skipped: torch sees no GPU here (--device cpu runs the checks on the CPU)")
        return 0
    transformers.utils.logging.disable_progress_bar()
    model = ChainModel(operands=(3, 4, 5, 6, 7, 8)).prepare()
    figures: dict[str, float] = compare(model, arguments.device)
    figures["steps_after_resume"] = resume(arguments.device)
    if arguments.device != "cpu":
        figures |= speed(arguments.device, model)
    for name, value in figures.items():
        print(f"{name:>20}  {value:,.4g}")
    met = figures["mean"] < MEAN and figures["largest"] < LARGEST and figures["cosine"] > COSINE
    met = bool(met and figures["steps_after_resume"] == 4)
    if arguments.json:
        arguments.json.write_text(json.dumps({**figures, "met": met}, indent=1) + "\n")
    print(
        f"{'met' if met else 'MISSED'}: log-probs differ by {figures['mean']:.3f} on average (goal {MEAN}), at most "
        f"{figures['largest']:.3f} (goal {LARGEST}); cosine of the updates {figures['cosine']:.3f} (goal {COSINE})"
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
