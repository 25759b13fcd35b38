"""What a run needs of memory, time and disk: estimated by the model's sizes before it starts."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PretrainedConfig

from ..engines.local.placement import device_of
from ..engines.openrlhf import estimates
from ..engines.openrlhf.worker_environment import ray_address
from ..experiment import Experiment
from ..io.progress import duration
from ..io.provenance import host_bytes
from ..replay import snapshot
from ..replay.store_rule import AllFinished
from ..sampling.vllm_here import SLEEPS_ABOVE
from ..settings import LocalEngine
from ..training import initial_buffer

_RESERVE = 3 * estimates.GB  # of a GPU on the local engine: 1 GB of CUDA in its process, 2 GB of fragments (assumed)
_TEXT = 3  # bytes of a file of experts that a token takes (assumed)


def needs(experiment: Experiment, config: PretrainedConfig, count: tuple[int, int], run: Path) -> Iterator[str]:
    """The lines of the plan. count: the model's parameters, and those that are trained; run: the run's folder"""
    tokens, loaded = min(estimates.RESPONSE, experiment.sampling.max_response_tokens), loaded_bytes(experiment)
    buffer = buffer_bytes(experiment, 0.5, tokens, loaded)
    beside = f"a replay buffer of {size(buffer)}"
    beside += f", {size(loaded)} of it from Work.experience" if loaded else ""
    beside += " if half of the rollouts are right" if _stores(experiment) else ""
    settings = experiment.openrlhf
    if settings is None or settings.cpu_bench:
        # The local engine's weights and Adam, float32.
        checkpoint = 4 * count[0] + (8 + 4 * len(experiment.copies)) * count[1]
        lines = [*_local(experiment, config, count, beside), *_local_time(experiment, count[0])]
    else:
        checkpoint = estimates.checkpoint_bytes(*count) + 2 * count[1] * len(experiment.copies)
        lines = [*_layout(experiment, config, count[0], beside)]
    yield from lines
    if (rounds := experiment.dynamic_sampling.max_rounds) and lines[-1].startswith("time"):
        more = f"{rounds} further rounds, each at most a batch's generation"
        yield f"            NOT COUNTED: DynamicSampling.max_rounds = {more}"
    free = shutil.disk_usage(next(folder for folder in run.absolute().parents if folder.is_dir())).free
    yield f"disk        estimated: {disk_text(experiment, checkpoint + buffer, free)}"


def _local(experiment: Experiment, config: PretrainedConfig, count: tuple[int, int], beside: str) -> Iterator[str]:
    """Of the local engine, float32. beside: what its memory holds besides"""
    parameters, trained = count
    copies = 4 * trained * len(experiment.copies)
    held = 4 * parameters * (1 + experiment.reference_model) + 8 * trained + copies  # while it samples, with Adam
    held += 0 if experiment.lora.rank is None else 4 * trained  # A and B are beside the model's own
    update, share = held + 4 * trained, _vllm_share(experiment)  # with gradients
    merged = 4 * estimates.merged_parameters(config, experiment.lora) if share is None else 0  # while the loop samples
    most, there = max(update, held + merged), _local_memory(experiment)
    frozen = f", {size(copies)} of it copies of the {' and the '.join(experiment.copies)} policy" if copies else ""
    yield f"memory      estimated: {size(most)}{frozen}, activations and {beside}; --smoke measures it"
    if share is not None:
        yield f"            beside {size(held if share > SLEEPS_ABOVE else update)} of it vLLM takes {share} of the GPU"
    if most > there:
        yield f"            TOO LITTLE: there are {size(there)}; train an adapter (--gin gin/recipes/lora.gin)"
    elif share is not None and (short := _too_little_for_vllm(share, held, update, 2 * parameters, there)):
        yield f"            TOO LITTLE: {short}"


def _too_little_for_vllm(share: float, held: float, update: float, weights: float, total: float) -> str | None:
    """What does not fit on a GPU of `total` bytes beside vLLM's share, and what to do, or None.

    held, update: bytes of the trainer while vLLM samples, and with gradients; weights: vLLM's own, in its share
    """
    sleeps = share > SLEEPS_ABOVE
    beside = held if sleeps else update
    if beside + share * total + _RESERVE <= total:
        return None
    asleep, awake = (int(100 * (total - trainer - _RESERVE) / total) / 100 for trainer in (held, update))
    fits = asleep if asleep > SLEEPS_ABOVE else min(awake, SLEEPS_ABOVE)
    most = f"at most {fits} fits" + ("" if fits > SLEEPS_ABOVE else ", less what activations take")
    if fits * total < weights:
        most = "no share fits; bind LocalEngine.sampler = 'loop' or train an adapter (--gin gin/recipes/lora.gin)"
    return (
        f"LocalEngine.sampler_memory = {share} of {size(total)}, {size(beside)} of "
        f"{'weights and Adam' if sleeps else 'weights, gradients and Adam'} and about {size(_RESERVE)} of CUDA and "
        f"fragments are more than the GPU has: {most}"
    )


def _on_gpu(local: LocalEngine | None) -> bool:
    """Whether it is to run on a GPU, be that here or not."""
    return local is not None and (
        local.device.startswith("cuda") or (local.device == "auto" and torch.cuda.is_available())
    )


def _vllm_share(experiment: Experiment) -> float | None:
    """Of the GPU beside the local engine; None where no vLLM samples there."""
    local = experiment.local
    if local is None or not _on_gpu(local) or not local.samples_by_vllm("cuda"):
        return None
    return local.sampler_memory


def _local_memory(experiment: Experiment) -> float:
    """Bytes of the device on which the local engine would train here; ∞ if that is a GPU that this machine lacks."""
    device = torch.device("cpu")
    if experiment.local is not None:
        try:
            device = device_of(experiment.local.device)
        except ValueError:  # the plan has a line of its own about it
            return math.inf
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return host_bytes()


def _local_time(experiment: Experiment, parameters: int) -> Iterator[str]:
    local = experiment.local
    if local is not None and _on_gpu(local):
        step, _ = estimates.step_of(experiment, parameters, estimates.CARDS["H100"])
        run_hours = f"{duration(step)} a step, {experiment.settings.steps * step / 3600:.0f} h a run"
        sampled = "vLLM's tokens assumed" if local.samples_by_vllm("cuda") else "the loop's tokens measured"
        basis = f"estimated for one {estimates.MEASURED_ON}, from another model's update, {sampled}"
        yield f"time        {basis}: {run_hours}"


def _layout(experiment: Experiment, config: PretrainedConfig, parameters: int, beside: str) -> Iterator[str]:
    """Of OpenRLHF. beside: what a node's memory holds besides"""
    settings = experiment.openrlhf
    assert settings is not None
    card = estimates.CARDS[settings.gpu]
    sums = estimates.memory_of(experiment, config, card.memory)
    rows = sums.cache / estimates.longest_sequence(experiment)
    cache = f"{sums.cache:,} tokens, {rows:.0f} of the longest rows"
    yield f"GPU memory  estimated: {sums.text()} of {size(card.memory)} ({settings.gpu}); vLLM's cache {cache}"
    if short := estimates.too_little_memory(experiment, sums, card.memory):
        yield f"            TOO LITTLE: {short}"
    yield f"host memory estimated: {size(sums.host)} a node, and {beside}"
    step, gpus = estimates.step_of(experiment, parameters, card)
    here = torch.cuda.device_count()
    where = "this machine" if ray_address(settings.ray_address, os.environ) == "local" else "the cluster"
    yield f"device      {gpus} GPUs of {where}"
    if where == "this machine" and here < gpus:
        yield f"            NOT THERE: it has {here}; OpenRLHF.ray_address names a cluster that has {gpus}"
    total = experiment.settings.steps * step / 3600
    yield f"time        estimated: {duration(step)} a step, {total:.0f} h a run, {total * gpus:,.0f} GPU-hours"


