"""OpenRLHF's flags under this engine: which of them a gin binding decides, which are refused, and which are passed on.

docs/settings.md shows the first two tables. docs/dev/flags.md says what runs each flag that is passed on: a test, or a
check of the doctor. Tests compare them with OpenRLHF's own parser.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ...checks import refusal, require
from ...experiment import Experiment
from ...settings import OpenRLHF

# The flags that each binding decides.
_BY_BINDING = {
    "Work.model": "actor.model_name_or_path",
    "Prompts.max_tokens + Sampling.max_response_tokens": "data.max_len",
    "Work.questions": "data.prompt_dataset data.prompt_probs data.prompt_split data.max_samples "
    "data.input_key data.label_key data.dataloader_num_workers",
    "Prompts.template": "data.input_template data.apply_chat_template",
    "Work.validation": "eval.dataset eval.split",
    "train.eval_every": "eval.steps",
    "Evaluation.temperature": "eval.temperature",
    "Evaluation.samples": "eval.n_samples_per_prompt",
    "train.questions_per_step": "rollout.batch_size rollout.vllm_generate_batch_size",
    "train.group_size": "rollout.n_samples_per_prompt",
    "Sampling.max_response_tokens": "rollout.max_new_tokens",
    "Sampling.temperature": "rollout.temperature",
    "train.questions_per_step · train.group_size / Optimizer.steps_per_batch": "train.batch_size",
    "Optimizer.passes_per_batch": "train.max_epochs",
    "train.steps": "train.num_episodes",
    "train.seed": "train.seed",
    "train.generate_ahead": "train.async_enable train.async_queue_size",
    "Optimizer.learning_rate": "actor.adam.lr",
    "Optimizer.betas": "actor.adam.betas",
    "Optimizer.weight_decay": "actor.adam.weight_decay",
    "Optimizer.schedule": "actor.lr_scheduler actor.min_lr_ratio",
    "Optimizer.warmup_steps": "actor.lr_warmup_ratio",
    "Optimizer.max_grad_norm": "actor.max_norm",
    "LoRA.rank": "ds.lora.rank",
    "LoRA.alpha": "ds.lora.alpha",
    "LoRA.targets": "ds.lora.target_modules",
    "MixedPolicyLoss.clip_low, .clip_high": "actor.eps_clip actor.eps_clip_low_high",
    "MixedPolicyLoss.dual_clip": "actor.dual_clip",
    "MixedPolicyLoss.normalizer": "actor.loss_agg_mode",
    "MixedPolicyLoss.ratio": "actor.policy_loss_type",
    "MixedPolicyLoss.entropy_coef": "actor.entropy_coef",
    "GroupAdvantages.scale_by_std": "algo.advantage.estimator algo.advantage.no_std_norm",
    "MixedPolicyLoss.kl_coef": "algo.kl.init_coef algo.kl.use_loss",
    "MixedPolicyLoss.kl_coef (k3)": "algo.kl.estimator",
    "Verifier.kind": "reward.remote_url",
    "the run's folder (--out, --name)": "ckpt.path ckpt.output_dir",
    "--resume": "ckpt.load_enable",
    "train.save_every": "ckpt.save_steps",
    "train.keep": "ckpt.max_num ckpt.max_mem",
    "every checkpoint is one of Hugging Face too": "ckpt.save_hf",
    "train.best_metric": "ckpt.best_metric_key",
}
BOUND = {flag: binding for binding, decided in _BY_BINDING.items() for flag in decided.split()}

# How a run is executed, not what it computes. These may change when a run is resumed, such as after running out of
# memory.
EXECUTION = (
    "train.micro_batch_size",
    "train.max_tokens_per_gpu",
    "rollout.micro_batch_size",
    "rollout.max_tokens_per_gpu",
    "ref.offload",
    "actor.gradient_checkpointing_*",
    "vllm.*",
    "ds.enable_sleep",
)

# The flags that are passed on, by what they take.
_BY_KIND: dict[Any, str] = {
    bool: "ref.offload train.colocate_actor_ref train.colocate_all train.dynamic_batch_enable "
    "train.full_determinism_enable vllm.sync_with_ray vllm.enable_prefix_caching vllm.enforce_eager vllm.enable_sleep "
    "ds.adam_offload ds.overlap_comm ds.packing_samples ds.enable_sleep actor.gradient_checkpointing_enable "
    "actor.gradient_checkpointing_reentrant",
    int: "actor.num_nodes actor.num_gpus_per_node ref.num_nodes ref.num_gpus_per_node train.micro_batch_size "
    "train.max_tokens_per_gpu rollout.micro_batch_size rollout.max_tokens_per_gpu vllm.num_engines "
    "vllm.tensor_parallel_size ds.zero_stage",
    float: "vllm.gpu_memory_utilization actor.adam.eps actor.aux_loss_coef",
    str: "vllm.sync_backend ds.param_dtype ds.attn_implementation ds.grad_accum_dtype ds.experts_implementation "
    "algo.advantage.is_correction_level algo.advantage.is_correction_mode algo.advantage.is_correction_gating",
    float | tuple | list: "algo.advantage.is_correction_threshold",
}
PASSED_ON = {flag: kind for kind, named in _BY_KIND.items() for flag in named.split()}

# Patterns are shell patterns. What a binding decides is not refused, though a pattern matches it (reward.remote_url).
REFUSED = {
    "train.partial_rollout_enable": "a response of two policies has no behaviour log-probs of one",
    "train.enable_ema": "the average is kept in bfloat16, where small steps are rounded away: it would be mostly the "
    "initial model",
    "train.ema_beta": "see train.enable_ema",
    "train.agent_func_path": "the same file is played with Environment.path, on both engines",
    "rollout.top_p": "a filtered distribution is not the policy whose log-probs the importance weights divide by",
    "algo.dynamic_filtering_*": "it would judge fresh rollouts alone, before the stored success joins its group; "
    "DynamicSampling.max_rounds does it after that",
    "algo.advantage.gamma": "the advantage is the group's, the same for every token",
    "algo.advantage.lambd": "there is no critic",
    "algo.kl.target": "the coefficient is MixedPolicyLoss.kl_coef throughout",
    "algo.kl.horizon": "the coefficient is MixedPolicyLoss.kl_coef throughout",
    "algo.kl.unbiased_gradient": "the KL term is exp(x) − x − 1, at most 10 nats a token, as on the local engine",
    "critic.*": "there is no critic",
    "train.colocate_critic_reward": "there is no critic and no reward model",
    "reward.*": "rewards come from Verifier",
    "logger.*": "Tracking.also = ('wandb', 'tensorboard') gets the metrics, on both engines",
    "ds.value_head_prefix": "there is no value head",
    "ds.lora.dropout": "log-probs with dropout are those of another policy",
    "ds.deepcompile": "the output layer computes log-probs instead of logits, each pass anew",
    "ds.ring_attn_size": "responses are scored whole, not in pieces spread over ranks",
    "ds.ring_attn_head_stride": "see ds.ring_attn_size",
    "ds.tensor_parallel_size": "responses are scored through the output layer, which must not be split",
    "ckpt.disable_ds": "a checkpoint without optimiser state could not be resumed",
    "ds.load_in_4bit": "quantised weights are not trained, and vLLM needs whole ones; with LoRA it gets the merged "
    "weights, which have no 4-bit form",
    "ds.use_universal_ckpt": "it is set when a run is resumed with another number of actors",
    "ds.use_liger_kernel": "the output layer computes log-probs instead of logits",
    "ds.zpg": "the second shards of ZeRO++ are for ZeRO-3 between nodes, which nothing here has run on",
    "actor.optim": "Optimizer's settings are AdamW's, as on the local engine",
    "actor.muon.*": "Optimizer's settings are AdamW's, as on the local engine",
    "data.disable_fast_tokenizer": "Prompts encodes with the tokenizer that transformers chooses, on both engines",
    "use_ms": "models and questions come from folders and from Hugging Face's hub",
    "local_rank": "Ray gives each actor its device",
    "data.image_key": "questions are text",
    "data.max_images_per_prompt": "questions are text",
    "actor.freeze_visual_encoder": "questions are text",
}


def identity(settings: OpenRLHF) -> dict[str, Any]:
    """The flags that must be the same for a run to be continued."""
    flags = sorted(settings.all_flags().items())
    return {flag: value for flag, value in flags if not any(fnmatch(flag, pattern) for pattern in EXECUTION)}


def ranks_of(flags: Mapping[str, Any]) -> int:
    """The number of policy actors."""
    return int(flags.get("actor.num_nodes", 1)) * int(flags.get("actor.num_gpus_per_node", 8))  # OpenRLHF's defaults


def divisible_questions(experiment: Experiment, places: int | None = None) -> int:
    """A batch must be a multiple of this many questions: then every rank has as many rows as the others, in each
    optimiser step and in each micro-batch. Otherwise OpenRLHF drops rows or carries half a step into the next batch.
    places: rows that a group may have, if not those of the experiment
    Raises ValueError for flags that `check_flags` refuses."""
    flags = experiment.openrlhf.all_flags() if experiment.openrlhf else {}
    check_flags(flags)
    train, rollout = (int(flags.get(f"{part}.micro_batch_size", 1)) for part in ("train", "rollout"))
    ranks, n, k = ranks_of(flags), experiment.optimizer.steps_per_batch, places or experiment.mixer.places
    return math.lcm(ranks * train * n, ranks * rollout, k * n) // k


def needed_gpus(experiment: Experiment) -> int:
    """The number of GPUs that OpenRLHF will ask Ray for. With fewer it would wait for ever without a message.

    Raises ValueError for flags that contradict each other.
    """
    flags = experiment.openrlhf.all_flags() if experiment.openrlhf else {}
    layouts = [
        (flags.get(f"{group}.num_nodes", 1), flags.get(f"{group}.num_gpus_per_node", 8)) for group in ("actor", "ref")
    ]
    actor, reference = (nodes * gpus for nodes, gpus in layouts)
    engines: int = flags["vllm.num_engines"] * flags.get("vllm.tensor_parallel_size", 1)
    together, beside = flags.get("train.colocate_all"), flags.get("train.colocate_actor_ref")
    if not experiment.reference_model:
        reference = 0
    require(
        not (reference and (together or beside)) or layouts[0] == layouts[1],
        "OpenRLHF.flags: train.colocate_all and train.colocate_actor_ref put the reference model on the actors' GPUs, "
        f"but ref.num_nodes, ref.num_gpus_per_node = {layouts[1]} and actor.num_nodes, actor.num_gpus_per_node = "
        f"{layouts[0]}",
    )
    require(
        not together or actor == engines,
        "OpenRLHF.flags: train.colocate_all puts actors and engines on the same GPUs, but actor.num_nodes · "
        f"actor.num_gpus_per_node = {actor} and vllm.num_engines · vllm.tensor_parallel_size = {engines}",
    )
    return int(actor if together else actor + engines + (0 if beside else reference))


def check_flags(flags: Mapping[str, Any]) -> None:
    """Raises ValueError for a flag that is refused, decided by a binding, or unknown, and for a value of another
    kind than the flag takes, or a whole number below 1."""
    for flag, value in flags.items():
        if flag in BOUND:
            raise ValueError(f"OpenRLHF.flags: {flag} is decided by {BOUND[flag]}; bind that, and leave the flag out")
        for pattern, reason in REFUSED.items():
            if fnmatch(flag, pattern):
                raise ValueError(f"OpenRLHF.flags: {flag} cannot be used here: {reason}")
        if flag not in PASSED_ON:
            near = difflib.get_close_matches(flag, [*PASSED_ON, *BOUND], n=3, cutoff=0.5)
            hint = f"nearest: {', '.join(near)}" if near else "docs/settings.md and docs/dev/flags.md list them"
            raise ValueError(f"OpenRLHF.flags: OpenRLHF has no flag {flag!r}; {hint}")
        if wrong := refusal(value, PASSED_ON[flag]):
            raise ValueError(f"OpenRLHF.flags: {flag} {wrong} got {value!r}")
        require(PASSED_ON[flag] is not int or value >= 1, f"OpenRLHF.flags: {flag} must be at least 1, got {value!r}")


def _check_layout(experiment: Experiment, flags: Mapping[str, Any]) -> None:
    """Raises ValueError without vLLM engines, for a batch that the ranks do not divide, for flags of a correction that
    is off, and for what would fail, or train wrongly, later."""
    require(
        "vllm.num_engines" in flags,
        "OpenRLHF.flags: vllm.num_engines must be at least 1, got None: responses come from vLLM engines",
    )
    questions, unit = experiment.settings.questions_per_step, divisible_questions(experiment)
    train, rollout = (flags.get(f"{part}.micro_batch_size", 1) for part in ("train", "rollout"))
    more = f" + {added.rows} added ones" if (added := experiment.mixer.injection.added_rows) else ""
    require(
        questions % unit == 0,
        f"train.questions_per_step = {questions} must be a multiple of {unit}, so that its rows (· train.group_size = "
        f"{experiment.settings.group_size}{more}) divide into Optimizer.steps_per_batch = "
        f"{experiment.optimizer.steps_per_batch} steps, {ranks_of(flags)} ranks, train.micro_batch_size = {train} and "
        f"rollout.micro_batch_size = {rollout}",
    )
    level = "algo.advantage.is_correction_level"
    idle = [flag for flag in flags if fnmatch(flag, "algo.advantage.is_correction_*")] if level not in flags else []
    require(not idle, f"OpenRLHF.flags: {', '.join(idle)} has no effect without {level}")
    for flag in ("vllm.enable_sleep", "ds.enable_sleep"):
        require(
            not flags.get(flag) or flags.get("train.colocate_all", False),
            f"OpenRLHF.flags: {flag} needs train.colocate_all: nothing else uses that memory otherwise",
        )
    stage, dtype = flags.get("ds.zero_stage", 2), flags.get("ds.param_dtype", "bf16")
    require(stage <= 3, f"OpenRLHF.flags: ds.zero_stage must be 1, 2 or 3, got {stage}")
    require(dtype == "bf16", f"OpenRLHF.flags: ds.param_dtype must be bf16, as vLLM is, got {dtype!r}")
    adding, offloads = flags.get("ds.grad_accum_dtype", "bf16"), flags.get("ds.adam_offload", False)
    require(adding in ("bf16", "fp32"), f"OpenRLHF.flags: ds.grad_accum_dtype must be bf16 or fp32, got {adding!r}")
    require(
        adding == "bf16" or stage == 3 or (stage == 1 and offloads),
        f"OpenRLHF.flags: ds.grad_accum_dtype = 'fp32' with ds.zero_stage = {stage}: DeepSpeed would "
        + ("add gradients up in bfloat16 all the same" if stage == 2 else "make steps that nothing can check or skip")
        + "; use ds.zero_stage = 3, or leave the flag out",
    )


def command_line(
    experiment: Experiment, flags: Mapping[str, Any], model: str, state: Path, *, resume: bool
) -> dict[str, Any]:
    """All flags of a run by name: `flags`, and those that the experiment decides.

    state: the folder in which OpenRLHF looks for its `_actor` state; resume: whether that state is there
    Raises ValueError for flags that `check_flags` refuses, and for settings that OpenRLHF cannot follow exactly.
    """
    check_flags(flags)
    settings, optimizer, loss = experiment.settings, experiment.optimizer, experiment.loss
    b, k, n = settings.questions_per_step, experiment.mixer.places, optimizer.steps_per_batch
    flags = {**flags, **(_beside_updates(flags) if settings.generate_ahead else {})}
    _check_layout(experiment, flags)
    return {
        **flags,
        "actor.model_name_or_path": model,
        "data.max_len": experiment.prompts.max_tokens + experiment.sampling.max_response_tokens,
        "rollout.batch_size": b,
        "rollout.n_samples_per_prompt": k,
        "rollout.max_new_tokens": experiment.sampling.max_response_tokens,
        "rollout.temperature": experiment.sampling.temperature,
        "train.batch_size": b * k // n,
        "train.max_epochs": optimizer.passes_per_batch,
        "train.seed": settings.seed,
        "actor.adam.lr": optimizer.learning_rate,
        "actor.adam.betas": optimizer.betas,
        "actor.adam.weight_decay": optimizer.weight_decay,
        "actor.max_norm": optimizer.max_grad_norm or 0.0,  # DeepSpeed clips to a positive norm alone
        **({"actor.entropy_coef": loss.entropy_coef} if loss.entropy_coef else {}),
        "algo.advantage.estimator": "dr_grpo",
        # Else the reference model is the actor's own, without its adapter or with older weights: OpenRLHF starts none.
        "algo.kl.init_coef": loss.kl_coef if experiment.reference_model else 0.0,
        "algo.kl.use_loss": experiment.reference_model,
        "algo.kl.estimator": "k3",
        # Not an address: rewards come from the Verifier. Without a value OpenRLHF would start a reward model.
        "reward.remote_url": "verifier",
        "ckpt.path": str(state),
        "ckpt.load_enable": resume,
    }


def _beside_updates(flags: Mapping[str, Any]) -> dict[str, Any]:
    """A flag more for train.generate_ahead = True. Raises ValueError for flags that it excludes."""
    for flag, value in flags.items():
        if value and flag in ("train.colocate_all", "vllm.enable_sleep", "ds.enable_sleep"):
            raise ValueError(
                f"OpenRLHF.flags: {flag} cannot be used with train.generate_ahead: vLLM engines generate while the "
                "actors train, and need GPUs of their own (gin/engines/openrlhf_8gpu_ahead.gin)"
            )
        if fnmatch(flag, "algo.advantage.is_correction_*"):
            raise ValueError(
                f"OpenRLHF.flags: {flag} cannot be used with train.generate_ahead: fresh rows are weighed by the "
                "engines' own log-probs already; MixedPolicyLoss.max_fresh_weight truncates the weight"
            )
    # Only for this does OpenRLHF ask vLLM for log-probs at the sampling temperature. MixedLoss makes no correction.
    return {"algo.advantage.is_correction_level": "token"}


def as_arguments(flags: Mapping[str, Any]) -> list[str]:
    """{'a.b': 1, 'a.c': True, 'a.d': (0.9, 0.99)} as --a.b 1 --a.c --a.d 0.9 0.99; False leaves a flag out."""
    arguments: list[str] = []
    for flag, value in flags.items():
        if value is False:
            continue
        arguments.append(f"--{flag}")
        if value is not True:
            arguments += [str(part) for part in (value if isinstance(value, list | tuple) else (value,))]
    return arguments
