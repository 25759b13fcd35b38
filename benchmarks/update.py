"""The local engine's forward and backward pass with rows packed, each prompt once, against padded rows.

Goal: at least 1.8 times the speed for prompts of 90 tokens with 8 responses of 30 each, for a Llama of SmolLM2-135M's
shape in float32 on a CPU; the same log-probs and gradients.

For each size both ways in turn, with the same rows and weights: 'update' is a forward and a backward pass over all rows
(what `PolicyUpdate` does for each optimiser step, without the optimiser), 'measure' a forward pass without gradient.
Times are processor time of one thread; the figure is the median over the pairs. 'copies' is the share of the rows'
tokens that are copies of prompts; rows are packed if it is at least `packing.WORTHWHILE`. Both ways are timed for every
size, whichever the engine chooses. Weights and tokens are random: no time depends on them.

What the profile says: the matrix products of the layers are most of the time, so what counts is how many tokens pass
through them, 960 as rows of 90 + 30 and 322 packed. The output layer sees the 240 response tokens either way.

Takes about ten minutes.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from command_line import finish, make_parser
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from exgrpo_orlhf.engines.local.forward import PolicyForward
from exgrpo_orlhf.engines.local.packing import packed_batches, repeated_share
from exgrpo_orlhf.engines.rows import ForwardRow, micro_batches

K = 8
TOKENS = 2048  # of a micro-batch: LocalEngine.micro_batch_tokens in gin/base.gin
SAME = 1e-5  # largest difference, relative to the largest value or gradient


def llama(layers: int, vocabulary: int) -> LlamaConfig:
    """Of SmolLM2-135M's width."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )


SMOLLM2 = llama(30, 49_152)
CHAIN = Qwen2Config(  # of gin/quickstart.gin, as ChainModel makes it
    vocab_size=18,
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=3,
    num_key_value_heads=3,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=1,
)


class Size(NamedTuple):
    name: str
    config: PretrainedConfig
    prompt: int  # tokens
    response: int  # tokens
    groups: int
    goal: float | None = None


SIZES = (
    Size("90 + 30", SMOLLM2, 90, 30, 1, 1.8),
    Size("90 + 120", SMOLLM2, 90, 120, 1),
    Size("90 + 480", SMOLLM2, 90, 480, 1),
    Size("quickstart, 10 + 27", CHAIN, 10, 27, 32),
)
SMALL = (*(size._replace(config=llama(2, 512), goal=None) for size in SIZES[:2]), SIZES[3]._replace(groups=4))


def make_rows(size: Size) -> list[ForwardRow]:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(size.groups):
        prompt = rng.integers(2, size.config.vocab_size, size.prompt).tolist()
        for _ in range(K):
            rows.append(ForwardRow(prompt, rng.integers(2, size.config.vocab_size, size.response).astype(np.int32)))
    return rows


def over(forward: PolicyForward, rows: list[ForwardRow], pack: bool, backward: bool) -> tuple[float, torch.Tensor]:
    """Seconds, and the log-probs in the rows' order."""
    found: dict[int, torch.Tensor] = {}
    forward.model.zero_grad()
    began = time.process_time()
    with torch.set_grad_enabled(backward):
        for part in (packed_batches if pack else micro_batches)(rows, TOKENS):
            logprobs, _ = forward([rows[i] for i in part], pack)
            if backward:
                (logprobs.sum() / len(rows)).backward()
            found.update(zip(part, logprobs.detach().split([len(rows[i].response) for i in part]), strict=True))
    return time.process_time() - began, torch.cat([found[i] for i in range(len(rows))])


def off(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).abs().max() / right.abs().max())


def compare(size: Size, repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(size.config, attn_implementation="sdpa").eval()
    forward, rows = PolicyForward(model, 1.0, torch.float32), make_rows(size)
    seconds: dict[tuple[str, bool], list[float]] = {}
    values: dict[bool, tuple[torch.Tensor, torch.Tensor]] = {}
    for repeat in range(repeats + 1):  # the first one is not counted
        for what, backward in (("measure", False), ("update", True)):
            for pack in (False, True):
                took, logprobs = over(forward, rows, pack, backward)
                if repeat:
                    seconds.setdefault((what, pack), []).append(took)
                elif backward:
                    slopes = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
                    values[pack] = logprobs, slopes
    figures: dict[str, Any] = {
        "copies": repeated_share(rows),
        "packs": next(pack for _, pack in forward.batches(rows, TOKENS)),
        "log_probs_off": off(values[True][0], values[False][0]),
        "gradient_off": off(values[True][1], values[False][1]),
    }
    for what in ("measure", "update"):
        padded, packed = seconds[what, False], seconds[what, True]
        figures |= {f"{what}_padded_s": statistics.median(padded), f"{what}_packed_s": statistics.median(packed)}
        figures[f"{what}_ratio"] = statistics.median(a / b for a, b in zip(padded, packed, strict=True))
    return figures


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    repeats = 1 if arguments.small else arguments.repeats
    print(f"{'':22}{'copies':>8}{'chosen':>8}{'update, s':>18}{'':8}{'measure, s':>18}{'':8}{'gradient':>10}")
    print(f"{'':38}{'padded':>9}{'packed':>9}{'ratio':>8}{'padded':>9}{'packed':>9}{'ratio':>8}{'off by':>10}")
    cases, met = {}, True
    for size in SMALL if arguments.small else SIZES:
        row = cases[size.name] = compare(size, repeats)
        times = "".join(
            f"{row[f'{what}_padded_s']:9.2f}{row[f'{what}_packed_s']:9.2f}{row[f'{what}_ratio']:8.2f}"
            for what in ("update", "measure")
        )
        chosen = "packed" if row["packs"] else "padded"
        print(f"{size.name:22}{row['copies']:8.2f}{chosen:>8}{times}{row['gradient_off']:10.0e}", flush=True)
        met = met and max(row["log_probs_off"], row["gradient_off"]) <= SAME
        met = met and (size.goal is None or row["update_ratio"] >= size.goal)
    summary = (
        f"{cases[SIZES[0].name]['update_ratio']:.2f} times the speed at {SIZES[0].name} × {K} (goal {SIZES[0].goal})"
    )
    return finish(arguments, {"repeats": repeats, "cases": cases, "met": met}, summary)


if __name__ == "__main__":
    sys.exit(main())
