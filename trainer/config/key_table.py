"""Every key that NeMo and Megatron know and that does not act here, in one table: why, and which values are accepted.

With the schema (keys that act) this is every key stoker knows. A key is in exactly one of four states:

- acts: it is in the schema;
- not yet: refused, unless its value means "off", or the feature it belongs to is off;
- refused: never, with the reason; only the values that change nothing are accepted;
- historical: accepted whatever its value, since it has no meaning here; listed once per run.

A pattern ends in `.*` where everything below a path has one state. An exact path wins over a pattern.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any


class State(StrEnum):
    """What happens to a key; see the docstring of this file."""

    ACTS = "acts"
    NOT_YET = "not yet"
    REFUSED = "refused"
    HISTORICAL = "historical"


@dataclass(frozen=True, slots=True)
class Row:
    """One key, or everything below a path, that does not act.

    Attributes:
        pattern: dotted path, or `path.*`.
        state: not yet, refused or historical.
        note: what it is, and for a refused key what to do instead.
        off: values that are accepted because they change nothing; null always is.
        default: NeMo's default, which references to the key get where a file does not set it.
        switch: path of the key that turns its feature on; while that is off, every value is accepted.
        same_as: path of the key whose value it may repeat, and which has the value of a refused one instead.
        cure: the way out of a refusal, with `{path}` for the key; empty: there is none; None: by `off` and `same_as`.
    """

    pattern: str
    state: State
    note: str
    off: tuple[Any, ...] = ()
    default: Any = None
    switch: str = ""
    same_as: str = ""
    cure: str | None = None


def _rows(state: State, parent: str, names: str, note: str, **facts: Any) -> Iterator[Row]:
    for name in names.split():
        yield Row(f"{parent}.{name}" if parent else name, state, note, **facts)


def _off(parent: str, name: str, note: str, off: Any, *more: Any, **facts: Any) -> Row:
    """A feature to come whose first `off` value is also NeMo's default."""
    return Row(f"{parent}.{name}", State.NOT_YET, note, (off, *more), default=off, **facts)


def _refused(parent: str, name: str, note: str, allowed: Any, *more: Any, **facts: Any) -> Row:
    return Row(f"{parent}.{name}", State.REFUSED, note, (allowed, *more), default=allowed, **facts)


def _history(parent: str, names: str, note: str, default: Any = None) -> Iterator[Row]:
    return _rows(State.HISTORICAL, parent, names, note, default=default)


_SPEED = "a speed setting of NeMo's kernels; results do not depend on it and stoker chooses its own"
_NCCL = "a speed setting of NeMo's communication; results do not depend on it"
_NO_MODEL = "stoker has no such model"
_T5 = "acts with model.family=t5 (a preset: model=t5_small)"
_FP32 = ("float32", "torch.float32", 32, "32", "32-true")
_PICKLE = "belongs to NeMo's own checkpoint format; stoker writes safetensors, atomically"


def _root() -> Iterator[Row]:
    yield from _rows(State.REFUSED, "", "restore_from_path", "use model.restore_from_path")
    yield from _rows(
        State.HISTORICAL,
        "s3_checkpointing",
        "max_write_concurrency max_read_concurrency chunk_size_MB enable_async_checkpointing",
        "checkpoints go to a file system; nothing is sent to S3",
    )
    yield Row("hydra.*", State.HISTORICAL, "Hydra composes only; it makes no run directory and starts no jobs here")
    yield from _history("", "config_version", "versions of other tools' configuration files")


