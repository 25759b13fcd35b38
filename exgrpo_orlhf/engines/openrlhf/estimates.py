"""What a layout needs of a GPU, of a node's memory and of the disk, and the seconds of a step on both engines.

Estimated by the model's sizes, the flags and the operations of a step; what is assumed is a constant here. Left out of
memory (a GB is 10^9 bytes) are weights that ZeRO-3 gathers for a layer, and what processes hold beside the models; of
times validation, further rounds of dynamic sampling, and that a step waits for its longest response.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ...experiment import Experiment
from ...io.lazy import torch, transformers
from ...settings import LoRA
from ..lora import insert
from .flags import needed_gpus, ranks_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GB = 1e9
# Of a GPU beside the sums: 3 GB of CUDA and NCCL in up to three processes, 2 GB of fragments (assumed).
RESERVE = 5 * GB
_BUCKET = 1 * GB  # DeepSpeed's reduce bucket, 5·10^8 gradients in bf16
_ENGINE = 5 * GB  # vLLM's working memory beside weights and cache (assumed)
RESPONSE, PROMPT = 2000, 300  # tokens of a mean response and a mean prompt (assumed)
CANDIDATES = 4  # stored trajectories of a replayed question, which are scored (assumed)
TRAIN_SHARE = 0.3  # of the peak in forward and backward passes, recomputed layers included (assumed)
OTHER = 0.1  # of all the rest: weight sync, sleep and wake-up, grading, checkpoints (assumed)
RATED = 7.62e9  # parameters at which a card's tokens are; fewer are read from memory that much faster (assumed)
# The local engine, with a Qwen2 of 494 million parameters on one H200, whose peak is the H100's (measured)
MEASURED_ON = "H200"  # in November 2026
LOCAL_TRAIN_SHARE = 0.18  # of the peak, in an update of 47,000 tokens
LOOP_TOKENS = 46.0  # of each response a second: 5,894 of 128 responses


@dataclass(frozen=True)
class Memory:
    """Bytes; those of a GPU without `RESERVE`.

    model: weights, gradients, master weights and Adam
    update: the model and a micro-batch with log-probs, but without logits
    reference: the model, a reference model and its logits, before the update; 0 without a KL term
    rollout: what stays on the GPU while vLLM generates (`stays`, by name), and vLLM's share
    cache: tokens for which vLLM's share has room beside its weights
    host: of a node, for what is asleep or offloaded (with gradients in float32); without the replay buffer
    """

    model: float
    update: float
    reference: float
    rollout: float
    stays: dict[str, float]
    cache: int
    host: float

    def text(self) -> str:
        """The sums of a GPU, in GB."""
        parts = {"model": self.model, "update": self.update, "reference pass": self.reference}
        return ", ".join(f"{name} {part / GB:.1f}" for name, part in {**parts, "rollout": self.rollout}.items() if part)


def parameters_of(config: PretrainedConfig, lora: LoRA) -> tuple[int, int]:
    """Parameters of the causal language model with this configuration, tied ones once, and how many of the model or its
    adapter are trained. Raises AdapterError for targets that it cannot have an adapter beside."""
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
        count: int = sum(weight.numel() for weight in model.parameters())
        if lora.rank is None:
            return count, count
        insert(model, lora, config.name_or_path or "")
    return count, sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def merged_parameters(config: PretrainedConfig, lora: LoRA) -> int:
    """Of the layers that an adapter is beside, whose merged copies the local engine's loop samples with."""
    if lora.rank is None:
        return 0
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
        _, layers = insert(model, lora, config.name_or_path or "")
    return sum(layer.get_base_layer().weight.numel() for layer in layers.values())


def checkpoint_bytes(parameters: int, trained: int) -> int:
    """Weights in the Hugging Face files and in DeepSpeed's (bf16), its float32 master weights, two moments of Adam."""
    return 4 * parameters + 12 * trained


