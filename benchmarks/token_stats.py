"""Log-probs and entropies of 2,048 tokens in blocks against the plain computation over the whole logits.

Goal: peak extra memory at most a tenth of the plain computation's (the weight's own gradient aside), time at most 1.1
times without gradients and 1.4 times with: with those of both outputs, and with those of the log-probs alone, which is
what training without an entropy bonus needs.

Profile, one thread: matrix products are 85 to 90 % of the plain computation, 94 % of ours without gradients and 97 %
with. Ours has four of them to the plain one's three, the logits computed again in the backward pass: 1.33 times is
what remains of the time limit's 1.4 before anything else is counted. So what counts is their speed. With chunks of 110
tokens and the whole vocabulary, as first written, they reached 73 Gflop/s and read and wrote the weight's whole
gradient once per chunk; with all tokens and a block of the vocabulary, 105. Next came memory, not arithmetic: a pass
that writes to a fresh tensor of more than 32 MiB took 1.6 ns per element, the system handing out its pages, one that
writes to a tensor already there 0.1 and the exponential itself 0.6; reused smaller tensors that are freed and made
again fragment the heap (629 MB at the peak, 66 as buffers). So the blocks are 16 MiB in buffers made once.

Takes about eight minutes with one thread: each figure is of a process of its own, the plain one of up to 8 GB.
"""

from __future__ import annotations

import platform
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch
from command_line import finish, make_parser
from torch import Tensor

from exgrpo_orlhf.objective.token_stats import token_stats

Size = tuple[int, int, int]  # tokens, hidden size, vocabulary
FULL = 2048, 1536, 151_936  # of Qwen2.5-1.5B
SMALL = 512, 64, 32_000  # large enough for the plain computation's peak to show
MEMORY_LIMIT = 0.1


class Case(NamedTuple):
    name: str
    through: tuple[bool, bool]  # gradients flow back from the log-probs, from the entropies
    time_limit: float  # times the plain computation's


CASES = (
    Case("no gradients", (False, False), 1.1),
    Case("gradients of log-probs", (True, False), 1.4),
    Case("gradients of both", (True, True), 1.4),
)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, through: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """As it is usually written; autograd keeps what the entropies need only where they are differentiated."""
    log_p = (hidden @ weight.T).log_softmax(1)  # (N, V)
    logprobs = log_p.gather(1, targets[:, None]).squeeze(1)
    with torch.set_grad_enabled(through[1]):
        entropies = -(log_p.exp() * log_p).sum(1)
    return logprobs, entropies


def in_blocks(hidden: Tensor, weight: Tensor, targets: Tensor, through: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    return token_stats(hidden, weight, targets)


VARIANTS = {"plain": plain, "blocks": in_blocks}


def resident_peak() -> int:
    """Bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def step(variant: str, through: tuple[bool, bool], size: Size) -> tuple[float, int, Tensor]:
    """Seconds, bytes by which the process's peak rose, and both outputs (2, N)."""
    tokens, width, vocabulary = size
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_(through[0])
    weight = torch.empty(vocabulary, width).uniform_(-0.1, 0.1, generator=generator).requires_grad_(through[0])
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    before, start = resident_peak(), time.perf_counter()
    with torch.set_grad_enabled(through[0]):
        outputs = VARIANTS[variant](hidden, weight, targets, through)
        if through[0]:
            sum(output.sum() for output, used in zip(outputs, through, strict=True) if used).backward()
    seconds = time.perf_counter() - start
    return seconds, resident_peak() - before, torch.stack([output.detach() for output in outputs])


def measure(variant: str, through: tuple[bool, bool], size: Size, threads: int) -> tuple[float, int, list[list[float]]]:
    """In a fresh process, whose resident peak counts everything: tensors, the library's buffers, fragmentation.

    torch's own allocation trace would miss the matrix library's packing buffers and what the allocator holds back.
    """
    torch.set_num_threads(threads)
    step(variant, through, (8, size[1], 64))  # loads what is loaded on first use
    seconds, peak, outputs = step(variant, through, size)
    # The weight's gradient is inside our peak. Inside the plain one's it may not be: then this is in its favour.
    weight_gradient = 4 * size[1] * size[2] if through[0] else 0  # bytes
    return seconds, peak - weight_gradient, outputs.tolist()


def compare(case: Case, size: Size, repeats: int, threads: int) -> dict[str, float]:
    """Both variants in turn, `repeats` times; of each the least time and the largest peak."""
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    peaks: dict[str, list[int]] = {variant: [] for variant in VARIANTS}
    outputs = {}
    for _ in range(repeats):
        for variant in VARIANTS:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                took, peak, outputs[variant] = pool.submit(measure, variant, case.through, size, threads).result()
            seconds[variant].append(took)
            peaks[variant].append(peak)
    difference = (torch.tensor(outputs["plain"]) - torch.tensor(outputs["blocks"])).abs().max().item()
    if not difference < 1e-4:  # the plain entropies' own float32 error is a few 1e-5
        raise ValueError(f"{case.name}: the two differ by {difference}")
    return {
        "plain_seconds": min(seconds["plain"]),
        "blocks_seconds": min(seconds["blocks"]),
        "time_ratio": min(seconds["blocks"]) / min(seconds["plain"]),
        "time_limit": case.time_limit,
        "plain_peak_bytes": max(peaks["plain"]),
        "blocks_peak_bytes": max(peaks["blocks"]),
        "memory_ratio": max(peaks["blocks"]) / max(peaks["plain"]),
        "memory_limit": MEMORY_LIMIT,
        "largest_difference": difference,
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    size, repeats = (SMALL, 1) if arguments.small else (FULL, arguments.repeats)

    print("{:,} tokens, hidden size {:,}, vocabulary {:,}, float32, {} thread(s)".format(*size, arguments.threads))
    print(f"{'':24}{'seconds':>26}{'peak extra MB':>30}")
    print(f"{'':24}{'plain':>8}{'blocks':>8}{'ratio':>10}{'plain':>12}{'blocks':>8}{'ratio':>10}")
    figures = {}
    for case in CASES:
        row = figures[case.name] = compare(case, size, repeats, arguments.threads)
        print(
            f"{case.name:24}{row['plain_seconds']:8.2f}{row['blocks_seconds']:8.2f}{row['time_ratio']:10.2f}"
            f"{row['plain_peak_bytes'] / 1e6:12,.0f}{row['blocks_peak_bytes'] / 1e6:8,.0f}{row['memory_ratio']:10.3f}",
            flush=True,
        )
    shares = {
        f"{what}, {name}": row[f"{what}_ratio"] / row[f"{what}_limit"]
        for name, row in figures.items()
        for what in ("time", "memory")
    }
    nearest = max(shares, key=shares.__getitem__)
    met = arguments.small or shares[nearest] <= 1
    settings = {"repeats": repeats, "threads": arguments.threads}
    summary = f"nearest to its limit: {shares[nearest]:.2f} of it ({nearest})"
    return finish(arguments, {**settings, "cases": figures, "met": met}, summary)


if __name__ == "__main__":
    sys.exit(main())