def _trainer() -> Iterator[Row]:
    at = "trainer"
    yield _refused(at, "logger", "stoker writes its own logs; see exp_manager.create_tensorboard_logger", False)
    yield _refused(
        at,
        "enable_checkpointing",
        "stoker writes its own checkpoints; see exp_manager.checkpoint_callback_params",
        False,
    )
    sampler = "stoker orders the data itself, so that a resumed run sees every sample once"
    yield _refused(at, "use_distributed_sampler", sampler, False)
    yield _refused(at, "replace_sampler_ddp", sampler, False)
    yield _refused(
        at,
        "accumulate_grad_batches",
        "accumulation follows from model.global_batch_size / model.micro_batch_size",
        1,
    )
    yield _refused(
        at,
        "strategy",
        "the layout of devices follows from trainer.devices and the parallel sizes",
        "auto",
        "ddp",
        "ddp_notebook",
    )
    yield _refused(at, "gradient_clip_algorithm", "gradients are clipped by their global norm", "norm")
    yield _refused(at, "check_val_every_n_epoch", "validation is timed in steps, by trainer.val_check_interval", 1)
    yield _refused(at, "limit_train_batches", "a run is as long as trainer.max_steps", 1.0)
    yield _refused(at, "max_epochs", "a run is as long as trainer.max_steps, whatever epochs that takes", -1)
    yield _refused(at, "min_epochs", "a run is as long as trainer.max_steps", 0, 1)
    yield _refused(at, "min_steps", "a run is as long as trainer.max_steps", -1, 0)
    yield _refused(at, "callbacks", "classes are not named in YAML", None, [])
    yield _refused(at, "plugins", "classes are not named in YAML", None, [])
    yield _refused(at, "detect_anomaly", "torch's anomaly mode is switched on in code", False)
    yield _refused(at, "inference_mode", "validation always runs without gradients", True)
    yield _refused(at, "barebones", "stoker's own loop has that little overhead already", False)
    yield _refused(at, "reload_dataloaders_every_n_epochs", "samples depend on the step only", 0)
    yield _refused(
        at, "default_root_dir", "the run directory is exp_manager.exp_dir", None, same_as="exp_manager.exp_dir"
    )
    yield _off(at, "limit_predict_batches", "prediction inside the trainer", None, 1.0)
    yield _off(at, "sync_batchnorm", "there is no batch norm in these models", False)
    yield from _history(at, "benchmark", "cuDNN's search for convolutions; there are none")
    yield from _history(
        at, "limit_test_batches", "training has no test loop; `stoker evaluate` measures a checkpoint", 500
    )
    yield from _history(
        at,
        "weights_summary progress_bar_refresh_rate amp_backend tpu_cores checkpoint_callback move_metrics_to_cpu",
        "removed from Lightning long ago",
    )
    yield _refused(at, "gpus", "use trainer.devices", None, same_as=f"{at}.devices")
    resumed = "exp_manager.resume_from_checkpoint"
    yield _refused(at, "resume_from_checkpoint", f"use {resumed}", None, same_as=resumed)
    norm = "log lines have the 2-norm of all gradients together, always, and no other norm"
    yield _refused(at, "track_grad_norm", norm, -1, False, 2, 2.0)
    skipped = f"a loss or gradient that is not finite stops a run by {at}.max_skipped_steps"
    yield _refused(at, "terminate_on_nan", skipped, False, cure=f"~{{path}} {at}.max_skipped_steps=0")
    yield _refused(at, "amp_level", "levels of apex, which is not used; see model.megatron_amp_O2", None, "O0")


def _exp_manager() -> Iterator[Row]:
    at = "exp_manager"
    for logger in ("dllogger", "clearml", "neptune"):
        switch = f"{at}.create_{logger}_logger"
        note = f"stoker logs to TensorBoard, W&B, MLflow and CSV, not to {logger}"
        yield Row(switch, State.REFUSED, note, (False,), default=False)
        yield Row(f"{at}.{logger}_logger_kwargs", State.REFUSED, note, ({},), switch=switch)
        yield Row(f"{at}.{logger}_logger_kwargs.*", State.REFUSED, note, switch=switch)
    yield _refused(f"{at}.summary_writer_kwargs", "log_dir", "events go to `tensorboard` in the run directory", None)
    wandb, mlflow = f"{at}.wandb_logger_kwargs", f"{at}.mlflow_logger_kwargs"
    for name in ("api_key", "key"):
        yield _refused(wandb, name, "secrets do not belong in a configuration; export WANDB_API_KEY", None)
    for name in ("token", "password", "username"):
        variable = f"MLFLOW_TRACKING_{name.upper()}"
        yield _refused(mlflow, name, f"credentials do not belong in a configuration; export {variable}", None)
    yield _refused(wandb, "log_model", "checkpoints stay in the run directory", False, None)
    yield _refused(mlflow, "log_model", "checkpoints stay in the run directory", False, None)
    yield from _rows(
        State.REFUSED, wandb, "experiment", "objects are not named in YAML; `id` goes on with a run", off=({},)
    )
    for name, ours in (("dir", "save_dir"), ("version", "id")):
        yield _refused(wandb, name, f"use {wandb}.{ours}", None, same_as=f"{wandb}.{ours}")
    resumed = "a resumed run goes on in W&B under its id, always; a new run has an id of its own"
    yield _refused(wandb, "resume", resumed, None, True, "allow", "auto")
    yield from _history(wandb, "anonymous prefix", "names of a logger's metrics and of a run without an account")
    yield from _history(mlflow, "synchronous checkpoint_path_prefix", "metrics are sent beside training, always")
    yield from _history(
        f"{at}.early_stopping_callback_params",
        "check_on_train_epoch_end log_rank_zero_only",
        "early stopping is checked after each validation, and rank 0 prints",
    )
    yield from _history(at, "resume_past_end", "a finished run ends at once; raise trainer.max_steps", False)
    yield _off(at, "create_straggler_detection_callback", "finding slow ranks", False)
    yield _off(at, "create_fault_tolerance_callback", "NVIDIA's fault tolerance package", False)
    yield from _history(at, "straggler_detection_params fault_tolerance", "settings of features that are off")
    yield from _history(
        at, "create_preemption_callback", "always: SIGTERM ends in a checkpoint and exit code 143", True
    )
    yield from _history(
        at, "log_step_timing log_tflops_per_sec_per_gpu", "always: step time and MFU are in every log line", True
    )
    yield from _history(f"{at}.step_timing_kwargs", "buffer_size sync_cuda reduction", "step times are always exact")
    yield from _history(at, "disable_validation_on_resume", "validation follows the step count, resumed or not")
    yield from _history(at, "seconds_to_sleep", "no rank waits for files here")
    yield from _history(at, "log_local_rank_0_only log_global_rank_0_only", "only rank 0 logs")
    yield from _history(at, "log_delta_step_timing create_ipl_epoch_callback", "a setting of NeMo's own logging")

    at = f"{at}.checkpoint_callback_params"
    yield from _history(
        at,
        "always_save_nemo save_nemo_on_train_end save_nemo_on_validation_end save_best_model postfix "
        "model_parallel_size prefix n_resume",
        _PICKLE,
    )
    yield _refused(at, "save_last_n_optim_states", "every checkpoint holds its optimizer state", -1)
    yield from _history(at, "filename", "a checkpoint is a directory `step-N`; its metrics are inside")
    yield from _history(at, "verbose auto_insert_metric_name", "a setting of Lightning's own checkpoints")
    yield _refused(at, "save_weights_only", "every checkpoint holds its optimizer state, to go on from", False)
    yield from _history(at, "save_on_train_epoch_end", "checkpoints are timed in steps", False)
    yield _off(at, "every_n_epochs", "checkpoints timed in epochs; use every_n_train_steps", None, 0)


