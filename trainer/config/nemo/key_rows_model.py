"""Rows of the key table: model architecture, precision, parallelism and memory."""

from __future__ import annotations

from collections.abc import Iterator

from .key_row import CHECKPOINT_NOTE, COMMUNICATION_NOTE, KeyState, Row, history, off, refused, rows

_SPEED = "a performance setting of NeMo's kernels; results do not depend on it and stoker chooses its own"
_NO_MODEL = "stoker has no such model"
_T5 = "acts with model.family=t5 (a preset: model=t5_small)"


def rows_of_model() -> Iterator[Row]:
    """Yield rows of the model, without its optimizer, data and tokenizer."""
    yield from _batching_and_start()
    yield from _geometry()
    yield from _precision()
    yield from _parallel()
    yield from _memory()
    yield from _moe()
    yield from _families()
    yield from _peft()


def _batching_and_start() -> Iterator[Row]:
    at = "model"
    yield off(at, "restore_from_ckpt", "initializing from the weights of another model", None)
    yield refused(
        at,
        "resume_from_checkpoint",
        "use exp_manager.resume_from_checkpoint",
        None,
        same_as="exp_manager.resume_from_checkpoint",
    )
    yield refused(at, "precision", "use trainer.precision", None, same_as="trainer.precision")
    yield off(at, "reset_lr", "restarting the schedule when resuming", False)
    yield off(at, "reset_lr_steps", "restarting the schedule when resuming", False)
    yield off(at, "kd_teacher_restore_from_path", "distillation", None)
    yield off(at, "add_eos", "token settings of fine-tuning", None)
    yield from history(at, "name nemo_path preproc_out_dir target", "names of NeMo's own files")
    yield from history(at, "nemo_version hparams_file", "names of NeMo's own files")


def _geometry() -> Iterator[Row]:
    at = "model"
    yield from history(at, "mcore_gpt mcore_t5 mcore_bert megatron_legacy", "chooses between NeMo's code bases", True)
    yield from history(at, "pre_process post_process", "set by NeMo's pipeline stages", True)
    yield from history(at, "apex_transformer_log_level", "apex is not used")
    yield from history(at, "use_cpu_initialization", "initial weights never depend on the device", False)
    yield from history(at, "attention_softmax_in_fp32", "the softmax is always fp32", False)
    yield refused(at, "attention_type", "only multi-head attention; num_query_groups makes it MQA or GQA", "multihead")
    yield refused(at, "onnx_safe", "ONNX export is not supported", False)
    yield refused(at, "use_emha", "NeMo never supported it either; attention_backend selects the kernels", False)
    yield refused(at, "add_bias_linear", "use model.bias", None, same_as="model.bias")
    gated = "use model.activation=swiglu (geglu, reglu): no other activation is gated"
    yield refused(at, "gated_linear_unit", gated, None, False, fix="")
    yield refused(at, "vocab_size", "use model.override_vocab_size", None, same_as="model.override_vocab_size")
    for name, ours in (
        ("scale_factor", "rotary_scaling_factor"),
        ("low_freq_factor", "rotary_low_turns"),
        ("high_freq_factor", "rotary_high_turns"),
        ("final_logit_softcapping", "logits_soft_cap"),
    ):
        yield refused(at, name, f"use model.{ours}", None, same_as=f"model.{ours}")
    yield off(at, "add_qkv_bias", "use model.qkv_bias", None)
    custom = f"{at}.mcore_customization_config"
    yield Row(custom, KeyState.REFUSED, "writes attributes onto Megatron's classes", ({},))
    yield Row(f"{custom}.*", KeyState.REFUSED, "writes attributes onto Megatron's classes")
    yield refused(at, "skip_train", "`stoker evaluate` measures a trained model", False)
    yield refused(at, "drop_layers", "removing layers of a trained model is not supported", [], None)
    for below in ("retro", "data.retro_data"):
        yield Row(f"{at}.{below}.*", KeyState.REFUSED, f"for retrieval-augmented models; {_NO_MODEL}", fix="")
    falcon = f"Falcon's layer, with parallel attention and MLP; {_NO_MODEL}"
    yield refused(custom, "new_decoder_architecture", falcon, False, fix="")
    yield refused(custom, "parallel_attention", falcon, False, fix="")
    for name, ours in (
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "logits_soft_cap"),
    ):
        yield refused(custom, name, f"use model.{ours}", None, same_as=f"model.{ours}")
    scores = f"Gemma 2's scaling of attention scores, which follows kv_channels here; {_NO_MODEL}"
    yield refused(custom, "query_pre_attn_scalar", scores, None, same_as=f"{at}.kv_channels", fix="")
    yield from history(
        at,
        "bias_activation_fusion bias_gelu_fusion bias_dropout_add_fusion "
        "persist_layer_norm get_attention_mask_from_fusion "
        "gradient_accumulation_fusion apply_rope_fusion cross_entropy_loss_fusion "
        "bias_dropout_fusion bias_swiglu_fusion deallocate_pipeline_outputs",
        _SPEED,
    )
    for name in ("hybrid_override_pattern", "mamba_ssm_ngroups", "activations_checkpoint_recurrent"):
        yield refused(at, name, f"for Mamba, Griffin and other recurrent models; {_NO_MODEL}", None, False, fix="")


