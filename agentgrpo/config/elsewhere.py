"""What settings of other trainers are called here, and which are not offered, with the reason.

docs/coming-from.md is made from it (`python -m tests.elsewhere --write`), and the message about an
unknown key. tests/config/test_elsewhere.py walks TRL's GRPOConfig: each of its fields stands here
once, and a default that differs says why.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """Settings of another trainer that have one answer."""

    theirs: str
    """Their names, with spaces between."""
    ours: str = ""
    """The keys here, with spaces between; "loss.*": the same names in [loss]; "": not offered."""
    remark: str = ""
    """What is different, or the reason that it is not offered."""
    default: str = ""
    """Why the default differs, where one of the same meaning does."""

    def keys(self, name: str) -> list[str]:
        """The keys here of one of their names."""
        return [key.replace("*", name) for key in self.ours.split()]


TRL = (
    Row("num_iterations delta sapo_temperature_neg sapo_temperature_pos", "loss.*"),
    Row("vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg", "loss.*"),
    Row("scale_rewards multi_objective_aggregation off_policy_mask_threshold", "loss.*"),
    Row("sync_ref_model ref_model_sync_steps ref_model_mixup_alpha", "loss.*",
        "counted in optimizer updates; refused with LoRA; both as in TRL. A checkpoint holds the "
        "reference, where a resumed TRL begins again from the first model"),
    Row("loss_type", "loss.*",
        "bnpo divides by the tokens of an update, TRL by those of a micro-batch: nothing here "
        "depends on how an update is split. TRL's GMPOTrainer is `loss_type = \"gmpo\"`; it "
        "ignores the entropy bonus, the off-policy mask and the correction for the sampler, which "
        "work here if they are set"),
    Row("epsilon epsilon_high", "loss.*",
        "0.4 for gmpo, as its GMPOConfig; cispo needs `epsilon_high`, where TRL would take 0.2 as "
        "the bound of the ratio"),
    Row("importance_sampling_level", "loss.*",
        "refused where a loss does not read it (gmpo; vespo without a KL term), which TRL passes "
        "over"),
    Row("beta", "loss.*", "log-ratios are clamped to +-20 before exp, as in verl; TRL's are not"),
    Row("use_bias_correction_kl", "loss.*", "false for gmpo, as in TRL"),
    Row("entropy_coef", "loss.*",
        "the mean over the trained tokens of the update, under every `loss_type`; TRL's is the "
        "mean of its micro-batches' means"),
    Row("top_entropy_quantile", "loss.*",
        "the quantile of the whole step before its first update; TRL's is of each micro-batch, and "
        "changes with its size"),
    Row("router_aux_loss_coef", "loss.*",
        "over the tokens that are laid out, a shared prefix once; batches are weighted by their "
        "tokens, where TRL takes the mean of its micro-batches"),
    Row("vllm_importance_sampling_correction", "loss.*", "false for gmpo, as in TRL"),
    Row("vllm_importance_sampling_mode vllm_importance_sampling_clip_max", "loss.*",
        default="`token_truncate` at 2, TRL's `sequence_mask` at 3: the product of a long "
                "rollout's ratios is far from 1 by rounding alone, and most rollouts would be "
                "dropped"),
    Row("vllm_importance_sampling_clip_min", "loss.*"),
    Row("mask_truncated_completions", "rollout.treatment",
        '`{ truncated_length = "mask" }`: by how a rollout ended. A masked rollout still counts '
        "where a loss divides by the number of rollouts, as in TRL",
        default="`{}`, TRL's false: trained on in both"),
    Row("steps_per_generation", "loss.num_mini_batches",
        "updates of a step: TRL's, divided by `gradient_accumulation_steps`"),
    Row("per_device_train_batch_size gradient_accumulation_steps", "learner.max_tokens",
        "packed tokens of one forward and backward pass; the step is what was sampled"),
    Row("num_generations", "rollout.group_size"),
    Row("generation_batch_size", "rollout.tasks_per_step", "groups of one step, and not rollouts",
        default="12, TRL's 8 rollouts: one group"),
    Row("max_completion_length", "rollout.max_response_tokens",
        "what tools answer included, in both; `rollout.max_turn_tokens` bounds each turn as well. "
        "dr_grpo divides by `rollout.max_turns` times `rollout.max_turn_tokens`, TRL's by this",
        default="none, up to engine.max_model_len; TRL's 512"),
    Row("max_tool_calling_iterations", "rollout.max_turns",
        "TRL's N are N + 1 turns here: the answer after the last call is a turn too",
        default="3, TRL's None: no limit"),
    Row("temperature", "rollout.temperature"),
    Row("top_p top_k repetition_penalty", "evaluation.*",
        "for evaluation alone: what is sampled otherwise than the learner computes it is trained "
        "on wrongly"),
    Row("min_p", "evaluation.*", "the same", default="0, TRL's None: off in both"),
    Row("chat_template_kwargs", "rollout.template_options",
        default="`{}`, TRL's None: nothing in both"),
    Row("vllm_gpu_memory_utilization", "engine.kv_cache_gib", "in GiB, for the cache alone",
        default="0.5, TRL's 0.3 of the card for weights and cache"),
    Row("vllm_max_model_length", "engine.max_model_len",
        default="1024, TRL's None: what the model's config.json says"),
    Row("vllm_tensor_parallel_size", "engine.tensor_parallel_size"),
    Row("reward_weights", "reward.functions", '`{ "module:function" = weight }`',
        default="each 1, in both"),
    Row("learning_rate weight_decay max_grad_norm", "learner.*"),
    Row("warmup_steps", "learner.*", "the first step has 1 / `warmup_steps` of the rate, TRL's 0"),
    Row("lr_scheduler_type", "learner.decay",
        default="constant, TRL's linear: how long a run will be is seldom known"),
    Row("optim", "learner.optimizer", "`adamw` or `adamw_8bit`",
        default="`adamw`, fused on CUDA as TRL's `adamw_torch_fused`"),
    Row("gradient_checkpointing", "learner.gradient_checkpointing",
        default="`auto`, TRL's true: only where the card has no room"),
    Row("bf16 fp16", "engine.dtype", "of the sampler and the learner, by default bfloat16 on CUDA; "
        "float16 is not offered"),
    Row("max_steps", "steps", default="200, TRL's -1: 3 epochs"),
    Row("seed", "seed", default="0, TRL's 42"),
    Row("data_seed", "seed", "one for all", default="0, TRL's None: its seed"),
    Row("full_determinism", "rollout.deterministic"),
    Row("output_dir", "out_dir"),
    Row("save_steps", "save_every", "the last step always, in both",
        default="50, TRL's 500"),
    Row("save_strategy", "", "by steps"),
    Row("save_total_limit", "keep_checkpoints", "older ones are removed",
        default="2, TRL's None keeps all"),
    Row("eval_steps", "eval_every", "the first and the last step always",
        default="25, TRL's None evaluates never"),
    Row("eval_strategy eval_on_start eval_delay", "",
        "the first step, the last, and every `eval_every`"),
    Row("report_to", "trackers", '`["wandb"]`; tensorboard, trackio, wandb'),
    Row("use_vllm vllm_mode vllm_enable_sleep_mode vllm_model_impl", "",
        "the engine is vLLM in this process, and sleeps while the learner works"),
    Row("vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout "
        "vllm_group_port", "", "there is no server"),
    Row("use_transformers_continuous_batching transformers_continuous_batching_config "
        "use_transformers_paged cache_implementation ds3_gather_for_generation", "",
        "transformers does not generate here"),
    Row("vllm_structured_outputs_regex generation_kwargs", "",
        "what is sampled otherwise than the learner computes it is trained on wrongly"),
    Row("vllm_importance_sampling_cap", "loss.vllm_importance_sampling_clip_max", "as in TRL",
        default="2, TRL's None: its clip_max"),
    Row("use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
        "", "`loss.entropy_coef` is constant"),
    Row("resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint", "",
        "the same command continues, with the same numbers under `rollout.deterministic`"),
    Row("num_train_epochs", "", "`steps`: a task is drawn again when all were"),
    Row("shuffle_dataset train_sampling_strategy length_column_name", "",
        "tasks are shuffled again each time round, by `seed`"),
    Row("remove_unused_columns label_names", "", "a task keeps its whole row"),
    Row("num_generations_eval per_device_eval_batch_size", "", "one rollout of each held-out task"),
    Row("log_completions num_completions_to_print log_unique_prompts log_multimodal "
        "log_completions_hub_repo", "", "every rollout is recorded: `agentgrpo view RUN`"),
    Row("logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter "
        "include_num_input_tokens_seen log_level log_level_replica disable_tqdm "
        "skip_memory_metrics debug", "", "every step is a line of metrics.jsonl"),
    Row("run_name project trackio_space_id trackio_bucket_id trackio_static_space_id", "",
        "the trackers' own environment variables say these"),
    Row("pad_to_multiple_of use_cache", "", "nothing is padded, and learning keeps no cache"),
    Row("gradient_checkpointing_kwargs", "", "layers are checkpointed without reentrance"),
    Row("disable_dropout neftune_noise_alpha label_smoothing_factor", "",
        "the trained policy is the sampled one: no noise"),
    Row("cast_lm_head_to_fp32", "learner.*",
        "the product of the 16-bit numbers, not rounded: no float32 copy of the head is made"),
    Row("use_liger_kernel", "learner.*",
        "the layers' norms, rotations and MLPs; the losses are ours",
        default='"auto": on CUDA, where the compared version of liger-kernel is installed'),
    Row("liger_kernel_config torch_compile torch_compile_backend torch_compile_mode tf32", "",
        "the kernels are chosen by the device, and run.json names them"),
    Row("model_init_kwargs trust_remote_code", "",
        "`model` and `engine.dtype` say what is loaded; code of a checkpoint is not run"),
    Row("adam_beta1 adam_beta2 adam_epsilon optim_args optim_target_modules lr_scheduler_kwargs",
        "", "torch's defaults, which are TRL's"),
    Row("average_tokens_across_devices", "", "always: the ranks are one step"),
    Row("auto_find_batch_size torch_empty_cache_steps", "",
        "the preflight says before the first step what fits"),
    Row("bf16_full_eval fp16_full_eval prediction_loss_only eval_do_concat_batches "
        "eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics "
        "load_best_model_at_end metric_for_best_model greater_is_better", "",
        "held-out tasks are played and scored as training tasks are"),
    Row("save_only_model save_on_each_node enable_jit_checkpoint", "",
        "a checkpoint is whole, and a run can go on from it"),
    Row("push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push "
        "hub_revision", "", "`agentgrpo push RUN OWNER/NAME`, when you want it"),
    Row("use_cpu local_rank ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers "
        "ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed accelerator_config "
        "parallelism_config", "", "torchrun alone says how many; weights are sharded by FSDP2"),
    Row("dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order", "", "tasks are text"),
    Row("do_train do_eval do_predict", "", "commands: `agentgrpo train CONFIG`"),
    # arguments of GRPOTrainer
    Row("reward_funcs", "reward.functions",
        '`["module:function"]`, unchanged: [agents.md](agents.md)'),
    Row("environment_factory", "env.kind", '`"factory"`: [agents.md](agents.md)'),
    Row("rollout_func", "rollout.sampler", '`"rollout_func:module:function"`'),
    Row("train_dataset", "data.train data.question data.answer",
        "`agentgrpo init MODEL DATA` writes these: .jsonl, .parquet, a saved dataset, or a hub's "
        "owner/name"),
    Row("eval_dataset", "data.heldout"),
    Row("peft_config", "learner.lora.rank learner.lora.alpha learner.lora.target_modules"),
)  # fmt: skip
"""Of TRL 1.16: all of GRPOConfig, what it inherits from transformers too, and what GRPOTrainer is
given beside it."""

ROLLOUT, ACTOR, REF, MODEL = (
    f"actor_rollout_ref.{section}" for section in ("rollout", "actor", "ref", "model")
)
VERL = (
    Row("data.train_files", "data.train"),
    Row("data.val_files", "data.heldout"),
    Row("data.prompt_key", "data.question"),
    Row(f"data.max_prompt_length {ROLLOUT}.prompt_length", "data.max_prompt_tokens"),
    Row("data.filter_overlong_prompts", "data.max_prompt_tokens",
        "left out and counted if it is set; longer ones are an error if not"),
    Row("data.truncation", "", "no prompt is cut: `data.max_prompt_tokens` leaves it out"),
    Row(f"data.max_response_length {ROLLOUT}.response_length", "rollout.max_response_tokens",
        "what tools answer included, in both; `rollout.max_turn_tokens` bounds each turn as well"),
    Row("data.train_batch_size", "rollout.tasks_per_step"),
    Row("data.val_batch_size", "", "held-out tasks are played as the engine has room"),
    Row("data.seed", "seed"),
    Row("data.shuffle", "", "tasks are shuffled again each time round, by `seed`"),
    Row("data.reward_fn_key", "", "a task keeps its whole row, which a reward reads"),
    Row("data.apply_chat_template_kwargs", "rollout.template_options"),
    Row(f"{MODEL}.path", "model"),
    Row(f"{MODEL}.enable_gradient_checkpointing", "learner.gradient_checkpointing"),
    Row(f"{MODEL}.lora_rank", "learner.lora.rank"),
    Row(f"{MODEL}.lora_alpha", "learner.lora.alpha"),
    Row(f"{MODEL}.target_modules", "learner.lora.target_modules"),
    Row(f"{MODEL}.use_liger", "learner.use_liger_kernel"),
    Row(f"{MODEL}.use_remove_padding", "", "nothing is padded"),
    Row(f"{MODEL}.trust_remote_code", "", "code of a checkpoint is not run"),
    Row(f"{MODEL}.use_fused_kernels {ACTOR}.use_torch_compile", "",
        "the kernels are chosen by the device, and run.json names them"),
    Row(f"{ROLLOUT}.n", "rollout.group_size"),
    Row(f"{ROLLOUT}.multi_turn.max_assistant_turns", "rollout.max_turns"),
    Row(f"{ROLLOUT}.multi_turn.enable", "", "always; `rollout.max_turns = 1` is a single turn"),
    Row(f"{ROLLOUT}.multi_turn.tool_config_path", "env.kind",
        '`"tools"`, `"mcp"`, or a class of your own: [agents.md](agents.md)'),
    Row(f"{ROLLOUT}.multi_turn.max_tool_response_length",
        "rollout.max_observation_tokens", "tokens, not characters"),
    Row(f"{ROLLOUT}.multi_turn.tool_response_truncate_side", "rollout.keep_observation",
        "`left` is head, `right` tail, `middle` ends"),
    Row(f"{ROLLOUT}.temperature", "rollout.temperature"),
    Row(f"{ROLLOUT}.top_p {ROLLOUT}.top_k", "",
        "what is sampled otherwise than the learner computes it is trained on wrongly"),
    Row(f"{ROLLOUT}.val_kwargs.temperature", "evaluation.temperature"),
    Row(f"{ROLLOUT}.val_kwargs.do_sample", "evaluation.temperature", "0 is greedy"),
    Row(f"{ROLLOUT}.val_kwargs.top_p", "evaluation.top_p"),
    Row(f"{ROLLOUT}.val_kwargs.top_k", "evaluation.top_k"),
    Row(f"{ROLLOUT}.val_kwargs.n", "", "one rollout of each held-out task"),
    Row(f"{ROLLOUT}.gpu_memory_utilization", "engine.kv_cache_gib", "in GiB, for the cache alone"),
    Row(f"{ROLLOUT}.tensor_model_parallel_size", "engine.tensor_parallel_size"),
    Row(f"{ROLLOUT}.max_model_len", "engine.max_model_len"),
    Row(f"{ROLLOUT}.max_num_seqs", "engine.max_num_seqs"),
    Row(f"{ROLLOUT}.enforce_eager", "engine.enforce_eager"),
    Row(f"{ROLLOUT}.dtype", "engine.dtype", "of the sampler and the learner"),
    Row(f"{ROLLOUT}.name {ROLLOUT}.mode {ROLLOUT}.load_format {ROLLOUT}.free_cache_engine", "",
        "the engine is vLLM in this process, and sleeps while the learner works"),
    Row(f"{ACTOR}.ppo_mini_batch_size", "loss.num_mini_batches",
        "how many there are: `data.train_batch_size` / `ppo_mini_batch_size`"),
    Row(f"{ACTOR}.ppo_max_token_len_per_gpu", "learner.max_tokens"),
    Row(f"{ACTOR}.ppo_micro_batch_size {ACTOR}.ppo_micro_batch_size_per_gpu "
        f"{ACTOR}.use_dynamic_bsz {ROLLOUT}.log_prob_micro_batch_size_per_gpu "
        f"{REF}.log_prob_micro_batch_size_per_gpu", "learner.max_tokens",
        "packed tokens of one forward and backward pass"),
    Row(f"{ACTOR}.optim.lr", "learner.learning_rate"),
    Row(f"{ACTOR}.optim.weight_decay", "learner.weight_decay", "default 0, verl's 0.01"),
    Row(f"{ACTOR}.optim.lr_warmup_steps {ACTOR}.optim.lr_warmup_steps_ratio",
        "learner.warmup_steps", "steps, not a share of them"),
    Row(f"{ACTOR}.optim.lr_scheduler_type {ACTOR}.optim.warmup_style", "learner.decay"),
    Row(f"{ACTOR}.grad_clip", "learner.max_grad_norm"),
    Row(f"{ACTOR}.fsdp_config.optimizer_offload", "learner.offload_optimizer"),
    Row(f"{ACTOR}.fsdp_config.param_offload {REF}.fsdp_config.param_offload", "",
        "weights stay on the card; those of the policy are shared with vLLM or sharded"),
    Row(f"{ACTOR}.strategy {ACTOR}.ulysses_sequence_parallel_size", "",
        "weights are sharded by FSDP2, tokens of a rollout are not"),
    Row(f"{ACTOR}.ppo_epochs", "loss.num_iterations"),
    Row(f"{ACTOR}.loss_agg_mode", "loss.normaliser",
        "`token-mean` is token_mean, `seq-mean-token-mean` sequence_mean, `seq-mean-token-sum` "
        "sequence_sum"),
    Row(f"{ACTOR}.policy_loss.loss_mode", "loss.loss_type",
        "the names are those of [losses.md](losses.md); `vanilla` is any that clips, with "
        "`loss.normaliser`"),
    Row(f"{ACTOR}.use_kl_loss", "loss.beta", "0 is off, the default in both"),
    Row(f"{ACTOR}.kl_loss_coef", "loss.beta"),
    Row(f"{ACTOR}.kl_loss_type", "loss.kl_estimator", "kl is k1, mse k2, low_var_kl k3"),
    Row(f"{ACTOR}.clip_ratio {ACTOR}.clip_ratio_low", "loss.epsilon"),
    Row(f"{ACTOR}.clip_ratio_high", "loss.epsilon_high"),
    Row(f"{ACTOR}.clip_ratio_c", "loss.clip_ratio_c", "default none, verl's 3.0"),
    Row(f"{ACTOR}.entropy_coeff", "loss.entropy_coef",
        "the mean over the update's tokens, whatever `loss.normaliser` is"),
    Row("algorithm.adv_estimator", "loss.baseline",
        "`grpo` is mean, `rloo` leave_one_out; those with a value model are not offered"),
    Row("algorithm.norm_adv_by_std_in_grpo", "loss.scale_rewards"),
    Row("algorithm.use_kl_in_reward algorithm.kl_penalty algorithm.kl_ctrl", "",
        "the KL is a term of the loss: `loss.beta`"),
    Row("algorithm.gamma algorithm.lam trainer.critic_warmup critic", "", "no value model here"),
    Row("algorithm.filter_groups.enable", "rollout.refill_below",
        "groups without a gradient are always left out; more are played below so many"),
    Row("algorithm.filter_groups.max_num_gen_batches", "rollout.max_refills",
        "those after the first; 0 is none"),
    Row("custom_reward_function.path custom_reward_function.name "
        "reward.custom_reward_function.path reward.custom_reward_function.name", "reward.kind",
        '`"module:function"`'),
    Row("reward_model", "", "a reward is a function, which may ask a server of yours"),
    Row("trainer.total_training_steps", "steps"),
    Row("trainer.total_epochs", "", "`steps`: a task is drawn again when all were"),
    Row("trainer.save_freq", "save_every"),
    Row("trainer.max_actor_ckpt_to_keep", "keep_checkpoints", "default 2, verl's null keeps all"),
    Row("trainer.test_freq", "eval_every"),
    Row("trainer.val_before_train", "", "before the first step and after the last, always"),
    Row("trainer.default_local_dir", "out_dir"),
    Row("trainer.resume_mode trainer.resume_from_path", "", "the same command continues"),
    Row("trainer.logger", "trackers"),
    Row("trainer.project_name trainer.experiment_name", "",
        "the trackers' own environment variables say these"),
    Row("trainer.log_val_generations trainer.rollout_data_dir trainer.validation_data_dir", "",
        "every rollout is recorded: `agentgrpo view RUN`"),
    Row("trainer.n_gpus_per_node trainer.nnodes trainer.balance_batch", "",
        "torchrun says how many; batches are packed by tokens"),
    Row("ray_init ray_kwargs", "", "one process: no placement groups, no worker classes"),
)  # fmt: skip
"""Of verl 0.9: what its GRPO scripts set. A section's name stands for all keys in it."""

TABLES = {"TRL": TRL, "verl": VERL}


def said_elsewhere(name: str) -> str:
    """What a setting of another trainer is here, for an error's message; "": nobody has it.

    Args:
        name: in full, with its sections; one that lies in a section of a table is that section's.
    """
    named = name
    while named:
        for library, rows in TABLES.items():
            for row in rows:
                if named in row.theirs.split():
                    here = " and ".join(row.keys(named)) or f"not offered: {row.remark}"
                    return f"; {library}'s {named} is {here}"
        named = named.rpartition(".")[0]
    return ""