def _batching_and_start() -> Iterator[Row]:
    at = "model"
    yield _off(at, "restore_from_ckpt", "starting from the weights of another model", None)
    yield _refused(
        at,
        "resume_from_checkpoint",
        "use exp_manager.resume_from_checkpoint",
        None,
        same_as="exp_manager.resume_from_checkpoint",
    )
    yield _refused(at, "precision", "use trainer.precision", None, same_as="trainer.precision")
    yield _off(at, "reset_lr", "starting the schedule again when resuming", False)
    yield _off(at, "reset_lr_steps", "starting the schedule again when resuming", False)
    yield _off(at, "kd_teacher_restore_from_path", "distillation", None)
    yield _off(at, "add_eos", "token settings of fine-tuning", None)
    yield from _history(at, "name nemo_path preproc_out_dir target", "names of NeMo's own files")
    yield from _history(at, "nemo_version hparams_file", "names of NeMo's own files")


def _geometry() -> Iterator[Row]:
    at = "model"
    yield from _history(
        at, "mcore_gpt mcore_t5 mcore_bert megatron_legacy", "chose between NeMo's two code bases", True
    )
    yield from _history(at, "pre_process post_process", "set by NeMo's pipeline stages", True)
    yield from _history(at, "apex_transformer_log_level", "apex is not used")
    yield from _history(at, "use_cpu_initialization", "initial weights never depend on the device", False)
    yield from _history(at, "attention_softmax_in_fp32", "the softmax is always fp32", False)
    yield _refused(
        at, "attention_type", "there is one kind of attention; num_query_groups makes it MQA or GQA", "multihead"
    )
    yield _refused(at, "onnx_safe", "there is no ONNX export", False)
    yield _refused(at, "use_emha", "NeMo never supported it either; attention_backend chooses the kernels", False)
    yield _refused(at, "add_bias_linear", "use model.bias", None, same_as="model.bias")
    gated = "use model.activation=swiglu (geglu, reglu): no other activation is gated"
    yield _refused(at, "gated_linear_unit", gated, None, False, cure="")
    yield _refused(at, "vocab_size", "use model.override_vocab_size", None, same_as="model.override_vocab_size")
    for name, ours in (
        ("scale_factor", "rotary_scaling_factor"),
        ("low_freq_factor", "rotary_low_turns"),
        ("high_freq_factor", "rotary_high_turns"),
        ("final_logit_softcapping", "logits_soft_cap"),
    ):
        yield _refused(at, name, f"use model.{ours}", None, same_as=f"model.{ours}")
    yield _off(at, "add_qkv_bias", "use model.qkv_bias", None)
    custom = f"{at}.mcore_customization_config"
    yield Row(custom, State.REFUSED, "writes attributes onto Megatron's classes", ({},))
    yield Row(f"{custom}.*", State.REFUSED, "writes attributes onto Megatron's classes")
    yield _refused(at, "skip_train", "`stoker evaluate` measures a trained model", False)
    yield _refused(at, "drop_layers", "layers are not taken out of a trained model", [], None)
    for below in ("retro", "data.retro_data"):
        yield Row(f"{at}.{below}.*", State.REFUSED, f"for retrieval-augmented models; {_NO_MODEL}", cure="")
    falcon = f"Falcon's layer, with attention and MLP side by side; {_NO_MODEL}"
    yield _refused(custom, "new_decoder_architecture", falcon, False, cure="")
    yield _refused(custom, "parallel_attention", falcon, False, cure="")
    for name, ours in (
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "logits_soft_cap"),
    ):
        yield _refused(custom, name, f"use model.{ours}", None, same_as=f"model.{ours}")
    scores = f"Gemma 2's divisor of attention scores, which is kv_channels here; {_NO_MODEL}"
    yield _refused(custom, "query_pre_attn_scalar", scores, None, same_as=f"{at}.kv_channels", cure="")
    yield from _history(
        at,
        "bias_activation_fusion bias_gelu_fusion bias_dropout_add_fusion "
        "persist_layer_norm get_attention_mask_from_fusion "
        "gradient_accumulation_fusion apply_rope_fusion cross_entropy_loss_fusion "
        "bias_dropout_fusion bias_swiglu_fusion deallocate_pipeline_outputs",
        _SPEED,
    )
    for name in ("hybrid_override_pattern", "mamba_ssm_ngroups", "activations_checkpoint_recurrent"):
        yield _refused(at, name, f"for Mamba, Griffin and other recurrent models; {_NO_MODEL}", None, False, cure="")


