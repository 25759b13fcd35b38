"""A step of training estimated by simulation: engines that generate by continuous batching, and a trainer.

Nothing here was measured on GPUs. Every assumption is a constant below, or in the package's hours.py, with its unit and
where it comes from. Left out: failures, stragglers among GPUs, CPU work between decode steps beyond DECODE_OVERHEAD,
dynamic sampling.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist

import numpy as np

from exgrpo_orlhf.engines.openrlhf import hours

QUESTIONS, GROUP = 128, 8  # B and K of the paper's recipe
CANDIDATES, PROMPT = hours.CANDIDATES, hours.PROMPT
MAX_PROMPT = 1024  # tokens of the longest prompt
OPTIMIZER_ROWS = 512  # rows of an optimiser step in the paper's recipe: the trainer's ranks must divide them

# Qwen2.5-Math-7B: parameters, layers, hidden size, bytes in bf16, bytes of cache for a token (docs/cluster.md).
PARAMETERS, LAYERS, HIDDEN, WEIGHTS, KV = hours.RATED, 28, 3584, 15.2e9, 57_344
TRAIN_SHARE = hours.TRAIN_SHARE
GENERATE_SHARE = 0.5  # of the peak, at most, in vLLM's matrix products (assumed)
BANDWIDTH_SHARE = 0.8  # of the peak of memory, while weights and cache are read (assumed)
DECODE_OVERHEAD = 1.5e-3  # seconds a decode step besides: kernel launches, sampling, scheduling (assumed)
MAX_SEQUENCES = 256  # that an engine decodes at the same time (assumed; vLLM's default on an A100)
SPARE = 0.01  # of the cache, which must be free when a further sequence is admitted (assumed)
WORKING = 5e9  # bytes of vLLM besides weights and cache (docs/cluster.md)
COLOCATED, ALONE = 0.6, 0.9  # vllm.gpu_memory_utilization with the trainer on the same GPU (the layouts), and without
LINK = 25e9  # bytes/s between a GPU and its host, or another node: PCIe 4 or a 200 Gbit/s network card (assumed)
SYNC_CALLS = 2.0  # seconds of a weight sync besides its bytes (assumed)
OTHER = 5.0  # seconds a step: checkpoints (122 GB every 20 steps at 2 GB/s), the last responses' grades (assumed)
RESERVED = 3e9  # bytes of a GPU for CUDA and NCCL (docs/cluster.md)


@dataclass(frozen=True)
class Gpu:
    """flops: dense bf16 peak; bandwidth: bytes/s; memory: bytes (NVIDIA's data sheets)
    layout_rate: tokens/s at which docs/cluster.md lets one GPU generate
    """

    flops: float
    bandwidth: float
    memory: float
    layout_rate: float


GPUS = {
    name: Gpu(hours.CARDS[name].flops, bandwidth, hours.CARDS[name].memory, hours.CARDS[name].tokens)
    for name, bandwidth in (("A100", 2.04e12), ("H100", 3.35e12))
}


@dataclass(frozen=True)
class Lengths:
    """Response lengths in tokens: log-normal with this median, p99 = tail · median, cut at the limit."""

    median: float
    tail: float
    limit: int

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        sigma = math.log(self.tail) / NormalDist().inv_cdf(0.99)
        drawn = np.exp(math.log(self.median) + sigma * rng.standard_normal(count))
        return [int(n) for n in np.clip(np.rint(drawn), 1, self.limit)]


def fit(path: Path) -> tuple[float, float]:
    """Median and p99/median of the responses in rollouts.jsonl of a run or samples.jsonl of an evaluation.

    Responses that were cut off are known to be longer than what is stored. Therefore the spread comes from the highest
    quantile below them, at most the 99th percentile.

    Raises ValueError for a file without responses, or with half of them or more cut off.
    """
    found: list[tuple[int, bool]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "questions" in row:
            fresh = [one for question in row["questions"] for one in question["responses"] if one["kind"] == "fresh"]
            found += [(one["tokens"], one["finish"] == "length") for one in fresh]
        elif "response_tokens" in row:
            found.append((row["response_tokens"], row["finish"] == "length"))
    if not found:
        raise ValueError(f"{path}: no responses; rollouts.jsonl of a run or samples.jsonl of an evaluation is needed")
    quantile = min(0.99, 1 - sum(cut for _, cut in found) / len(found) - 0.01)
    if quantile < 0.55:
        raise ValueError(f"{path}: {sum(cut for _, cut in found)} of {len(found)} responses are cut off, too many")
    median, high = np.quantile([max(tokens, 1) for tokens, _ in found], [0.5, quantile])
    sigma = math.log(high / median) / NormalDist().inv_cdf(quantile)
    return float(median), math.exp(sigma * NormalDist().inv_cdf(0.99))


@dataclass(frozen=True)
class Batch:
    """Tokens of the responses of one step. generated: by question; stored: replayed rows that are trained on."""

    generated: list[list[int]]
    stored: list[int]
    candidates: list[int]


def draw_batch(lengths: Lengths, rho: float, rng: np.random.Generator) -> Batch:
    replayed = round(rho * QUESTIONS)
    rows = [GROUP - 1] * replayed + [GROUP] * (QUESTIONS - replayed)
    generated = [lengths.draw(rng, count) for count in rows]
    return Batch(generated, lengths.draw(rng, replayed), lengths.draw(rng, CANDIDATES * replayed))


# -- generation --------------------------------------------------------------------------------------------------------


@dataclass
class Generated:
    """What one engine did. tokens: decoded; prefilled: tokens of prompts and of preempted rows, computed at once"""

    seconds: float = 0.0
    tokens: int = 0
    prefilled: int = 0
    preemptions: int = 0
    most_running: int = 0


@dataclass
class _Row:
    prompt: int
    computed_elsewhere: bool  # another row of the question has computed the prompt (prefix caching)
    left: int
    done: int = 0


def cache_tokens(gpu: Gpu, share: float) -> int:
    return int((share * gpu.memory - WEIGHTS - WORKING) / KV)


def decode_seconds(gpu: Gpu, rows: int, cached: int, steps: int) -> float:
    """Seconds of decode steps of the same rows, which hold `cached` tokens before the first of them."""
    weights = max(WEIGHTS / (gpu.bandwidth * BANDWIDTH_SHARE), rows * 2 * PARAMETERS / (gpu.flops * GENERATE_SHARE))
    read = steps * cached + rows * steps * (steps - 1) // 2  # tokens of cache
    return steps * (weights + DECODE_OVERHEAD) + read * KV / (gpu.bandwidth * BANDWIDTH_SHARE)


def run_engine(gpu: Gpu, groups: Sequence[Sequence[int]], cache: int, prompt: int = PROMPT) -> Generated:
    """Generates groups of responses of these lengths by continuous batching: from event to event.

    Events: a row ends, or the cache is full. Waiting rows are admitted in order while the cache has room for them; when
    it is full, the row that was admitted last waits again, and what it had is computed anew (as vLLM does it).

    Raises ValueError for a response that does not fit in the cache.
    """
    waiting = [_Row(prompt, i > 0, length) for group in groups for i, length in enumerate(group)][::-1]
    if waiting and prompt + max(row.left for row in waiting) > cache * (1 - SPARE):
        raise ValueError(f"the longest response does not fit in a cache of {cache} tokens")
    found = Generated()
    running: dict[int, _Row] = {}  # by order of admission
    ends: list[tuple[int, int]] = []  # heap: decode step at which a row ends, its key
    started: dict[int, int] = {}  # the decode step at which a row was admitted
    step = admitted = cached = 0
    while waiting or running:
        while waiting and len(running) < MAX_SEQUENCES:
            row = waiting[-1]
            size = row.prompt + row.done
            room = min(cache * (1 - SPARE), cache - len(running) - 1)  # at least for one step of all
            if running and cached + size > room:
                break
            waiting.pop()
            computed = size if row.done or not row.computed_elsewhere else 0
            found.prefilled += computed
            found.seconds += computed * 2 * PARAMETERS / (gpu.flops * GENERATE_SHARE)
            running[admitted], started[admitted] = row, step
            heapq.heappush(ends, (step + row.left, admitted))
            cached, admitted = cached + size, admitted + 1
        found.most_running = max(found.most_running, len(running))
        while ends[0][1] not in running:  # of a preempted row
            heapq.heappop(ends)
        steps = min(ends[0][0] - step, (cache - cached) // len(running))
        found.seconds += decode_seconds(gpu, len(running), cached, steps)
        found.tokens += steps * len(running)
        cached, step = cached + steps * len(running), step + steps
        while ends and (ends[0][1] not in running or ends[0][0] == step):
            key = heapq.heappop(ends)[1]
            if row := running.pop(key, None):
                cached -= row.prompt + row.done + step - started.pop(key)
        while running and cached + len(running) > cache:
            key, row = running.popitem()
            now = step - started.pop(key)
            row.done, row.left = row.done + now, row.left - now
            cached -= row.prompt + row.done
            found.preemptions += 1
            waiting.append(row)
    return found


def generate(gpu: Gpu, batch: Batch, engines: int, share: float) -> list[Generated]:
    """The engines' work; questions are dealt out as engines/openrlhf/samples.py does it: by the fewest rows."""
    load = [(0, i) for i in range(engines)]
    dealt: list[list[list[int]]] = [[] for _ in range(engines)]
    for group in batch.generated:
        rows, engine = heapq.heappop(load)
        dealt[engine].append(group)
        heapq.heappush(load, (rows + len(group), engine))
    return [run_engine(gpu, groups, cache_tokens(gpu, share)) for groups in dealt]


# -- training ----------------------------------------------------------------------------------------------------------


def forward_flop(responses: Sequence[int]) -> float:
    """Of rows with their prompts, causal attention included."""
    rows = [PROMPT + length for length in responses]
    return sum(2.0 * PARAMETERS * n + 2.0 * LAYERS * HIDDEN * n * n for n in rows)


@dataclass(frozen=True)
class TrainParts:
    """Seconds."""

    score: float
    measure: float
    update: float

    @property
    def total(self) -> float:
        return self.score + self.measure + self.update


def train(gpu: Gpu, batch: Batch, gpus: int) -> TrainParts:
    """The trainer's passes. Rows are taken to be spread evenly over the ranks, by their work."""
    speed = gpus * gpu.flops * TRAIN_SHARE
    rows = forward_flop([*(length for group in batch.generated for length in group), *batch.stored])
    return TrainParts(forward_flop(batch.candidates) / speed, rows / speed, 3 * rows / speed)


def trainer_fits(gpu: Gpu, gpus: int, limit: int) -> bool:
    """Whether an update fits in memory: the sum of gin/engines/openrlhf_8gpu.gin with this many ranks and ZeRO-2."""
    model = WEIGHTS + WEIGHTS / gpus + 12 * PARAMETERS / gpus + 1e9
    tokens = max(16_384, MAX_PROMPT + limit)  # of a micro-batch, which holds the longest row
    return model + 8.8e9 * tokens / 16_384 + RESERVED <= gpu.memory


# -- a step ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Seconds of a step and of its parts. idle: share of the GPUs' time in which they wait for others

    overhead: weight sync, sleep and wake, OTHER where nothing hides it
    """

    seconds: float
    generate: float
    train: float
    overhead: float
    idle: float


def sync_seconds() -> float:
    return SYNC_CALLS + WEIGHTS / LINK


def sleep_seconds(gpus: int) -> float:
    """vLLM's weights, and the trainer's gradients, master weights and Adam, to the host and back."""
    return 2 * (WEIGHTS + WEIGHTS / gpus + 12 * PARAMETERS / gpus) / LINK


def synchronous(gpu: Gpu, batch: Batch, gpus: int) -> Step:
    """All GPUs generate, then all train."""
    engines = [engine.seconds for engine in generate(gpu, batch, gpus, COLOCATED)]
    slowest, trained = max(engines), train(gpu, batch, gpus).total
    overhead = sync_seconds() + sleep_seconds(gpus) + OTHER
    seconds = slowest + trained + overhead
    return Step(seconds, slowest, trained, overhead, sum(slowest - one for one in engines) / (gpus * seconds))


def one_ahead(gpu: Gpu, batches: Sequence[Batch], generating: int, training: int) -> list[Step]:
    """Some GPUs generate the next batch while the others train on this one; then the weights are sent.

    The first batch, which nothing hides, is left out: one step fewer than batches.
    """
    steps = []
    for now, following in pairwise(batches):
        engines = [engine.seconds for engine in generate(gpu, following, generating, ALONE)]
        trained = train(gpu, now, training).total + OTHER
        longest = max(*engines, trained)
        seconds = longest + sync_seconds()
        waited = sum(longest - one for one in engines) + training * (longest - trained)
        idle = waited / ((generating + training) * seconds)
        steps.append(Step(seconds, max(engines), trained, sync_seconds(), idle))
    return steps


def mean(steps: Sequence[Step]) -> Step:
    fields = ("seconds", "generate", "train", "overhead", "idle")
    return Step(*(sum(getattr(step, field) for step in steps) / len(steps) for field in fields))


def layout_parts(gpu: Gpu, gpus: int, rho: float, tokens: float = hours.RESPONSE) -> dict[str, float]:
    """The sum of docs/cluster.md for one step, in seconds. tokens: the mean of a response"""
    speed = gpus * gpu.flops * TRAIN_SHARE
    replayed = rho * QUESTIONS
    rows = (QUESTIONS * GROUP) * (tokens + PROMPT)
    parts = {
        "generate": (QUESTIONS * GROUP - replayed) * tokens / (gpus * gpu.layout_rate),
        "score": replayed * CANDIDATES * (tokens + PROMPT) * 2 * PARAMETERS / speed,
        "measure": rows * 2 * PARAMETERS / speed,
        "update": rows * 6 * PARAMETERS / speed,
    }
    parts["overhead"] = hours.OTHER * sum(parts.values())
    return {**parts, "seconds": sum(parts.values())}