def _precision() -> Iterator[Row]:
    at = "model"
    yield from history(at, "native_amp_init_scale native_amp_growth_interval hysteresis", "loss scaling of fp16")
    yield off(at, "fp16_lm_cross_entropy", "training in fp16", False)
    yield off(at, "fp32_residual_connection", "a residual stream in fp32", False)
    yield from history(
        at, "grad_div_ar_fusion gradient_as_bucket_view grad_allreduce_chunk_size_mb", COMMUNICATION_NOTE
    )
    yield from history(at, "contiguous_grad_bucket async_grad_allreduce", COMMUNICATION_NOTE)
    yield from history(
        at,
        "fp32_grad_accum",
        "gradients of several micro batches accumulate in fp32 (with precision 64 in fp64, with bf16-true in bf16)",
    )
    yield off(at, "fp8", "training in fp8", None, False)
    fp8 = "model.fp8"
    yield from rows(
        KeyState.NOT_YET,
        at,
        "fp8_e4m3 fp8_hybrid fp8_margin fp8_interval "
        "fp8_amax_history_len fp8_amax_compute_algo reduce_amax fp8_wgrad "
        "fp8_params fp8_dot_product_attention fp8_multi_head_attention",
        "a setting of fp8",
        switch=fp8,
    )
    yield from history(at, "use_te_rng_tracker", "a setting of TransformerEngine's tensor parallelism")
    yield refused(at, "deterministic_mode", "use trainer.deterministic", False, None, same_as="trainer.deterministic")
    yield Row(
        f"{at}.deteministic_mode", KeyState.REFUSED, "a typo in one of NVIDIA's files; use deterministic_mode", (False,)
    )


