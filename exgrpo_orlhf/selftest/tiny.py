"""A small random model of the bound architecture, and the bound experiment with this model.

Faults of a layout show with a small model: lost micro-batches, weights that do not arrive, another temperature. Its
memory use does not, and the doctor does not measure it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import ModuleList
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Qwen2Config

from .. import config
from ..engines.openrlhf.flags import divisible_questions, ranks_of
from ..engines.pretrained import PretrainedModel
from ..experiment import Experiment
from ..settings import OpenRLHF
from ..testbed.tiny_models import ChainModel
from ..training.supervised_start import SupervisedModel

LAYERS, HEAD, SPREAD = 2, 64, 2.0  # of the model, at least; width of a head; standard deviation of a logit
RESPONSE, PROMPT = 24, 32  # longest, tokens
MICRO_BATCH_TOKENS = 128  # of dynamic batches; the rows of a step on a rank are more than three times that
ROWS = 24  # fewest rows of an optimiser step on a rank
TIMEOUT = 600.0  # seconds, the longest OpenRLHF.timeout
REWARD = "reward.py"
_LAYOUT = ("train", "OpenRLHF", "LoRA", "Sampling", "Optimizer", "MixedPolicyLoss")  # what is examined as bound
_REWARD = """import zlib


def reward_func(queries, prompts, labels):
    \"\"\"Right or wrong by chance, reproducibly: a random model is never right.\"\"\"
    return {"rewards": [float(zlib.crc32(query.encode()) % 2) for query in queries]}