def memory_of(experiment: Experiment, config: PretrainedConfig, total: float) -> Memory:
    """The sums for a model with the experiment's layout on GPUs of `total` bytes."""
    from ...objective.token_stats import COLUMNS  # torch with it

    flags = experiment.openrlhf.all_flags() if experiment.openrlhf else {}  # defaults: OpenRLHF 0.11.2's
    text, lora = config.get_text_config(), experiment.lora
    parameters, trained = parameters_of(config, lora)
    stage, per_node = flags.get("ds.zero_stage", 2), flags.get("actor.num_gpus_per_node", 8)
    ranks = ranks_of(flags)
    colocated, offloaded = flags.get("train.colocate_all"), flags.get("ds.adam_offload")
    weights = 2 * parameters / (ranks if stage == 3 else 1)  # bf16; stage 2 keeps all of them on each GPU
    gradients = 2 * trained / (ranks if stage > 1 else 1)
    states = 12 * trained / ranks  # master weights and Adam, float32
    model = weights + gradients + (0 if offloaded else states) + _BUCKET
    beside: dict[str, float] = {}
    if experiment.reference_model and (colocated or flags.get("train.colocate_actor_ref")):
        # ref.offload: of parameters that are partitioned; with stage 2 the reference model has no ZeRO stage
        beside["the reference model"] = 0.0 if flags.get("ref.offload") and stage == 3 else weights
    for name in experiment.copies:
        beside[f"the copy of the {name} policy"] = 2 * trained / (ranks if stage == 3 else 1)
    engine = total * flags.get("vllm.gpu_memory_utilization", 0.95)
    engine_gpus = flags.get("vllm.tensor_parallel_size", 1)
    engine_weights = 2 * parameters / engine_gpus
    held = model + sum(beside.values()) + (engine if colocated and not flags.get("vllm.enable_sleep") else 0)

    longest = longest_sequence(experiment)
    update_tokens = max(flags.get("train.max_tokens_per_gpu", 16192), longest)
    scored_tokens = max(flags.get("rollout.max_tokens_per_gpu") or update_tokens, longest)
    if not flags.get("train.dynamic_batch_enable"):
        update_tokens, scored_tokens = (flags.get(f"{p}.micro_batch_size", 1) * longest for p in ("train", "rollout"))
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    inner = max(inner) if isinstance(inner, list) else inner  # some models have one a layer
    layer = update_tokens * 2 * (6 * text.hidden_size + 4 * inner)  # its activations
    # With gradient checkpointing the inputs of all layers, and one layer computed again.
    checkpointed = text.num_hidden_layers * update_tokens * text.hidden_size * 2 + layer
    activations = checkpointed if flags.get("actor.gradient_checkpointing_enable") else text.num_hidden_layers * layer
    # token_stats: in bf16 a block of logits and its gradient, the hidden states, a block's part of their gradient and
    # the whole; its sum in float32; in bf16 the gradient of the output layer, and of an embedding that is tied to it.
    copies = 0 if lora.rank is not None else 2 if getattr(config, "tie_word_embeddings", False) else 1
    log_probs = update_tokens * (4 * COLUMNS + 10 * text.hidden_size) + 2 * text.vocab_size * text.hidden_size * copies

    stays = {"the policy": weights, **beside} if colocated else {}
    if colocated and not flags.get("ds.enable_sleep") and not offloaded:
        stays["the optimiser, awake"] = states
    heads = getattr(text, "num_attention_heads", 1)
    width = 2 * (getattr(text, "num_key_value_heads", None) or heads)  # heads of keys and of values
    width *= getattr(text, "head_dim", None) or text.hidden_size // heads
    asleep = 16 * trained / ranks if offloaded else gradients + states if flags.get("ds.enable_sleep") else 0
    return Memory(
        model=model,
        update=held + log_probs + activations,
        reference=held + scored_tokens * text.vocab_size * 6 if "the reference model" in beside else 0,  # bf16, float32
        rollout=sum(stays.values()) + engine,
        stays=stays,
        cache=max(0, int((engine - engine_weights - _ENGINE) / (text.num_hidden_layers * width * 2) * engine_gpus)),
        host=per_node * (asleep + (engine_weights if flags.get("vllm.enable_sleep") else 0)),
    )


def longest_sequence(experiment: Experiment) -> int:
    """Tokens of the longest prompt and response together."""
    return experiment.prompts.max_tokens + experiment.sampling.max_response_tokens


def too_little_memory(experiment: Experiment, memory: Memory, total: float) -> str | None:
    """What does not fit on a GPU of `total` bytes, and what to do, or None."""
    share = experiment.openrlhf.all_flags().get("vllm.gpu_memory_utilization", 0.95) if experiment.openrlhf else 0.0
    vllm = f"vllm.gpu_memory_utilization = {share} of {total / GB:.1f} GB"
    reserve = f"about {RESERVE / GB:.0f} GB of CUDA, NCCL and fragments are more than the GPU has"
    fits = (total - (held := sum(memory.stays.values())) - RESERVE) / total
    if memory.stays and share > fits:
        most = f"at most {int(100 * fits) / 100} fits" if fits > 0 else "no share fits"
        return f"{vllm}, {held / GB:.1f} GB of {', '.join(memory.stays)} and {reserve}: {most}"
    for part, size, flag in (("an update", memory.update, "train"), ("a reference pass", memory.reference, "rollout")):
        if size + RESERVE > total:
            remedy = f"lower {flag}.max_tokens_per_gpu, train an adapter (--gin gin/recipes/lora.gin) or take more GPUs"
            part += f" with copies of the {' and the '.join(experiment.copies)} policy" if experiment.copies else ""
            return f"{size / GB:.1f} GB of {part} on {total / GB:.1f} GB and {reserve}: {remedy}"
    if memory.cache < longest_sequence(experiment):
        return f"{vllm} leaves a cache of {memory.cache:,} tokens, less than the longest sequence: raise the share"
    return None


def gpu_bytes() -> float | None:
    """Memory of the smallest GPU here, or None. By nvidia-smi: torch would create a CUDA context and keep it."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return min(float(line) for line in answer.stdout.split("\n") if line) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


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
    passes += "preceding" in experiment.copies
    several = optimizer.steps_per_batch * optimizer.passes_per_batch > 1
    around_policy = several and experiment.loss.clip_around == "policy"
    # Log-probs before the update; of a batch that is generated ahead vLLM's, but on the local engine.
    passes += around_policy or (experiment.local is not None if settings.generate_ahead else several)
    fresh = rows - replayed * (k - mixer.rollouts_per_replayed)
    speed = card.tokens * RATED / parameters
    if experiment.local is not None and not experiment.local.samples_by_vllm("cuda"):
        speed = LOOP_TOKENS * min(fresh, experiment.local.generation_rows)
    generate = fresh * response / speed
    rows_trained = settings.questions_per_step * mixer.places
    scored = 0 if mixer.injection.added_rows else replayed * CANDIDATES
    train = (rows_trained * passes + scored) * forward
    if experiment.local is not None:
        return (1 + OTHER) * (generate + train), 1
    trainers, gpus = ranks_of(flags), needed_gpus(experiment)
    engines = flags["vllm.num_engines"] * flags.get("vllm.tensor_parallel_size", 1)
    times = generate / engines, train / trainers
    return (1 + OTHER) * (max(times) if settings.generate_ahead else sum(times)), gpus