def _precision() -> Iterator[Row]:
    at = "model"
    yield from _history(at, "native_amp_init_scale native_amp_growth_interval hysteresis", "loss scaling of fp16")
    yield _off(at, "fp16_lm_cross_entropy", "training in fp16", False)
    yield _off(at, "fp32_residual_connection", "a residual stream in fp32", False)
    yield from _history(at, "grad_div_ar_fusion gradient_as_bucket_view grad_allreduce_chunk_size_mb", _NCCL)
    yield from _history(at, "contiguous_grad_bucket async_grad_allreduce", _NCCL)
    yield from _history(
        at,
        "fp32_grad_accum",
        "gradients of several micro batches are summed in fp32 (with precision 64 in fp64), but with precision "
        "bf16-true in bf16",
    )
    yield _off(at, "fp8", "training in fp8", None, False)
    fp8 = "model.fp8"
    yield from _rows(
        State.NOT_YET,
        at,
        "fp8_e4m3 fp8_hybrid fp8_margin fp8_interval "
        "fp8_amax_history_len fp8_amax_compute_algo reduce_amax fp8_wgrad "
        "fp8_params fp8_dot_product_attention fp8_multi_head_attention",
        "a setting of fp8",
        switch=fp8,
    )
    yield from _history(at, "use_te_rng_tracker", "a setting of TransformerEngine's tensor parallelism")
    yield _refused(at, "deterministic_mode", "use trainer.deterministic", False, None, same_as="trainer.deterministic")
    yield Row(
        f"{at}.deteministic_mode", State.REFUSED, "a typo in one of NVIDIA's files; write deterministic_mode", (False,)
    )


def _parallel() -> Iterator[Row]:
    at = "model"
    yield _off(at, "tensor_model_parallel_size", "tensor parallelism", 1)
    yield _off(at, "pipeline_model_parallel_size", "pipeline parallelism", 1)
    yield _off(at, "virtual_pipeline_model_parallel_size", "interleaved pipelines", None, 1)
    yield _off(at, "context_parallel_size", "context parallelism", 1)
    yield _off(at, "expert_model_parallel_size", "expert parallelism", 1)
    yield _off(at, "expert_tensor_parallel_size", "expert parallelism", None, 1)
    yield _off(at, "sequence_parallel", "sequence parallelism", False)
    yield _off(at, "pipeline_model_parallel_split_rank", "pipeline parallelism of T5", 0)
    yield _off(at, "ub_tp_comm_overlap", "overlap of tensor-parallel communication", False)
    yield Row(
        f"{at}.ub_tp_comm_overlap_cfg",
        State.NOT_YET,
        "overlap of tensor-parallel communication",
        ({},),
        switch=f"{at}.ub_tp_comm_overlap",
    )
    yield Row(
        f"{at}.ub_tp_comm_overlap_cfg.*",
        State.NOT_YET,
        "overlap of tensor-parallel communication",
        switch=f"{at}.ub_tp_comm_overlap",
    )
    yield from _rows(
        State.NOT_YET,
        at,
        "tp_comm_overlap_ag tp_comm_overlap_rs "
        "tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 "
        "tp_comm_overlap_split_ag tp_comm_overlap_split_rs tp_comm_overlap_atomic_ag tp_comm_overlap_atomic_rs "
        "tp_comm_bulk_dgrad tp_comm_bulk_wgrad",
        "overlap of tensor-parallel communication",
        switch=f"{at}.ub_tp_comm_overlap",
    )
    yield from _history(
        at,
        "overlap_p2p_comm batch_p2p_comm sync_batch_comm defer_embedding_wgrad_compute wgrad_deferral_limit "
        "nccl_communicator_config_path use_tp_pp_dp_mapping "
        "sharp validation_param_sync_overlap pipeline_dtype",
        _NCCL,
    )
    yield from _history(
        at, "fsdp_sharded_checkpoint fsdp_use_orig_params", "sharded parameters keep their names and checkpoints", True
    )
    yield from _history(
        at,
        "dist_ckpt_format dist_ckpt_load_on_device dist_ckpt_parallel_save dist_ckpt_parallel_save_within_dp "
        "dist_ckpt_parallel_load dist_ckpt_torch_dist_multiproc dist_ckpt_assume_constant_structure "
        "dist_ckpt_parallel_dist_opt dist_ckpt_load_strictness use_dist_ckpt",
        _PICKLE,
    )
    yield from _history(at, "gc_interval", "a speed setting of NeMo's loop")
    yield from _history(at, "enable_megatron_timers", "step times are always logged", False)
    yield from _history(
        f"{at}.megatron_timer_kwargs", "log_every_n_steps log_mode barrier", "step times are always logged"
    )
    yield from _history(
        f"{at}.nsys_profile",
        "start_step end_step ranks gen_shape trace",
        "Nsight can attach to any run; nothing is marked for it",
    )
    profiled = "no steps are marked for Nsight; use trainer.profiler=pytorch and trainer.profile_steps"
    yield _refused(f"{at}.nsys_profile", "enabled", profiled, False)