def _parallel() -> Iterator[Row]:
    at = "model"
    yield off(at, "tensor_model_parallel_size", "tensor parallelism", 1)
    yield off(at, "pipeline_model_parallel_size", "pipeline parallelism", 1)
    yield off(at, "virtual_pipeline_model_parallel_size", "interleaved pipelines", None, 1)
    yield off(at, "context_parallel_size", "context parallelism", 1)
    yield off(at, "expert_model_parallel_size", "expert parallelism", 1)
    yield off(at, "expert_tensor_parallel_size", "expert parallelism", None, 1)
    yield off(at, "sequence_parallel", "sequence parallelism", False)
    yield off(at, "pipeline_model_parallel_split_rank", "pipeline parallelism of T5", 0)
    yield off(at, "ub_tp_comm_overlap", "overlap of tensor-parallel communication", False)
    yield Row(
        f"{at}.ub_tp_comm_overlap_cfg",
        KeyState.NOT_YET,
        "overlap of tensor-parallel communication",
        ({},),
        switch=f"{at}.ub_tp_comm_overlap",
    )
    yield Row(
        f"{at}.ub_tp_comm_overlap_cfg.*",
        KeyState.NOT_YET,
        "overlap of tensor-parallel communication",
        switch=f"{at}.ub_tp_comm_overlap",
    )
    yield from rows(
        KeyState.NOT_YET,
        at,
        "tp_comm_overlap_ag tp_comm_overlap_rs "
        "tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 "
        "tp_comm_overlap_split_ag tp_comm_overlap_split_rs tp_comm_overlap_atomic_ag tp_comm_overlap_atomic_rs "
        "tp_comm_bulk_dgrad tp_comm_bulk_wgrad",
        "overlap of tensor-parallel communication",
        switch=f"{at}.ub_tp_comm_overlap",
    )
    yield from history(
        at,
        "overlap_p2p_comm batch_p2p_comm sync_batch_comm defer_embedding_wgrad_compute wgrad_deferral_limit "
        "nccl_communicator_config_path use_tp_pp_dp_mapping "
        "sharp validation_param_sync_overlap pipeline_dtype",
        COMMUNICATION_NOTE,
    )
    yield from history(
        at, "fsdp_sharded_checkpoint fsdp_use_orig_params", "sharded parameters keep their names and checkpoints", True
    )
    yield from history(
        at,
        "dist_ckpt_format dist_ckpt_load_on_device dist_ckpt_parallel_save dist_ckpt_parallel_save_within_dp "
        "dist_ckpt_parallel_load dist_ckpt_torch_dist_multiproc dist_ckpt_assume_constant_structure "
        "dist_ckpt_parallel_dist_opt dist_ckpt_load_strictness use_dist_ckpt",
        CHECKPOINT_NOTE,
    )
    yield from history(at, "gc_interval", "a performance setting of NeMo's training loop")
    yield from history(at, "enable_megatron_timers", "step times are always logged", False)
    yield from history(
        f"{at}.megatron_timer_kwargs", "log_every_n_steps log_mode barrier", "step times are always logged"
    )
    yield from history(
        f"{at}.nsys_profile",
        "start_step end_step ranks gen_shape trace",
        "Nsight can attach to any run; no steps are marked for it",
    )
    profiled = "no steps are marked for Nsight; use trainer.profiler=pytorch and trainer.profile_steps"
    yield refused(f"{at}.nsys_profile", "enabled", profiled, False)


def _memory() -> Iterator[Row]:
    at = "model"
    yield Row(  # 0 is not off: it recomputes all layers where there is no pipeline
        f"{at}.num_micro_batches_with_partial_activation_checkpoints",
        KeyState.NOT_YET,
        "recomputing fewer layers in some micro batches of a pipeline",
    )
    yield Row(
        f"{at}.activations_checkpoint_layers_per_pipeline",
        KeyState.NOT_YET,
        "recomputing fewer layers in some stages of a pipeline",
        off=(0,),
    )
    yield off(at, "distribute_saved_activations", "tensor parallelism", False)


def _moe() -> Iterator[Row]:
    at = "model"
    yield from history(
        at,
        "moe_use_legacy_grouped_gemm moe_permute_fusion moe_router_fusion moe_shared_expert_overlap",
        "a performance setting of Megatron's kernels; results do not depend on it",
        False,
    )
    yield off(at, "moe_extended_tp", "expert parallelism", False)
    yield refused(at, "moe_router_force_load_balancing", "random routing does not train the router", False)
    yield refused(at, "moe_apply_probs_on_input", "router probabilities are applied to expert outputs", False)
    yield refused(at, "moe_shared_expert_gate", "the shared expert has no gate", False)


