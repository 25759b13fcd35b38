"""Settings of TRL, verl and OpenRLHF by their names there, and how they are bound here (docs/from_other_tools.md)."""

from __future__ import annotations

import re

from ..checks import ConfigError

# Here: the names there. What stands behind the setting's own name is said with it.
_NAMES = {
    "PretrainedModel.path": "model_name_or_path model_name model pretrain model.path",
    "QuestionFile.path (QuestionHub.id for a set of the hub)": ""
    "dataset_name dataset prompt_data train_files data.prompt_dataset",
    "QuestionFile.prompt": "input_key prompt_key",
    "QuestionFile.answer": "label_key",
    "QuestionFile.held_out (or Work.validation)": "eval_dataset val_files dataset_test_split eval.dataset",
    "Prompts.template": "apply_chat_template input_template",
    "Prompts.system": "system_prompt",
    "Prompts.max_tokens": "max_prompt_length prompt_max_len data.max_len",
    "MAX_RESPONSE_TOKENS": ""
    "max_tokens max_new_tokens max_completion_length max_response_length generate_max_len response_length",
    "Sampling.temperature": "temperature",
    "Sampling.temperature alone (importance weights need the unfiltered policy)": "top_p top_k min_p",
    "Verifier.function (or Verifier.kind)": ""
    "reward_funcs reward_fn reward_function remote_rm_url reward.remote_url reward.custom_reward_function.path "
    "custom_reward_function.path",
    "Verifier.rewards": "reward_weights multi_objective_aggregation",
    "Verifier.overlong_share": ""
    "get_soft_overlong_punishment overlong_buffer_len reward.reward_kwargs.overlong_buffer_cfg",
    "Environment.path": "tools agent_func_path rollout.multi_turn",
    "Optimizer.learning_rate": "lr learning_rate actor_learning_rate",
    "Optimizer.schedule": "lr_scheduler lr_scheduler_type",
    "Optimizer.warmup_steps": "warmup_steps warmup_ratio lr_warmup_ratio lr_warmup_steps",
    "Optimizer.betas": "adam_beta1 adam_beta2 adam_betas actor.adam.betas actor.optim.betas",
    "Optimizer.weight_decay": "weight_decay",
    "Optimizer.max_grad_norm": "max_grad_norm grad_clip max_norm actor.optim.clip_grad",
    "train.group_size": "num_generations n_samples_per_prompt rollout.n",
    "train.questions_per_step (questions, not rows; Optimizer.steps_per_batch divides them)": ""
    "generation_batch_size rollout_batch_size train_batch_size per_device_train_batch_size batch_size",
    "Optimizer.steps_per_batch (of its rows; train.questions_per_step are a batch's questions)": "train.batch_size",
    "Optimizer.steps_per_batch": "steps_per_generation gradient_accumulation_steps ppo_mini_batch_size",
    "Optimizer.passes_per_batch": "num_iterations max_epochs ppo_epochs",
    "train.steps (batches)": "max_steps num_train_epochs num_episodes total_training_steps total_epochs",
    "LocalEngine.micro_batch_tokens (or OpenRLHF.more_flags)": "max_tokens_per_gpu ppo_max_token_len_per_gpu",
    "LocalEngine.sampler_memory (or OpenRLHF.more_flags)": ""
    "gpu_memory_utilization vllm_gpu_memory_utilization vllm.tensor_parallel_size",
    "LocalEngine.sampler": "use_vllm vllm_mode",
    "LocalEngine.dtype": "bf16 fp16 torch_dtype",
    "GroupAdvantages.scale_by_std": "scale_rewards norm_adv_by_std_in_grpo",
    "GroupAdvantages.baseline": "advantage_estimator adv_estimator algo.advantage.estimator",
    "MixedPolicyLoss.clip_low": "epsilon eps_clip clip_ratio cliprange clip_ratio_low actor.eps_clip_low_high",
    "MixedPolicyLoss.clip_high": "epsilon_high clip_ratio_high",
    "MixedPolicyLoss.dual_clip": "delta clip_ratio_c actor.dual_clip",
    "MixedPolicyLoss.normalizer": "loss_type loss_agg_mode",
    "MixedPolicyLoss.ratio": "importance_sampling_level policy_loss_type actor.policy_loss.loss_mode",
    "MixedPolicyLoss.kl_coef (of the KL term in the loss; MixedPolicyLoss.beta is the shaping's)": "beta",
    "MixedPolicyLoss.kl_coef (in the loss; there is none in the reward)": ""
    "kl_coef init_kl_coef kl_loss_coef use_kl_loss algo.kl.use_loss algo.kl.init_coef",
    "MixedPolicyLoss.entropy_coef": "entropy_coef entropy_coeff",
    "DynamicSampling.max_rounds": "dynamic_filtering_enable dynamic_filtering algorithm.filter_groups.enable",
    "OpenRLHF.more_flags": ""
    "is_correction_level vllm_importance_sampling_correction algorithm.rollout_correction.rollout_is",
    "LoRA.rank": "lora_r lora_rank peft_config use_peft ds.lora.rank",
    "LoRA.alpha": "lora_alpha ds.lora.alpha",
    "--gin gin/engines/openrlhf_8gpu.gin (a layout)": ""
    "n_gpus_per_node nnodes actor.num_nodes actor.num_gpus_per_node train.colocate_all vllm.enable_sleep",
    "--out": "output_dir default_local_dir save_path",
    "train.save_every": "save_steps save_freq",
    "train.keep": "save_total_limit max_ckpt_num ckpt.max_num",
    "--resume": "resume_from_checkpoint resume_mode ckpt.load_enable load_checkpoint",
    "train.show_every": "log_completions logging_steps num_completions_to_print log_val_generations",
    "train.eval_every": "eval_steps test_freq eval.steps",
    "Evaluation.samples": "num_generations_eval rollout.val_kwargs.n eval.n_samples_per_prompt",
    "Evaluation.temperature": "eval.temperature rollout.val_kwargs.temperature",
    "train.seed": "train.seed data.seed rollout.seed",
    "Tracking.also": "report_to use_wandb trainer.logger logger.wandb.key logger.tensorboard_dir",
}
_HERE = {name: here for here, names in _NAMES.items() for name in names.split()}


def here(name: str) -> str | None:
    """What a setting of another tool is called here, with a remark; None of a name that none of them has.

    name: as it is there, with dashes or dots before it or without: --actor.adam.lr, actor_rollout_ref.rollout.n,
        GRPOConfig.beta
    """
    name = re.sub(r"^-+|^actor_rollout_ref\.", "", name).replace("-", "_")
    return _HERE.get(name) or _HERE.get(name.rpartition(".")[2])


def refuse(name: str, where: str) -> None:
    """Raises ConfigError for a name of another tool, with what it is called here. where: it is bound"""
    if own := here(name):
        raise ConfigError(f"{where}: there is no setting {name}; here it is {own}")