def _memory() -> Iterator[Row]:
    at = "model"
    yield Row(  # 0 is not off: it recomputes all layers where there is no pipeline
        f"{at}.num_micro_batches_with_partial_activation_checkpoints",
        State.NOT_YET,
        "recomputing fewer layers in some micro batches of a pipeline",
    )
    yield Row(
        f"{at}.activations_checkpoint_layers_per_pipeline",
        State.NOT_YET,
        "recomputing fewer layers in some stages of a pipeline",
        off=(0,),
    )
    yield _off(at, "distribute_saved_activations", "tensor parallelism", False)


def _moe() -> Iterator[Row]:
    at = "model"
    yield from _history(
        at,
        "moe_use_legacy_grouped_gemm moe_permute_fusion moe_router_fusion moe_shared_expert_overlap",
        "a speed setting of Megatron's kernels; results do not depend on it",
        False,
    )
    yield _off(at, "moe_extended_tp", "expert parallelism", False)
    yield _refused(at, "moe_router_force_load_balancing", "routes at random, which trains no router", False)
    yield _refused(at, "moe_apply_probs_on_input", "gates are applied to what experts give", False)
    yield _refused(at, "moe_shared_expert_gate", "the shared expert has no gate", False)


def _optim() -> Iterator[Row]:
    at = "model.optim"
    yield from _history(
        at,
        "bucket_cap_mb overlap_grad_sync overlap_param_sync "
        "contiguous_grad_buffer contiguous_param_buffer "
        "lock_timeout nccl_ub average_in_collective align_param_gather fused foreach "
        "overlap_grad_reduce overlap_param_gather overlap_param_gather_with_optimizer_step",
        _NCCL,
    )
    summed = "model.fsdp_grad_reduce_dtype"
    cure = f"~{{path}}, with {summed}=fp32 or bf16"
    yield _refused(at, "grad_sync_dtype", f"use {summed}", None, same_as=summed, cure=cure)
    sent = "parameters are sent between processes in the type they have, which follows from trainer.precision"
    yield _refused(at, "param_sync_dtype", sent, None, same_as="trainer.precision", cure="~{path}")
    yield _refused(at, "dtype", "the optimizer's state is fp32 (fp64 with precision 64)", "fp32", *_FP32)
    yield _refused(at, "amsgrad", "AdamW is used without AMSGrad", False)
    yield _refused(at, "dampening", "momentum is used without dampening", 0, 0.0)
    yield _refused(at, "min_step", "Adafactor's relative step is at most 0.01", 1e-2)
    yield _off(at, "capturable", "CUDA graphs", False)
    sched = f"{at}.sched"
    yield _refused(sched, "cycle", "the decay ends at max_steps, in NeMo too, so there is no second cycle", False)
    yield _refused(sched, "last_epoch", "the schedule follows the step count, resumed or not", -1)
    yield _refused(
        sched, "max_steps_for_lr_sched", "use model.optim.sched.max_steps", None, same_as=f"{sched}.max_steps"
    )
    yield _refused(sched, "monitor", "schedules depend on the configuration only", None, "val_loss")
    yield _refused(sched, "reduce_on_plateau", "schedules depend on the configuration only", None, False)
    yield _refused(sched, "decay_steps", "the decay takes the steps that warm-up, hold and constant part leave", None)


def _data() -> Iterator[Row]:
    at = "model.data"
    yield from _history(
        at,
        "skip_warmup delay_data_init "
        "delay_data_mmap mmap_bin_files num_dataset_builder_threads "
        "exchange_indices_distributed legacy_dataset pin_memory persistent_workers prefetch_factor",
        "about NeMo's readers of .bin/.idx data",
    )
    yield _refused(
        at, "dataloader_type", "each sample is seen once per epoch, in an order drawn from model.seed", "single"
    )
    yield _refused(at, "drop_last", "training sees whole batches", True)
    yield _refused(at, "no_seqlen_plus_one_input_tokens", "a sample is sequence + 1 tokens: input and target", False)
    yield _refused(at, "pad_samples_to_global_batch_size", "batches are always whole", False)
    yield _refused(
        at, "data_cache_generation_only", "the first process that needs an index makes it, in vectorised code", False
    )
    yield _refused(at, "mock_dataset", "use model.data.data_impl=mock", False)
    yield _off(at, "add_fim", "fill-in-the-middle", False)
    yield from _rows(
        State.NOT_YET,
        f"{at}.fim",
        "rate spm_rate split_sample fragment_rate no_prefix",
        "fill-in-the-middle",
        switch=f"{at}.add_fim",
    )
    yield from _rows(
        State.NOT_YET,
        f"{at}.fim.extra_tokens",
        "prefix middle suffix pad eod",
        "fill-in-the-middle",
        switch=f"{at}.add_fim",
    )
    yield from _rows(
        State.REFUSED,
        f"{at}.chat_prompt_tokens",
        "system_turn_start turn_start label_start end_of_turn end_of_name",
        "a chat template says how turns are written; use model.tokenizer.chat_template",
    )
    yield _refused(at, "permutation", "moves tokens of the encoder's side about, which nothing asks back", False)
    yield _refused(at, "ngram_span_length_distribution", "use model.data.geometric_dist", None)
    yield from _rows(
        State.REFUSED,
        at,
        "extreme_masked_lm_prob extreme_max_ngram_size extreme_mean_ngram_size extreme_min_ngram_size "
        "extreme_ngram_span_length_distribution prefix_lm_pivot_mean delete_mask_prob",
        "UL2 and BART are not stoker's; model.data.dataset_type is t5 or t5_prefix_lm",
        switch=f"{at}.dataset_type",
    )
    yield from _history(at, "ceil_to_power_2 pad_to_max_length", "about padding: rows have fixed lengths")
    yield from _history(at, "get_attention_mask_from_fusion", "about a mask that is not made")