def _families() -> Iterator[Row]:
    at = "model"
    for stack in ("encoder", "decoder"):
        yield Row(f"{at}.{stack}.*", KeyState.REFUSED, f"{_T5}, which has separate encoder and decoder stacks")
    yield refused(at, "seq_length", "use model.encoder_seq_length", None, same_as="model.encoder_seq_length")
    yield refused(at, "share_token_embeddings", _T5, None, True)
    yield refused(at, "share_decoder_tokens_head_embeddings", _T5, None, True)
    yield refused(at, "tokens_head_bias", _T5, None, False)
    yield refused(at, "scale_tied_logits", _T5, False)
    for name in ("encoder_arch", "decoder_arch"):
        yield refused(at, name, f"NeMo's perceiver; {_NO_MODEL}", None, "transformer", fix="")
    yield refused(at, "arch", "a stack is a transformer; NeMo's perceiver is not supported", None, "transformer")
    yield from history(at, "hidden_steps num_self_attention_per_cross_attention", "settings of NeMo's perceiver")
    yield from history(
        at, "relative_position_bias_self_attention_only", "about cross-attention, which only T5's decoder has", True
    )
    sentences = "BERT is trained with masked language modelling only, not with next-sentence prediction"
    yield refused(at, "add_binary_head", sentences, False)
    yield refused(at, "bert_binary_head", sentences, False)
    yield refused(at, "only_mlm_loss", sentences, None, True)
    yield refused(at, "add_lm_head", "BERT cannot be trained without its language-model head", None, True)
    yield refused(at, "add_pooler", sentences, None, False)
    yield Row(f"{at}.bert.*", KeyState.REFUSED, "acts with model.family=bert (a preset: model=bert_base)")
    for path in ("language_model.*", "head.*", "pretrained_checkpoint.*", "multimodal.*"):
        yield Row(f"{at}.{path}", KeyState.REFUSED, "belongs to other model families of NeMo")
    for name in (
        "pretrained_model_path",
        "eval_languages",
        "mask_prob",
        "max_seq_length",
        "short_seq_prob",
        "num_tok_classification_layers",
        "num_seq_classification_layers",
    ):
        yield refused(at, name, "belongs to other model families of NeMo", None)


def _peft() -> Iterator[Row]:
    for kind in ("adapter_tuning", "lora_tuning"):
        at = f"model.peft.{kind}"
        yield refused(at, "weight_tying", "every layer has its own adapters", False)
        yield refused(at, "position_embedding_strategy", "only for adapters shared by all layers", None)
    at = "model"
    yield refused(at, "language_model_path", "use model.restore_from_path", None, same_as="model.restore_from_path")
    yield refused(at, "restore_path", "use model.peft.restore_from_path", None, same_as="model.peft.restore_from_path")
    style = "use model.peft.peft_scheme; learned prompts are ptuning"
    yield refused(at, "virtual_prompt_style", style, None, "no-prompts", fix="~{path} model.peft.peft_scheme=ptuning")
    template = "~{path} model.data.train_ds.prompt_template=TEXT"
    files = "tasks are not named; use JSONL files of prompts and answers, model.data.train_ds.file_names"
    for name in ("existing_tasks", "new_tasks"):
        yield refused(at, name, files, [], fix="~{path}")
    yield refused(at, "task_templates", "use model.data.train_ds.prompt_template", [], fix=template)
    for name in ("lora_tuning", "adapter_tuning", "ia3_tuning", "p_tuning"):
        below = f"write it below model.peft.{name}, and set model.peft.peft_scheme"
        yield Row(f"{at}.{name}.*", KeyState.REFUSED, below, fix="")
    for name in ("prompt_tuning", "prompt_learning"):
        below = "see model.peft.p_tuning, with model.peft.peft_scheme=ptuning"
        yield Row(f"{at}.{name}.*", KeyState.REFUSED, below, fix="")
    yield Row("model.peft.qlora_tuning.*", KeyState.REFUSED, "weights stay in 16 or 32 bits; use lora_tuning")
