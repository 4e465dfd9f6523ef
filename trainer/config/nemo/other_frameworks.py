"""Names of keys in other frameworks: suggested in error messages, never accepted.

Sources: Hugging Face (config.json, TrainingArguments), Megatron-LM's arguments, litgpt, torchtitan, nanoGPT, Axolotl
and NeMo 2; in lower case with underscores, with their block if the name alone is ambiguous. Names that are keys here
are not listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any


def _aliases(target: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), target)


FOREIGN_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **_aliases("model.num_layers", "n_layer n_layers num_hidden_layers depth layers n_blocks num_blocks"),
        **_aliases(
            "model.hidden_size", "n_embd n_embed embed_dim d_model dim model_dim emb_dim hidden_dim embedding_size"
        ),
        **_aliases(
            "model.ffn_hidden_size",
            "intermediate_size n_inner d_ff ffn_dim "
            "mlp_dim ffn_dim_multiplier ffn_size mlp_hidden_size feed_forward_dim",
        ),
        **_aliases("model.num_attention_heads", "n_head n_heads num_heads attention_heads"),
        **_aliases(
            "model.num_query_groups", "n_kv_heads num_key_value_heads num_kv_heads n_query_groups kv_heads n_kv_head"
        ),
        **_aliases("model.kv_channels", "head_dim head_size d_kv d_head dim_head"),
        **_aliases(
            "model.encoder_seq_length",
            "block_size seq_len max_seq_length max_seq_len context_length "
            "sequence_len n_ctx n_positions cutoff_len "
            "ctx_len sequence_length max_length",
        ),
        **_aliases("model.max_position_embeddings", "max_positions max_sequence_length"),
        **_aliases(
            "model.micro_batch_size",
            "per_device_train_batch_size local_batch_size device_batch_size train_micro_batch_size_per_gpu mbs "
            "per_device_batch_size",
        ),
        **_aliases(
            "model.global_batch_size",
            "batch_size train_batch_size total_batch_size "
            "gbs gradient_accumulation_steps gradient_accumulation_iters "
            "grad_accum_steps accumulate_grad_batch",
        ),
        **_aliases("model.activation", "hidden_act hidden_activation activation_function act_fn mlp_activation swiglu"),
        **_aliases("model.layernorm_epsilon", "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon"),
        **_aliases("model.normalization", "norm_class_name norm_type layer_norm_type use_rms_norm"),
        **_aliases(
            "model.hidden_dropout",
            "resid_pdrop dropout hidden_dropout_prob residual_dropout resid_dropout dropout_rate",
        ),
        **_aliases("model.attention_dropout", "attn_pdrop attention_probs_dropout_prob attn_dropout"),
        **_aliases("model.init_method_std", "initializer_range init_std"),
        **_aliases("model.rotary_base", "rope_theta rope_base rotary_emb_base theta"),
        **_aliases("model.rotary_percentage", "rotary_percent partial_rotary_factor rotary_pct"),
        **_aliases("model.seq_len_interpolation_factor", "rotary_seq_len_interpolation_factor"),
        **_aliases("model.rotary_scaling", "rope_scaling rope_type use_scaled_rope"),
        **_aliases("model.rotary_scaling_factor", "rope_scaling_factor"),
        **_aliases("model.position_embedding_type", "pos_emb_type position_encoding pe_type positional_embedding"),
        **_aliases(
            "model.share_embeddings_and_output_weights",
            "tie_word_embeddings tie_embeddings weight_tying tied_embeddings untie_embeddings_and_output_weights",
        ),
        **_aliases("model.override_vocab_size", "vocab_size padded_vocab_size"),
        **_aliases("model.make_vocab_size_divisible_by", "padding_multiple pad_vocab_size_multiple"),
        **_aliases("model.bias", "add_bias_linear disable_bias_linear use_bias mlp_bias"),
        **_aliases("model.qkv_bias", "attention_bias add_qkv_bias attn_bias"),
        **_aliases("model.use_flash_attention", "use_flash_attn flash_attention flash_attn use_flash"),
        **_aliases(
            "model.attention_backend", "attn_implementation _attn_implementation attn_impl attention_impl attn_type"
        ),
        **_aliases("model.compile", "torch_compile use_compile compile_model use_torch_compile"),
        **_aliases("model.optim.name", "optimizer optim optimizer_name optimizer_type"),
        **_aliases("model.optim.lr", "learning_rate max_lr base_lr peak_lr"),
        **_aliases("model.optim.weight_decay", "wd decay"),
        **_aliases("model.optim.betas", "adam_beta1 adam_beta2 beta1 beta2"),
        **_aliases("model.optim.eps", "adam_eps adam_epsilon epsilon"),
        **_aliases("model.optim.sched.name", "lr_scheduler_type lr_decay_style lr_scheduler scheduler decay_type"),
        **_aliases("model.optim.sched.warmup_steps", "warmup_iters lr_warmup_iters num_warmup_steps lr_warmup_steps"),
        **_aliases("model.optim.sched.warmup_ratio", "lr_warmup_fraction warmup_fraction"),
        **_aliases("model.optim.sched.max_steps", "lr_decay_iters decay_iters lr_decay_steps"),
        **_aliases("model.optim.sched.min_lr", "lr_min min_learning_rate eta_min lr_end"),
        **_aliases(
            "trainer.max_steps",
            "max_iters train_iters num_train_steps training_steps "
            "num_iterations train_steps total_steps max_train_steps num_train_epochs num_epochs epochs",
        ),
        **_aliases(
            "trainer.gradient_clip_val", "grad_clip clip_grad max_grad_norm max_norm gradient_clipping grad_clip_norm"
        ),
        **_aliases("trainer.log_every_n_steps", "logging_steps log_interval log_freq log_every"),
        **_aliases("trainer.val_check_interval", "eval_interval eval_steps eval_every val_interval eval_freq"),
        **_aliases("trainer.limit_val_batches", "eval_iters max_eval_batches eval_batches"),
        **_aliases("trainer.precision", "dtype torch_dtype bf16 fp16 mixed_precision param_dtype"),
        **_aliases("trainer.devices", "gpus num_gpus ngpus n_gpus nproc_per_node"),
        **_aliases("trainer.num_nodes", "nnodes n_nodes num_machines"),
        **_aliases("trainer.accelerator", "device"),
        **_aliases("exp_manager.exp_dir", "output_dir out_dir run_dir log_dir work_dir dump_folder"),
        **_aliases("exp_manager.name", "run_name experiment_name wandb_run_name"),
        **_aliases("exp_manager.resume_if_exists", "auto_resume resume resume_training"),
        **_aliases("exp_manager.resume_from_checkpoint", "init_from load resume_from load_checkpoint"),
        **_aliases(
            "exp_manager.checkpoint_callback_params.every_n_train_steps", "save_steps save_interval checkpoint_interval"
        ),
        **_aliases(
            "exp_manager.checkpoint_callback_params.save_top_k", "save_total_limit keep_latest_k max_checkpoints"
        ),
        **_aliases("model.data.path", "data_path dataset_path train_data data_dir dataset train_file dataset_dir"),
        **_aliases("model.data.splits_string", "split splits train_split val_size"),
        **_aliases("model.data.num_workers", "dataloader_num_workers num_data_workers"),
        **_aliases("model.tokenizer.library", "tokenizer_type tokenizer_name tokenizer_path"),
        **_aliases(
            "model.activations_checkpoint_granularity",
            "gradient_checkpointing activation_checkpointing activation_checkpoint "
            "recompute_granularity use_recompute "
            "grad_checkpoint enable_gradient_checkpointing",
        ),
        **_aliases("model.activations_checkpoint_method", "recompute_method"),
        **_aliases("model.activations_checkpoint_num_layers", "recompute_num_layers"),
        **_aliases("model.activations_checkpoint_modules", "recompute_modules"),
        **_aliases(
            "model.num_moe_experts", "num_experts num_local_experts n_expert n_routed_experts moe_num_experts n_experts"
        ),
        **_aliases(
            "model.moe_router_topk",
            "num_experts_per_tok num_experts_per_token top_k n_expert_per_token n_activated_experts "
            "moe_top_k moe_router_top_k topk moe_topk",
        ),
        **_aliases("model.moe_router_load_balancing_type", "load_balancing_type topk_method"),
        **_aliases(
            "model.moe_aux_loss_coeff",
            "router_aux_loss_coef aux_loss_coef load_balance_coeff aux_loss_alpha moe_loss_weight",
        ),
        **_aliases("model.moe_z_loss_coeff", "router_z_loss_coef z_loss_coeff moe_zloss_weight"),
        **_aliases("model.moe_input_jitter_eps", "router_jitter_noise jitter_noise moe_jitter_eps jitter_eps"),
        **_aliases(
            "model.moe_expert_capacity_factor",
            "capacity_factor expert_capacity_factor moe_capacity_factor moe_train_capacity_factor",
        ),
        **_aliases(
            "model.moe_ffn_hidden_size", "moe_intermediate_size moe_inter_dim moe_hidden_dim expert_hidden_size"
        ),
        **_aliases(
            "model.moe_layer_freq",
            "first_k_dense_replace decoder_sparse_step interleave_moe_layer_step mlp_only_layers moe_layers "
            "num_dense_layers n_dense_layers",
        ),
        **_aliases(
            "model.moe_shared_expert_intermediate_size",
            "n_shared_experts num_shared_experts shared_expert_intermediate_size moe_shared_experts",
        ),
        **_aliases("model.moe_router_pre_softmax", "norm_topk_prob normalize_topk_prob route_norm"),
        **_aliases("model.moe_router_score_function", "scoring_func score_func"),
        **_aliases("model.moe_router_topk_scaling_factor", "routed_scaling_factor route_scale"),
        **_aliases("model.moe_router_num_groups", "n_group n_expert_groups num_expert_groups"),
        **_aliases("model.moe_router_group_topk", "topk_group n_limited_groups num_limited_groups"),
        **_aliases("model.moe_router_enable_expert_bias", "use_routing_bias moe_use_aux_free_bias"),
        **_aliases("model.moe_router_bias_update_rate", "bias_update_speed bias_update_rate"),
        **_aliases("model.moe_router_dtype", "router_dtype"),
        **_aliases("model.moe_grouped_gemm", "use_grouped_mm use_grouped_gemm experts_implementation"),
        **_aliases(
            "model.tensor_model_parallel_size", "tp tp_size tensor_parallel_degree tensor_parallel_size tensor_parallel"
        ),
        **_aliases("model.pipeline_model_parallel_size", "pp pp_size pipeline_parallel_degree pipeline_parallel_size"),
        **_aliases("model.context_parallel_size", "cp cp_size context_parallel_degree"),
        **_aliases("model.expert_model_parallel_size", "ep ep_size expert_parallel_degree"),
        **_aliases("model.window_size", "sliding_window attention_window"),
        **_aliases("model.qk_layernorm", "qk_norm use_qk_norm apply_query_key_layer_norm"),
        **_aliases("model.rotary_original_length", "original_max_position_embeddings original_max_position"),
        **_aliases("model.rotary_high_turns", "beta_fast"),
        **_aliases("model.rotary_low_turns", "beta_slow"),
        **_aliases(
            "model.cpu_offloading",
            "activation_offloading cpu_offload offload_activations fine_grained_activation_offloading",
        ),
        **_aliases(
            "model.cpu_offloading_optimizer",
            "optimizer_cpu_offload offload_optimizer model.optim.cpu_offload model.optim.offload",
        ),
        **_aliases("model.seed", "random_seed rng_seed"),
        **_aliases("model.peft.peft_scheme", "peft_type adapter use_lora"),
        **_aliases("model.peft.lora_tuning.adapter_dim", "lora_r lora_rank"),
        **_aliases("model.peft.lora_tuning.alpha", "lora_alpha"),
        **_aliases("exp_manager.create_wandb_logger", "use_wandb wandb wandb_log report_to"),
    }
)

_LORA_TARGETS = "model.peft.lora_tuning.target_modules"
_FOREIGN_VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        _LORA_TARGETS: {
            **_aliases(
                "attention_qkv",
                "q_proj k_proj v_proj qkv_proj q k v query key value query_key_value c_attn wqkv linear_qkv",
            ),
            **_aliases("attention_dense", "o_proj out_proj o dense wo_proj linear_proj"),
            **_aliases(
                "mlp_fc1",
                "gate_proj up_proj gate_up_proj c_fc dense_h_to_4h wi wi_0 wi_1 w1 w3 fc1 linear_fc1",
            ),
            **_aliases("mlp_fc2", "down_proj dense_4h_to_h wo w2 fc2 linear_fc2"),
            "c_proj": "attention_dense,mlp_fc2",  # GPT-2 has two of that name
            "all-linear": "all",
        },
        "model.activations_checkpoint_modules": {
            **_aliases("core_attention", "core_attn attention_core attn"),
            **_aliases("norm", "layernorm layer_norm rmsnorm rms_norm norms"),
            **_aliases("mlp_activation", "activation mlp_act act"),
        },
    }
)
"""Per key, values of other frameworks (linear layers in Hugging Face PEFT, recompute modules in Megatron) mapped to
stoker's."""


def translate_values(path: str, value: Any) -> Sequence[tuple[str, str]]:
    """Return (given value, stoker's value) for each value, or list item, known from other frameworks.

    Several values of stoker's are joined with commas.
    """
    known = _FOREIGN_VALUES.get(path, {})
    named = value if isinstance(value, list) else [value]
    return [(name, known[name.lower()]) for name in named if isinstance(name, str) and name.lower() in known]