def _sets_of_fine_tuning() -> Iterator[Row]:
    own = "model.data.train_ds"
    alike = "validation and test are read as training data are; leave it out"
    for name in ("train_ds", "validation_ds", "test_ds"):
        yield Row(f"model.{name}.*", State.REFUSED, "use model.data.train_ds, validation_ds and test_ds")
        at, trains = f"model.data.{name}", name == "train_ds"
        yield from _history(
            at,
            "pin_memory memmap_workers index_mapping_dir ceil_to_power_2 pad_to_max_length global_sample_mapping "
            "get_attention_mask_from_fusion packed_sequence_return_cu_seqlen hf_dataset tokens_to_generate "
            "output_original_text",
            "about NeMo's readers, or its own generation",
        )
        yield from _history(at, "num_workers", "see model.data.num_workers, which is for all sets")
        sizes = "batches of all sets are those of the model; leave it out"
        for size in ("micro_batch_size", "global_batch_size"):
            cure = None if trains else "~{path}"
            yield Row(f"{at}.{size}", State.REFUSED, sizes, same_as=f"model.{size}", cure=cure)
        length = "rows are as long as the model is built for; use model.encoder_seq_length"
        yield Row(f"{at}.max_seq_length", State.REFUSED, length, same_as="model.encoder_seq_length")
        yield _refused(at, "max_src_seq_length", "use model.seq_length", None)
        longest = "use model.data.seq_length_dec"
        yield Row(f"{at}.max_tgt_seq_length", State.REFUSED, longest, same_as="model.data.seq_length_dec")
        for key, default in (("label_key", "output"), ("context_key", "input"), ("packed_sequence", False)):
            meant = f"model.data.{key}"
            yield Row(f"{at}.{key}", State.REFUSED, f"use {meant}", default=default, same_as=meant)
        yield Row(f"{at}.seed", State.REFUSED, "use model.seed", same_as="model.seed")
        yield _refused(at, "add_sep", "write what lies between prompt and answer into prompt_template", False)
        newline = "write the line break into prompt_template, as in '{input}\\n{output}'"
        yield _refused(at, "separate_prompt_and_response_with_newline", newline, False)
        yield _refused(at, "min_seq_length", "an example is left out only where nothing of it can be learnt", 1, 0)
        yield _refused(at, "concat_sampling_technique", "use concat_sampling_probabilities", None)
        yield _refused(at, "concat_sampling_temperature", "use concat_sampling_probabilities", None)
        yield _refused(at, "file_path", "use file_names", None)
        yield _refused(at, "task_name", "use a JSONL file with an input and an output", None)
        yield _refused(at, "src_file_name", "use a JSONL file with an input and an output", None)
        yield _refused(at, "tgt_file_name", "use a JSONL file with an input and an output", None)
        yield _refused(at, "add_bos_to_input", "the input of a T5 begins with its text", False)
        yield _refused(at, "add_eos_to_input", "the input of a T5 ends with the end token", True)
        yield _refused(at, "replace_bos_with_pad", "a T5 begins its answer with the padding token anyway", False, True)
        if trains:
            order = "training sees every sample once per epoch, in an order drawn from model.seed"
            yield _refused(at, "shuffle", order, True)
            yield _refused(at, "drop_last", "training sees whole batches", True)
            continue
        yield from _history(at, "shuffle drop_last names output_file_path_prefix prediction_file_path_prefix", alike)
        yield from _history(at, "concat_sampling_probabilities", "every held-out example is taken once")
        for key, default in (
            ("prompt_template", "{input} {output}"),
            ("truncation_field", "input"),
            ("truncation_method", "right"),
            ("add_bos", False),
            ("add_eos", True),
        ):
            yield Row(f"{at}.{key}", State.REFUSED, alike, default=default, same_as=f"{own}.{key}", cure="~{path}")
        scores = "use stoker evaluate, which measures exact match and ROUGE-L, or --json"
        yield _refused(at, "write_predictions_to_file", scores, False)
        yield _refused(f"{at}.metric", "name", scores, "loss")
        yield from _history(f"{at}.metric", "average num_classes class_labels labels_are_strings", scores)


