"""What settings of TRL and verl are called here, where the name is another: for error messages.

docs/coming-from.md has more: what is different, and what is not offered.
"""

from __future__ import annotations

NAMES = {
    "rollout.treatment": "mask_truncated_completions",
    "loss.num_mini_batches": "steps_per_generation actor.ppo_mini_batch_size",
    "learner.max_tokens": (
        "per_device_train_batch_size gradient_accumulation_steps actor.ppo_micro_batch_size "
        "actor.ppo_max_token_len_per_gpu actor.ppo_micro_batch_size_per_gpu "
    ),
    "rollout.group_size": "num_generations rollout.n",
    "rollout.tasks_per_step": "generation_batch_size data.train_batch_size",
    "rollout.temperature": "temperature",
    "rollout.max_response_tokens": (
        "max_completion_length data.max_response_length rollout.response_length"
    ),
    "rollout.max_turns": "max_tool_calling_iterations rollout.multi_turn.max_assistant_turns",
    "rollout.template_options": "chat_template_kwargs data.apply_chat_template_kwargs",
    "engine.kv_cache_gib": "vllm_gpu_memory_utilization rollout.gpu_memory_utilization",
    "engine.max_model_len": "vllm_max_model_length rollout.max_model_len",
    "engine.tensor_parallel_size": ("vllm_tensor_parallel_size rollout.tensor_model_parallel_size"),
    "reward.functions": "reward_funcs reward_weights",
    "learner.decay": "lr_scheduler_type actor.optim.lr_scheduler_type actor.optim.warmup_style",
    "learner.gradient_checkpointing": "model.enable_gradient_checkpointing",
    "engine.dtype": "bf16 fp16 rollout.dtype",
    "steps": "max_steps trainer.total_training_steps",
    "seed": "data_seed data.seed",
    "rollout.deterministic": "full_determinism",
    "out_dir": "output_dir trainer.default_local_dir",
    "save_every": "save_steps trainer.save_freq",
    "keep_checkpoints": "save_total_limit trainer.max_actor_ckpt_to_keep",
    "eval_every": "eval_steps trainer.test_freq",
    "trackers": "report_to trainer.logger",
    "loss.vllm_importance_sampling_clip_max": "vllm_importance_sampling_cap",
    "env.kind": "environment_factory rollout.multi_turn.tool_config_path",
    "rollout.sampler": "rollout_func",
    "data.train": "train_dataset data.train_files",
    "data.heldout": "eval_dataset data.val_files",
    "data.question": "data.prompt_key",
    "data.max_prompt_tokens": "data.max_prompt_length data.filter_overlong_prompts",
    "model": "model.path",
    "learner.lora.rank": "peft_config model.lora_rank",
    "learner.lora.alpha": "model.lora_alpha",
    "learner.lora.target_modules": "model.target_modules",
    "learner.use_liger_kernel": "model.use_liger",
    "rollout.max_observation_tokens": "rollout.multi_turn.max_tool_response_length",
    "evaluation.temperature": "rollout.val_kwargs.temperature rollout.val_kwargs.do_sample",
    "learner.learning_rate": "actor.optim.lr",
    "learner.warmup_steps": "actor.optim.lr_warmup_steps",
    "learner.max_grad_norm": "actor.grad_clip",
    "learner.offload_optimizer": "actor.fsdp_config.optimizer_offload",
    "loss.num_iterations": "actor.ppo_epochs",
    "loss.normaliser": "actor.loss_agg_mode",
    "loss.loss_type": "actor.policy_loss.loss_mode",
    "loss.beta": "actor.use_kl_loss actor.kl_loss_coef",
    "loss.kl_estimator": "actor.kl_loss_type",
    "loss.epsilon": "actor.clip_ratio actor.clip_ratio_low",
    "loss.epsilon_high": "actor.clip_ratio_high",
    "loss.entropy_coef": "actor.entropy_coeff",
    "loss.baseline": "algorithm.adv_estimator",
    "loss.scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "rollout.refill_below": "algorithm.filter_groups.enable",
    "rollout.max_refills": "algorithm.filter_groups.max_num_gen_batches",
    "reward.kind": "custom_reward_function.path custom_reward_function.name",
}
"""Ours: theirs, with spaces between; verl's without `actor_rollout_ref.` before them."""
OURS = {name: ours for ours, names in NAMES.items() for name in names.split()}


def known_elsewhere(name: str) -> str | None:
    """What another trainer's setting is called here, in whatever section it is looked for."""
    name = name.removeprefix("actor_rollout_ref.")
    return OURS.get(name) or OURS.get(name.rpartition(".")[2])
