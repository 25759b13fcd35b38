"""Settings of TRL, verl and OpenRLHF by their names there, and how they are bound here (docs/from_other_tools.md)."""

from __future__ import annotations

import re

# Here: the names there. What stands behind the setting's own name is said with it.
_NAMES = {
    "PretrainedModel.path": "model_name_or_path model_name model pretrain actor.model_name_or_path model.path",
    "QuestionFile.path (QuestionHub.id for a set of the hub)": "dataset_name dataset prompt_data train_files "
    "data.train_files data.prompt_dataset",
    "QuestionFile.prompt": "input_key prompt_key data.input_key data.prompt_key",
    "QuestionFile.answer": "label_key data.label_key",
    "QuestionFile.held_out (or Work.validation)": "eval_dataset val_files dataset_test_split eval.dataset "
    "data.val_files",
    "Prompts.template": "apply_chat_template input_template data.apply_chat_template data.input_template",
    "Prompts.system": "system_prompt",
    "Prompts.max_tokens": "max_prompt_length prompt_max_len data.max_len data.max_prompt_length",
    "MAX_RESPONSE_TOKENS": "max_tokens max_new_tokens max_completion_length max_response_length generate_max_len "
    "response_length rollout.max_new_tokens data.max_response_length",
    "Sampling.temperature": "temperature rollout.temperature",
    "Sampling.temperature alone (importance weights need the unfiltered policy)": "top_p top_k min_p rollout.top_p "
    "rollout.top_k",
    "Verifier.function (or Verifier.kind)": "reward_funcs reward_fn reward_function remote_rm_url reward.remote_url "
    "reward.custom_reward_function.path custom_reward_function.path",
    "Verifier.rewards": "reward_weights multi_objective_aggregation",
    "Verifier.overlong_share": "get_soft_overlong_punishment overlong_buffer_len reward.overlong_buffer_len "
    "reward.reward_kwargs.overlong_buffer_cfg",
    "Environment.path": "tools agent_func_path train.agent_func_path rollout.multi_turn",
    "Optimizer.learning_rate": "lr learning_rate actor_learning_rate actor.adam.lr actor.optim.lr optim.lr",
    "Optimizer.schedule": "lr_scheduler lr_scheduler_type actor.lr_scheduler actor.optim.lr_scheduler_type",
    "Optimizer.warmup_steps": "warmup_steps warmup_ratio lr_warmup_ratio lr_warmup_steps actor.lr_warmup_ratio "
    "actor.optim.lr_warmup_steps",
    "Optimizer.betas": "adam_beta1 adam_beta2 adam_betas actor.adam.betas actor.optim.betas",
    "Optimizer.weight_decay": "weight_decay actor.adam.weight_decay actor.optim.weight_decay",
    "Optimizer.max_grad_norm": "max_grad_norm grad_clip max_norm actor.max_norm actor.optim.clip_grad",
    "train.group_size": "num_generations n_samples_per_prompt rollout.n rollout.n_samples_per_prompt",
    "train.questions_per_step (questions, not rows; Optimizer.steps_per_batch divides them)": ""
    "generation_batch_size rollout_batch_size train_batch_size "
    "per_device_train_batch_size batch_size rollout.batch_size data.train_batch_size",
    "Optimizer.steps_per_batch": "steps_per_generation gradient_accumulation_steps ppo_mini_batch_size "
    "actor.ppo_mini_batch_size",
    "Optimizer.passes_per_batch": "num_iterations max_epochs ppo_epochs train.max_epochs actor.ppo_epochs",
    "train.steps (batches)": "max_steps num_train_epochs num_episodes total_training_steps total_epochs "
    "train.num_episodes trainer.total_training_steps trainer.total_epochs",
    "LocalEngine.micro_batch_tokens (or OpenRLHF.more_flags)": "max_tokens_per_gpu ppo_max_token_len_per_gpu "
    "train.max_tokens_per_gpu actor.ppo_max_token_len_per_gpu",
    "LocalEngine.sampler_memory (or OpenRLHF.more_flags)": "gpu_memory_utilization vllm_gpu_memory_utilization "
    "vllm.gpu_memory_utilization vllm.tensor_parallel_size rollout.gpu_memory_utilization",
    "LocalEngine.sampler": "use_vllm vllm_mode",
    "LocalEngine.dtype": "bf16 fp16 torch_dtype",
    "GroupAdvantages.scale_by_std": "scale_rewards norm_adv_by_std_in_grpo algorithm.norm_adv_by_std_in_grpo",
    "GroupAdvantages.baseline": "advantage_estimator adv_estimator algo.advantage.estimator algorithm.adv_estimator",
    "MixedPolicyLoss.clip_low": "epsilon eps_clip clip_ratio cliprange clip_ratio_low actor.clip_ratio "
    "actor.clip_ratio_low actor.eps_clip_low_high",
    "MixedPolicyLoss.clip_high": "epsilon_high clip_ratio_high actor.clip_ratio_high",
    "MixedPolicyLoss.dual_clip": "delta clip_ratio_c actor.clip_ratio_c actor.dual_clip",
    "MixedPolicyLoss.normalizer": "loss_type loss_agg_mode actor.loss_agg_mode",
    "MixedPolicyLoss.ratio": "importance_sampling_level policy_loss_type actor.policy_loss_type "
    "actor.policy_loss.loss_mode",
    "MixedPolicyLoss.kl_coef (of the KL term in the loss; MixedPolicyLoss.beta is the shaping's)": "beta",
    "MixedPolicyLoss.kl_coef (in the loss; there is none in the reward)": "kl_coef init_kl_coef kl_loss_coef "
    "use_kl_loss algo.kl.use_loss algo.kl.init_coef actor.use_kl_loss actor.kl_loss_coef algorithm.kl_ctrl.kl_coef",
    "MixedPolicyLoss.entropy_coef": "entropy_coef entropy_coeff actor.entropy_coef actor.entropy_coeff",
    "DynamicSampling.max_rounds": "dynamic_filtering_enable dynamic_filtering algo.dynamic_filtering_enable "
    "algorithm.filter_groups.enable",
    "OpenRLHF.more_flags": "is_correction_level vllm_importance_sampling_correction "
    "algo.advantage.is_correction_level algorithm.rollout_correction.rollout_is",
    "LoRA.rank": "lora_r lora_rank peft_config use_peft model.lora_rank ds.lora.rank",
    "LoRA.alpha": "lora_alpha model.lora_alpha ds.lora.alpha",
    "--gin gin/engines/openrlhf_8gpu.gin (a layout)": "n_gpus_per_node nnodes actor.num_nodes "
    "actor.num_gpus_per_node trainer.nnodes trainer.n_gpus_per_node train.colocate_all vllm.enable_sleep",
    "--out": "output_dir default_local_dir ckpt.output_dir trainer.default_local_dir save_path",
    "train.save_every": "save_steps save_freq ckpt.save_steps trainer.save_freq",
    "train.keep": "save_total_limit max_ckpt_num ckpt.max_num",
    "--resume": "resume_from_checkpoint resume_mode ckpt.load_enable trainer.resume_mode load_checkpoint",
    "train.eval_every": "eval_steps test_freq eval.steps trainer.test_freq",
    "Evaluation.samples": "num_generations_eval rollout.val_kwargs.n eval.n_samples_per_prompt",
    "Evaluation.temperature": "eval.temperature rollout.val_kwargs.temperature",
    "train.seed": "data.seed rollout.seed",
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