def loaded_bytes(experiment: Experiment) -> float:
    """Of what `Work.experience` names; 0 if that cannot be read, of which the plan has a line of its own."""
    if experiment.experience is None:
        return 0.0
    try:
        path = initial_buffer.found(experiment)
        return path.stat().st_size / _TEXT * 8 if path.is_file() else snapshot.n_bytes(path)
    except (OSError, ValueError):
        return 0.0


def _stores(experiment: Experiment) -> bool:
    return experiment.mixer.collects and experiment.mixer.replays


def buffer_bytes(experiment: Experiment, correct: float, tokens: float, loaded: float = 0.0) -> float:
    """Of the replay buffer at the end, at most. correct: share of the rollouts, unless all are stored; tokens: of a
    response; loaded: bytes that it begins with"""
    settings = experiment.settings
    if not _stores(experiment):
        return loaded
    share = 1.0 if isinstance(experiment.mixer.store_rule, AllFinished) or experiment.buffer.failed else correct
    stored = settings.steps * settings.questions_per_step * settings.group_size * share
    pools = 2 if experiment.buffer.failed else 1  # each with ReplayBuffer.max_bytes, which counts so
    return min(loaded + stored * (64 + 8 * tokens), pools * (experiment.buffer.max_bytes or math.inf))


def disk_text(experiment: Experiment, checkpoint: float, free: int) -> str:
    """What the checkpoints need. checkpoint: bytes of one; free: bytes of the disk"""
    disk = (experiment.settings.keep + 1 + (experiment.settings.best_metric is not None)) * checkpoint
    enough = "" if disk < free else ": NOT ENOUGH, lower train.keep or choose another --out"
    return f"{size(checkpoint)} a checkpoint, at most {size(disk)} at a time; {size(free)} are free{enough}"


def size(bytes_: float) -> str:
    return f"{bytes_ / 1e9:.1f} GB" if bytes_ >= 1e9 else f"{bytes_ / 1e6:.1f} MB"