def _tokenizer() -> Iterator[Row]:
    at = "model.tokenizer"
    yield from _rows(State.REFUSED, at, "tokenizer_model tokenizer_name", "use model.tokenizer.model and library")
    yield from _rows(
        State.REFUSED, at, "training_sample_size", "tokenizers are trained by stoker preprocess --train-tokenizer"
    )
    yield from _rows(
        State.REFUSED,
        f"{at}.special_tokens",
        "bos_token cls_token sep_token",
        "samples are windows of text, which begin with no token of their own and have no parts",
    )
    yield _refused(f"{at}.special_tokens", "unk_token", "a tokenizer's file says what it does with unknown text", None)
    yield _off(at, "delimiter", "tokenizers of tables", None)
    yield from _history(at, "sentencepiece_legacy use_fast", "about how NeMo loads tokenizers", False)
    yield _refused(at, "trust_remote_code", "no code comes with a tokenizer", False)


def _families() -> Iterator[Row]:
    at = "model"
    for stack in ("encoder", "decoder"):
        yield Row(f"{at}.{stack}.*", State.REFUSED, f"{_T5}, which has a stack of its own for encoder and decoder")
    yield _refused(at, "seq_length", "use model.encoder_seq_length", None, same_as="model.encoder_seq_length")
    yield _refused(at, "share_token_embeddings", _T5, None, True)
    yield _refused(at, "share_decoder_tokens_head_embeddings", _T5, None, True)
    yield _refused(at, "tokens_head_bias", _T5, None, False)
    yield _refused(at, "scale_tied_logits", _T5, False)
    for name in ("encoder_arch", "decoder_arch"):
        yield _refused(at, name, f"NeMo's perceiver; {_NO_MODEL}", None, "transformer", cure="")
    yield _refused(at, "arch", "a stack is a transformer; NeMo's perceiver is not there", None, "transformer")
    yield from _history(at, "hidden_steps num_self_attention_per_cross_attention", "settings of NeMo's perceiver")
    yield from _history(
        at, "relative_position_bias_self_attention_only", "about cross-attention, which only T5's decoder has", True
    )
    sentences = "BERT learns from masked tokens alone here, not from the order of sentences"
    yield _refused(at, "add_binary_head", sentences, False)
    yield _refused(at, "bert_binary_head", sentences, False)
    yield _refused(at, "only_mlm_loss", sentences, None, True)
    yield _refused(at, "add_lm_head", "BERT without its head could not be trained", None, True)
    yield _refused(at, "add_pooler", sentences, None, False)
    yield Row(f"{at}.bert.*", State.REFUSED, "acts with model.family=bert (a preset: model=bert_base)")
    for path in ("language_model.*", "head.*", "pretrained_checkpoint.*", "multimodal.*"):
        yield Row(f"{at}.{path}", State.REFUSED, "belongs to other model families of NeMo")
    for name in (
        "pretrained_model_path",
        "eval_languages",
        "mask_prob",
        "max_seq_length",
        "short_seq_prob",
        "num_tok_classification_layers",
        "num_seq_classification_layers",
    ):
        yield _refused(at, name, "belongs to other model families of NeMo", None)


def _peft() -> Iterator[Row]:
    for kind in ("adapter_tuning", "lora_tuning"):
        at = f"model.peft.{kind}"
        yield _refused(at, "weight_tying", "every layer has adapters of its own", False)
        yield _refused(at, "position_embedding_strategy", "it is for adapters that all layers share", None)
    at = "model"
    yield _refused(at, "language_model_path", "use model.restore_from_path", None, same_as="model.restore_from_path")
    yield _refused(at, "restore_path", "use model.peft.restore_from_path", None, same_as="model.peft.restore_from_path")
    style = "use model.peft.peft_scheme, which is ptuning for prompts that are learnt"
    yield _refused(at, "virtual_prompt_style", style, None, "no-prompts", cure="~{path} model.peft.peft_scheme=ptuning")
    template = "~{path} model.data.train_ds.prompt_template=TEXT"
    files = "tasks have no names; use a JSONL file of prompts and answers, model.data.train_ds.file_names"
    for name in ("existing_tasks", "new_tasks"):
        yield _refused(at, name, files, [], cure="~{path}")
    yield _refused(at, "task_templates", "use model.data.train_ds.prompt_template", [], cure=template)
    for name in ("lora_tuning", "adapter_tuning", "ia3_tuning", "p_tuning"):
        below = f"write it below model.peft.{name}, and name model.peft.peft_scheme"
        yield Row(f"{at}.{name}.*", State.REFUSED, below, cure="")
    for name in ("prompt_tuning", "prompt_learning"):
        below = "see model.peft.p_tuning, with model.peft.peft_scheme=ptuning"
        yield Row(f"{at}.{name}.*", State.REFUSED, below, cure="")
    yield Row("model.peft.qlora_tuning.*", State.REFUSED, "weights stay in 16 or 32 bits; use lora_tuning")


def _all_rows() -> Iterator[Row]:
    for part in (
        _root,
        _trainer,
        _exp_manager,
        _batching_and_start,
        _geometry,
        _precision,
        _parallel,
        _memory,
        _moe,
        _optim,
        _data,
        _sets_of_fine_tuning,
        _tokenizer,
        _families,
        _peft,
    ):
        for row in part():
            parent, _, names = row.pattern.rpartition(".")
            for name in names.split():
                yield replace(row, pattern=f"{parent}.{name}" if parent else name)


KEY_TABLE: tuple[Row, ...] = tuple(_all_rows())
"""Every row, in the order of the documentation."""

