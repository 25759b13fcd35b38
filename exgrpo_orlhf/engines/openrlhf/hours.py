"""Seconds of a step by the operations that it takes, on both engines. Estimated: every assumption is a constant here.

Left out: validation, and that a step waits for its longest response.
"""

from __future__ import annotations

from typing import NamedTuple

from ...experiment import Experiment
from .flags import ranks_of

RESPONSE, PROMPT = 2000, 300  # tokens of a mean response and a mean prompt (assumed)
CANDIDATES = 4  # stored trajectories of a replayed question, which are scored (assumed)
TRAIN_SHARE = 0.3  # of the peak in forward and backward passes, recomputed layers included (assumed)
OTHER = 0.1  # of all the rest: weight sync, sleep and wake-up, grading, checkpoints (assumed)
RATED = 7.62e9  # parameters at which a card's tokens are; fewer are read from memory that much faster (assumed)
# The local engine, with a Qwen2 of 494 million parameters on one H200, whose peak is the H100's (measured)
MEASURED_ON = "H200"  # in November 2026
LOCAL_TRAIN_SHARE = 0.18  # of the peak, in an update of 47,000 tokens
LOOP_TOKENS = 46.0  # of each response a second: 5,894 of 128 responses


class Card(NamedTuple):
    """memory: bytes; flops: dense bf16 peak, a second; tokens: generated a second by a model of `RATED` parameters"""

    memory: float
    flops: float
    tokens: float


# By NVIDIA's data sheets; tokens are assumed (the RTX 4090 has half of the A100's memory bandwidth).
CARDS = {"A100": Card(80e9, 312e12, 2000), "H100": Card(80e9, 989e12, 4000), "RTX 4090": Card(24e9, 165e12, 1000)}


def step_of(experiment: Experiment, parameters: int, card: Card) -> tuple[float, int]:
    """Seconds of a step with replay, and the GPUs of the layout: one on the local engine.

    A forward pass is 2 operations a parameter and token, a backward pass 4, or 2 where the weights are frozen.
    """
    settings, optimizer, mixer = experiment.settings, experiment.optimizer, experiment.mixer
    flags, k = experiment.openrlhf.all_flags() if experiment.openrlhf else {}, settings.group_size
    rows, replayed = settings.questions_per_step * k, int(mixer.share.rho * settings.questions_per_step)
    response = min(RESPONSE, experiment.sampling.max_response_tokens)
    tokens = response + min(PROMPT, experiment.prompts.max_tokens)  # of a row
    share = TRAIN_SHARE if experiment.local is None else LOCAL_TRAIN_SHARE
    forward = 2 * parameters * tokens / (card.flops * share)
    passes = optimizer.passes_per_batch * (3 if experiment.lora.rank is None else 2) + (experiment.loss.kl_coef > 0)
    if optimizer.steps_per_batch * optimizer.passes_per_batch > 1 and not settings.generate_ahead:
        passes += 1  # log-probs before the update
    fresh = rows - replayed * (k - mixer.injection.rollouts_per_replayed)
    speed = card.tokens * RATED / parameters
    if experiment.local is not None and not experiment.local.samples_by_vllm("cuda"):
        speed = LOOP_TOKENS * min(fresh, experiment.local.generation_rows)
    generate = fresh * response / speed
    train = (rows * passes + replayed * CANDIDATES) * forward
    if experiment.local is not None:
        return (1 + OTHER) * (generate + train), 1
    trainers = ranks_of(flags)
    if flags.get("train.colocate_all"):
        return (1 + OTHER) * (generate + train) / trainers, trainers
    engines = flags["vllm.num_engines"] * flags.get("vllm.tensor_parallel_size", 1)
    times = generate / engines, train / trainers
    return (1 + OTHER) * (max(times) if settings.generate_ahead else sum(times)), trainers + engines