"""


def bound_model(files: Sequence[str], overrides: Sequence[str]) -> tuple[str, Experiment] | None:
    """Path or hub id of the pretrained model that the files bind, and the experiment with it at the bound lengths; None
    if the model is made here, or none is bound.

    Raises OSError and ValueError for a model that cannot be used.
    """
    try:
        experiment = config.load(["base.gin", *files], [*overrides, "Work.questions = @ModularChains()"])
    except config.ConfigError:  # a recipe without a model; other errors are raised later
        return None
    model = experiment.model
    while isinstance(model, SupervisedModel):  # of the same architecture as what it is made of
        model = model.model
    return (model.prepare(), experiment) if isinstance(model, PretrainedModel) else None


def make_model(bound: str | None, folder: Path, tensor_parallel: int) -> str:
    """Saves the model and its tokenizer in `folder`, and a reward function beside it. Returns the architecture's name.

    Args:
        bound: the model whose architecture is used; None: Qwen2
        tensor_parallel: GPUs of a vLLM engine, over which the heads are split
    """
    tokenizer = ChainModel.tokenizer()
    config = AutoConfig.from_pretrained(bound, trust_remote_code=False) if bound else Qwen2Config()
    shape = _shape(config.get_text_config(), tensor_parallel)
    tokens = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    shape.update({"vocab_size": len(tokenizer), **tokens})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
        # With a random model's own scale all tokens would be equally likely, at any temperature.
        torch.nn.init.normal_(model.get_output_embeddings().weight, std=SPREAD / math.sqrt(shape.hidden_size))
    model.tie_weights()
    model.bfloat16().save_pretrained(folder)  # as published models, whose weights are exact in bfloat16
    tokenizer.save_pretrained(folder)
    (folder.parent / REWARD).write_text(_REWARD, encoding="utf-8")
    return type(model).__name__


def _shape(bound: PretrainedConfig, tensor_parallel: int) -> PretrainedConfig:
    """The bound configuration with narrower layers, and no more of them than it takes to have one of each kind."""
    shape = copy.deepcopy(bound)
    # Settings with a value for each layer, such as `layer_types`; lists without a repetition are of layers' numbers.
    lists = {name: value for name, value in vars(bound).items() if isinstance(value, list | tuple)}
    lists = {k: v for k, v in lists.items() if len({*map(str, v)}) < len(v) == bound.num_hidden_layers}
    layers = _layers(bound, lists.values())
    heads = max(4, tensor_parallel)
    grouped = getattr(bound, "num_key_value_heads", None) not in (None, bound.num_attention_heads)
    small: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(heads // 2, tensor_parallel) if grouped else heads,
        "head_dim": HEAD,
        "hidden_size": heads * HEAD,
        "intermediate_size": 2 * heads * HEAD,
        "moe_intermediate_size": heads * HEAD,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,  # of experts
        "topk_group": 1,
        "max_window_layers": layers,
        # Of the layers' weights. Much smaller ones would leave the last token's embedding as it is, and with tied
        # weights all responses would repeat that token: no group would have a signal.
        "initializer_range": 0.1,
    }
    # The heads of a Mamba layer have the width mamba_expand · hidden_size together, unless mamba_d_ssm names it.
    if (width := getattr(bound, "mamba_expand", None)) and not getattr(bound, "mamba_d_ssm", None):
        small["mamba_n_heads"] = int(width * heads * HEAD) // getattr(bound, "mamba_d_head", HEAD)
        small["mamba_headdim"] = int(width * heads * HEAD) // getattr(bound, "n_mamba_heads", heads)
        small |= {"attention_hidden_size": 2 * heads * HEAD, "attention_head_dim": 2 * HEAD}  # Zamba's
    shape.update({name: value for name, value in small.items() if getattr(shape, name, None) is not None})
    shape.update({name: values[:layers] for name, values in lists.items()})
    return shape


def _layers(bound: PretrainedConfig, settings: Collection[Sequence[Any]]) -> int:
    """How many layers there must be for one of each kind: of the same modules and `settings`."""
    with torch.device("meta"):
        modules = [*AutoModelForCausalLM.from_config(bound).modules()]
    lists = [part for part in modules if isinstance(part, ModuleList) and len(part) == bound.num_hidden_layers]
    kinds = [
        (*(str(values[i]) for values in settings), *((name, type(part)) for name, part in layer.named_modules()))
        for i, layer in enumerate(lists[0] if lists else ())
    ]
    return max([LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds))])


def doctor_experiments(files: Sequence[str], overrides: Sequence[str], model: Path) -> tuple[Experiment, Experiment]:
    """The bound experiment with the small model, and what is examined: base.gin's algorithm on the bound layout, with
    the batch size and OpenRLHF flags that the small model needs.

    model: where `make_model` writes the model, with the reward function beside it
    Raises ConfigError, and ValueError for an experiment of another engine.
    """
    sources = [
        "Work.model = @PretrainedModel()",
        f"PretrainedModel.path = {str(model)!r}",
        "Work.questions = @ModularChains()",
        "Work.validation = None",
        f"MAX_RESPONSE_TOKENS = {RESPONSE}",
    ]
    as_bound = config.load(["base.gin", *files], [*overrides, *sources])
    if as_bound.openrlhf is None:
        raise ValueError("the doctor examines layouts of OpenRLHF: add one, --gin gin/engines/openrlhf_….gin")
    # A run with another algorithm may have no group with a signal in a batch of a small random model.
    bindings = [f"{name} = {value}" for name, value in as_bound.params.items() if name.partition(".")[0] in _LAYOUT]
    bindings += [
        *sources,
        "ModularChains.operands = (3, 4)",
        "ReplayMixer.start_at_accuracy = None",
        "Verifier.kind = 'function'",
        f"Verifier.function = {str(model.parent / REWARD)!r}",
        "Prompts.template = 'plain'",
        f"Prompts.max_tokens = {PROMPT}",
        f"Sampling.max_response_tokens = {RESPONSE}",
        # One update moves many bfloat16 weights: a sync that does nothing is seen.
        "Optimizer.learning_rate = 1e-4",
        "Optimizer.warmup_steps = 0",
        "Optimizer.schedule = 'constant'",
        "Optimizer.decay_steps = None",
        "train.steps = 2",
        "train.eval_every = None",
        "train.best_metric = None",
        "train.save_every = 1",
        "Tracking.enabled = False",
        "Tracking.also = ()",
    ]
    return as_bound, config.load(["base.gin"], [*bindings, *_batch(as_bound, as_bound.openrlhf)])


def _batch(as_bound: Experiment, layout: OpenRLHF) -> list[str]:
    """The bindings of the batch's size and of the flags that a small model needs."""
    bindings: list[str] = []
    flags, more_flags = layout.all_flags(), dict(layout.more_flags)
    if as_bound.settings.generate_ahead:
        bindings.append("train.steps = 3")  # the second step's batch is planned before anything is stored
    else:
        # Without the correction by the engines' log-probs: the plain computation has no engine.
        more_flags["algo.advantage.is_correction_level"] = "off"
    for flag in ("train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu"):
        if flag in flags:
            more_flags[flag] = MICRO_BATCH_TOKENS
    # The smallest batch that the ranks divide, with several micro-batches on each of them.
    unit = divisible_questions(as_bound, as_bound.settings.group_size)  # by the paper's algorithm, without added rows
    per_rank = max(ROWS, 3 * int(flags.get("train.micro_batch_size", 1)))
    fewest = per_rank * ranks_of(flags) * as_bound.optimizer.steps_per_batch
    count = -(-fewest // (unit * as_bound.settings.group_size)) * unit
    bindings += [
        f"OpenRLHF.timeout = {min(layout.timeout, TIMEOUT)}",
        f"OpenRLHF.more_flags = {more_flags!r}",
        f"train.questions_per_step = {count}",
        f"ModularChains.count = {8 * count}",
    ]
    return bindings