_EXACT: Mapping[str, Row] = MappingProxyType({row.pattern: row for row in KEY_TABLE if not row.pattern.endswith(".*")})
_BELOW: Mapping[str, Row] = MappingProxyType({row.pattern[:-2]: row for row in KEY_TABLE if row.pattern.endswith(".*")})


def row_of(path: str, family: str = "gpt") -> Row | None:
    """The row of a key: its own, that of the block it lies in, or that of a key whose value is a block.

    Below `model.encoder` and `model.decoder` of a T5, a key has the state it has below `model` elsewhere.
    """
    if family == "t5":
        for stack in ("model.encoder.", "model.decoder."):
            name = path.removeprefix(stack)
            if name != path:
                row = _EXACT.get(f"model.{name}")
                return row and _moved(row, stack)
    if family == "bert" and path.startswith("model.bert."):
        return None
    if path in _EXACT:
        return _EXACT[path]
    above = path
    while "." in above:
        above = above.rpartition(".")[0]
        if above in _BELOW:
            return _BELOW[above]
        if above in _EXACT:
            return None
    return _BELOW.get(path)


def _moved(row: Row, stack: str) -> Row:
    """The row of a key of `model` for the same key of a stack."""
    pattern, switch, same_as = (text.replace("model.", stack, 1) for text in (row.pattern, row.switch, row.same_as))
    return replace(row, pattern=pattern, switch=switch, same_as=same_as)


def is_block_of_rows(path: str) -> bool:
    """Whether rows lie below `path`, as below `model.nsys_profile`."""
    return path in _BELOW or any(row.pattern.startswith(path + ".") for row in KEY_TABLE)


_FP16 = "fp16 needs loss scaling; use bf16"
_FP8 = "training in fp8; use bf16"
_OTHER_TOKENIZER = "use huggingface with a tokenizer.json, sentencepiece, or byte-level"
_ADAM = "adam adds weight decay to the gradient, which its running square undoes; use adamw (equal without decay)"
_OTHER_OPTIMIZER = "stoker keeps AdamW, Adafactor, Muon and SGD; use adamw"
_OTHER_BALANCE = "the loss is one of each micro batch; use aux_loss, or moe_router_enable_expert_bias"
_SCHEDULE = "a rate that depends on epochs or losses does not follow from the step; use CosineAnnealing"


@dataclass(frozen=True, slots=True)
class Values:
    """Why some values of a key that acts are not taken.

    Attributes:
        state: not yet, or refused.
        note: what they are, and what to do instead.
        use: the value to set instead; empty where that depends on what is wanted.
    """

    state: State
    note: str
    use: str


def _values(state: State, note: str, *values: Any, use: str = "") -> dict[Any, Values]:
    return dict.fromkeys(values, Values(state, note, use))


VALUES: Mapping[str, Mapping[Any, Values]] = MappingProxyType(
    {
        "trainer.precision": _values(
            State.NOT_YET, _FP16, 16, "16", "16-mixed", "16-true", "fp16", "fp16-mixed", "float16", "half", use="bf16"
        )
        | _values(State.NOT_YET, _FP8, 8, "8", "fp8", "transformer-engine", "transformer-engine-float16", use="bf16"),
        "trainer.accelerator": _values(State.REFUSED, "not a device torch trains these models on", "tpu", "hpu", "ipu"),
        "model.normalization": _values(
            State.REFUSED,
            "norms always calculate in fp32; use layernorm",
            "low_precision_layernorm",
            use="layernorm",
        ),
        "model.tokenizer.library": _values(
            State.REFUSED, _OTHER_TOKENIZER, "regex", "tabular", "tiktoken", "null-tokenizer", "yttm"
        ),
        "model.data.data_impl": _values(
            State.REFUSED, "use mmap or text", "text_mmap", "csv_mmap", "retmmap", "lazy", "cached"
        ),
        "model.data.dataset_type": _values(
            State.REFUSED, "use t5, or t5_prefix_lm", "ul2", "ul2_prompt", "bart", "t5_prompt", "gpt_prompt"
        ),
        "model.moe_router_load_balancing_type": _values(
            State.REFUSED, _OTHER_BALANCE, "seq_aux_loss", "global_aux_loss", "quantile"
        ),
        "model.peft.peft_scheme": _values(
            State.REFUSED,
            "weights stay in 16 or 32 bits, and schemes are not combined; use lora",
            "qlora",
            "sdlora",
            use="lora",
        ),
        "model.optim.name": _values(State.REFUSED, _ADAM, "adam", use="adamw")
        | _values(
            State.REFUSED,
            _OTHER_OPTIMIZER,
            "adadelta",
            "adamax",
            "adagrad",
            "rmsprop",
            "rprop",
            "novograd",
            "adan",
            "lamb",
            "radam",
            use="adamw",
        ),
        "model.optim.sched.name": _values(
            State.REFUSED,
            _SCHEDULE,
            "StepLR",
            "ExponentialLR",
            "ReduceLROnPlateau",
            "CyclicLR",
            use="CosineAnnealing",
        ),
    }
)
"""Values of keys that act which NeMo knows and stoker does not take, or not yet."""
