"""Every key of the schema has an observable effect.

A row says which observable (`key_observables.py`) a key changes. Keys with a closed list of values are in
`test_key_effects_values.py`, those that need more than one configuration each in `test_key_effects_scenarios.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from config_harness import (
    ADAFACTOR,
    ALIBI,
    AVERAGES,
    BUCKETS,
    CALLBACK,
    DATA,
    DEEP,
    EVERY,
    EXPERT_BIAS,
    LLAMA3_ROPE,
    MANAGER,
    MODEL,
    MOE,
    MUON,
    NGRAMS,
    OPTIM,
    PIECES,
    PREFIX,
    RECOMPUTE,
    ROPE,
    SAVES,
    SCHED,
    SEQUENTIAL_MOE,
    SGD,
    SIGMOID,
    SPARE_CAPACITY,
    STOPPING,
    STOPS,
    TEXT,
    TOKENIZER,
    TRAINER,
    VALIDATES,
    WHOLE,
    YARN,
    Changes,
    ConfigHarness,
)
from key_observables import (
    accumulation,
    algorithms,
    arithmetic,
    attention_backends,
    attention_masks,
    checkpoints,
    compiled,
    consumed,
    data,
    delayed_scales,
    expert_implementation,
    files,
    first_batch,
    flops,
    gradients,
    hopper_backend,
    kept,
    learning_rates,
    logged_names,
    logits,
    logs_early_stopping,
    loss_scales,
    norm_weight,
    num_target_labels,
    optimizer_groups,
    panel,
    place,
    profiles,
    rates,
    report_sample,
    reported_steps,
    router_calls,
    shapes,
    softmax_fusion,
    stepped,
    stopped_by,
    summary,
    task_batch,
    trained,
    training_loss,
    validated_steps,
    validated_tokens,
    validates_first,
    validation_losses,
    warnings,
    weights,
    weights_trained_on_documents,
    workers,
)
from test_key_effects_fine_tuning import KEYS as KEYS_OF_FINE_TUNING
from test_key_effects_scenarios import SCENARIOS
from test_key_effects_values import VALUES
from tiers import cases, extra

from stoker.trainer.config.schema.key_index import schema_keys

pytestmark = pytest.mark.usefixtures("without_plots", "small_pystd")


@dataclass(frozen=True)
class Row:
    """`key` changes `observable` when it goes from its value in the base to `value`, with `others` held fixed."""

    key: str
    value: Any
    observable: Callable[[ConfigHarness, Changes], Any]
    others: Changes | None = None
    before: Any = ...

    def __str__(self) -> str:
        return f"{self.key}-{self.observable.__name__}"


FP8: Changes = {MODEL + "fp8": True, MODEL + "num_layers": 3}
DELAYED: Changes = FP8 | {MODEL + "fp8_recipe": "delayed", MODEL + "transformer_engine": True}
FP16 = {TRAINER + "precision": 16, TRAINER + "max_steps": 3}
ROWS = [
    Row(RECOMPUTE + "granularity", None, kept, WHOLE, before="full"),
    Row(RECOMPUTE + "num_layers", 2, kept, WHOLE, before=1),
    Row(RECOMPUTE + "num_layers", 2, kept, {**WHOLE, RECOMPUTE + "method": "block"}, before=1),
    Row(RECOMPUTE + "modules", ["norm"], kept, DEEP),
    Row(RECOMPUTE + "modules", ["mlp_activation"], kept, DEEP),
    Row(RECOMPUTE + "modules", ["core_attention"], kept, DEEP),
    Row(RECOMPUTE + "modules", ["moe"], kept, {**DEEP, **MOE}),
    Row(MODEL + "num_moe_experts", 4, shapes),
    Row(MODEL + "moe_router_topk", 3, logits, MOE),
    Row(MODEL + "moe_aux_loss_coeff", 0.5, gradients, MOE),
    Row(MODEL + "moe_z_loss_coeff", 0.5, gradients, MOE),
    Row(MODEL + "moe_input_jitter_eps", 0.5, gradients, MOE),
    Row(MODEL + "moe_router_force_load_balancing", True, gradients, MOE),
    Row(MODEL + "moe_token_dropping", True, flops, SPARE_CAPACITY),
    Row(MODEL + "moe_per_layer_logging", True, logged_names, SEQUENTIAL_MOE),
    Row(MODEL + "moe_expert_capacity_factor", 0.5, logits, MOE),
    Row(MODEL + "moe_pad_expert_input_to_capacity", True, flops, SPARE_CAPACITY),
    Row(MODEL + "moe_layer_recompute", True, router_calls, MOE),
    Row(MODEL + "moe_grouped_gemm", False, expert_implementation, MOE),
    Row(MODEL + "moe_router_pre_softmax", True, logits, MOE),
    Row(MODEL + "moe_ffn_hidden_size", 8, shapes, MOE),
    Row(MODEL + "moe_layer_freq", [0, 1], shapes, MOE),
    Row(MODEL + "moe_frequency", 2, shapes, MOE),
    Row(MODEL + "moe_dropout", 0.5, gradients, MOE),
    Row(MODEL + "moe_shared_expert_intermediate_size", 8, shapes, MOE),
    Row(MODEL + "moe_router_enable_expert_bias", True, trained, SIGMOID | {MODEL + "moe_router_bias_update_rate": 1.0}),
    Row(MODEL + "moe_router_bias_update_rate", 0.5, trained, EXPERT_BIAS),
    Row(MODEL + "moe_router_topk_scaling_factor", 2.0, logits, MOE),
    Row(MODEL + "moe_router_num_groups", 2, logits, {**MOE, MODEL + "moe_router_group_topk": 1}),
    Row(MODEL + "moe_router_group_topk", 1, logits, {**MOE, MODEL + "moe_router_num_groups": 2}),
    Row("name", "other", place),
    Row(TRAINER + "max_steps", 2, reported_steps),
    Row(TRAINER + "max_steps", 3, learning_rates),
    Row(TRAINER + "max_epochs", 1, reported_steps, {TRAINER + "overfit_batches": 1}),
    Row(TRAINER + "max_time", "00:00:00:00", stopped_by),
    Row(TRAINER + "log_every_n_steps", 2, reported_steps),
    Row(TRAINER + "val_check_interval", 1, validated_steps, VALIDATES),
    Row(TRAINER + "val_check_interval", 0.5, validated_steps, VALIDATES),
    Row(TRAINER + "val_check_interval", 1, checkpoints, {CALLBACK + "save_top_k": -1}),
    Row(TRAINER + "limit_val_batches", 2, validated_tokens, VALIDATES),
    Row(TRAINER + "limit_val_batches", 0.05, validated_tokens, VALIDATES),
    Row(TRAINER + "limit_val_batches", 0, validated_tokens, VALIDATES),
    # 5 of the 1,024 samples, in batches of 4
    Row(DATA + "validation_drop_last", True, validated_tokens, {**VALIDATES, TRAINER + "limit_val_batches": 0.005}),
    Row(TRAINER + "gradient_clip_val", 1e-3, trained),
    Row(TRAINER + "gradient_clip_val", None, trained, before=1e-3),
    Row(TRAINER + "enable_progress_bar", False, panel),
    Row(TRAINER + "enable_model_summary", True, summary, before=False),
    Row(TRAINER + "num_sanity_val_steps", 1, validates_first, VALIDATES),
    Row(MANAGER + "exp_dir", "elsewhere", place),
    Row(MANAGER + "explicit_log_dir", "here", place),
    Row(MANAGER + "name", "other", place),
    Row(MANAGER + "version", 7, place),
    Row(MANAGER + "version", "seven", place),
    Row(MANAGER + "use_datetime_version", False, place),
    Row(MANAGER + "resume_if_exists", True, place, before=False),
    Row(MANAGER + "create_checkpoint_callback", True, files),
    Row(CALLBACK + "save_top_k", 1, checkpoints, SAVES),
    Row(CALLBACK + "save_top_k", -1, checkpoints, SAVES),
    Row(CALLBACK + "save_last", False, checkpoints, {CALLBACK + "save_top_k": 0}),
    Row(CALLBACK + "every_n_train_steps", 1, checkpoints),
    Row(MANAGER + "create_tensorboard_logger", True, files),
    Row(MANAGER + "create_csv_logger", True, files),
    Row(MANAGER + "create_report", True, files),
    Row(MANAGER + "report_sample_tokens", 0, report_sample, {MANAGER + "create_report": True}),
    Row(MANAGER + "max_time_per_run", "00:00:00:00", stopped_by),
    Row(MANAGER + "create_early_stopping_callback", True, stopped_by, EVERY),
    Row(STOPPING + "min_delta", 0.0, stopped_by, STOPS, before=9.0),
    Row(STOPPING + "patience", 9, stopped_by, STOPS),
    Row(STOPPING + "verbose", False, logs_early_stopping, STOPS),
    Row(STOPPING + "stopping_threshold", 99.0, stopped_by, {**STOPS, STOPPING + "patience": 9}),
    Row(STOPPING + "divergence_threshold", 0.1, stopped_by, {**STOPS, STOPPING + "patience": 9}),
    Row(MANAGER + "ema.enable", True, validation_losses, AVERAGES, before=False),
    Row(MANAGER + "ema.decay", 0.1, validation_losses, AVERAGES),
    Row(MANAGER + "ema.validate_original_weights", True, validation_losses, AVERAGES),
    Row(MANAGER + "ema.every_n_steps", 2, validation_losses, AVERAGES),
    Row(TRAINER + "overfit_batches", 1, trained),
    Row(TRAINER + "fast_dev_run", 2, reported_steps),
    Row(TRAINER + "deterministic", True, algorithms),
    Row(TRAINER + "deterministic", "warn", algorithms),
    Row(TRAINER + "profile_steps", [2, 2], profiles, {TRAINER + "profiler": "pytorch"}, before=[1, 1]),
    Row(MODEL + "num_layers", 2, shapes),
    Row(MODEL + "hidden_size", 32, shapes),
    Row(MODEL + "ffn_hidden_size", 64, shapes),
    Row(MODEL + "num_attention_heads", 4, logits),
    Row(MODEL + "kv_channels", 4, shapes),
    Row(MODEL + "num_query_groups", 1, shapes),
    Row(MODEL + "layernorm_epsilon", 0.1, logits),
    Row(MODEL + "layernorm_zero_centered_gamma", True, norm_weight),
    Row(MODEL + "layernorm_zero_centered_gamma", True, norm_weight, {MODEL + "normalization": "rmsnorm"}),
    Row(MODEL + "openai_gelu", True, logits),
    Row(MODEL + "openai_gelu", True, logits, {MODEL + "activation": "geglu"}),
    Row(MODEL + "bias", False, shapes),
    Row(MODEL + "qkv_bias", True, shapes, {MODEL + "bias": False}),
    Row(MODEL + "hidden_dropout", 0.2, training_loss),
    Row(MODEL + "attention_dropout", 0.2, training_loss),
    Row(MODEL + "ffn_dropout", 0.2, training_loss),
    Row(MODEL + "init_method_std", 0.2, weights),
    Row(MODEL + "use_scaled_init_method", False, weights),
    Row(MODEL + "rotary_percentage", 0.5, logits, ROPE),
    Row(MODEL + "rotary_base", 100.0, logits, ROPE),
    Row(MODEL + "rotary_interleaved", True, logits, ROPE),
    Row(MODEL + "seq_len_interpolation_factor", 2.0, logits, ROPE),
    Row(MODEL + "scale_positional_embedding", True, logits, {**ROPE, MODEL + "rotary_original_length": 8}),
    Row(MODEL + "rotary_scaling_factor", 2.0, logits, LLAMA3_ROPE),
    Row(MODEL + "rotary_scaling_factor", 2.0, logits, YARN),
    Row(MODEL + "rotary_original_length", 16, logits, LLAMA3_ROPE),
    Row(MODEL + "rotary_original_length", 16, logits, YARN, before=1000),
    Row(MODEL + "rotary_low_turns", 0.1, logits, LLAMA3_ROPE),
    Row(MODEL + "rotary_low_turns", 0.1, logits, YARN),
    Row(MODEL + "rotary_high_turns", 2.0, logits, LLAMA3_ROPE),
    Row(MODEL + "rotary_high_turns", 2.0, logits, YARN),
    Row(MODEL + "num_attention_heads_alibi", 1, logits, ALIBI),
    Row(MODEL + "relative_attention_num_buckets", 8, shapes, BUCKETS),
    Row(MODEL + "relative_attention_max_distance", 4, logits, BUCKETS),
    Row(MODEL + "window_size", [1, 0], logits),
    Row(MODEL + "attn_logit_softcapping", 0.5, logits),
    Row(MODEL + "logits_soft_cap", 0.5, logits),
    Row(MODEL + "logits_soft_cap", 0.5, training_loss),
    Row(MODEL + "apply_embedding_scaling", True, logits),
    Row(MODEL + "qk_layernorm", True, shapes),
    Row(MODEL + "headscale", True, shapes),
    Row(MODEL + "apply_query_key_layer_scaling", True, warnings, before=False),
    Row(MODEL + "fp32_residual_connection", True, trained, {TRAINER + "precision": "bf16"}),
    Row(MODEL + "normalize_attention_scores", False, logits),
    Row(MODEL + "use_flash_attention", False, attention_backends),
    Row(MODEL + "transformer_engine", True, hopper_backend),
    Row(MODEL + "masked_softmax_fusion", False, softmax_fusion, {MODEL + "attention_backend": "unfused"}),
    Row(MODEL + "encoder_seq_length", 4, first_batch),
    Row(MODEL + "encoder_seq_length", 4, shapes),
    Row(MODEL + "max_position_embeddings", 32, shapes),
    Row(MODEL + "make_vocab_size_divisible_by", 7, shapes),
    Row(MODEL + "override_vocab_size", 500, shapes),
    Row(MODEL + "override_vocab_size", 260, first_batch),
    Row(MODEL + "share_embeddings_and_output_weights", False, shapes),
    Row(MODEL + "embedding_dropout", 0.2, training_loss),
    Row(MODEL + "embedding_dropout", 0.0, training_loss, {MODEL + "hidden_dropout": 0.2}),
    Row(MODEL + "embedding_init_method_std", 0.1, weights),
    Row(MODEL + "label_smoothing", 0.2, training_loss),
    Row(MODEL + "seed", 5, weights),
    Row(MODEL + "seed", 5, first_batch),
    Row(MODEL + "seed", 5, first_batch, TEXT),
    Row(MODEL + "compile", True, compiled),
    Row(MODEL + "micro_batch_size", 4, accumulation),
    Row(MODEL + "global_batch_size", 2, accumulation),
    Row(MODEL + "global_batch_size", 8, consumed),
    Row(MODEL + "megatron_amp_O2", False, arithmetic, {TRAINER + "precision": "bf16"}),
    Row(MODEL + "fp8", True, gradients),
    Row(MODEL + "fp8_e4m3", True, gradients, FP8),
    Row(MODEL + "fp8_margin", 8, gradients, FP8),
    Row(MODEL + "fp8_wgrad", False, gradients, FP8),
    Row(MODEL + "fp8_interval", 2, delayed_scales, DELAYED),
    Row(MODEL + "fp8_amax_history_len", 1, delayed_scales, DELAYED),
    Row(MODEL + "first_last_layers_bf16", True, gradients, FP8),
    Row(MODEL + "num_layers_at_start_in_bf16", 0, gradients, {**FP8, MODEL + "first_last_layers_bf16": True}),
    Row(MODEL + "num_layers_at_end_in_bf16", 0, gradients, {**FP8, MODEL + "first_last_layers_bf16": True}),
    Row(MODEL + "native_amp_init_scale", 64, loss_scales, FP16, before=1024),
    Row(MODEL + "native_amp_growth_interval", 2, loss_scales, FP16 | {MODEL + "native_amp_init_scale": 1024}),
    Row(MODEL + "hysteresis", 1, loss_scales, FP16),
    Row(MODEL + "do_layer_norm_weight_decay", True, optimizer_groups),
    Row(DATA + "splits_string", "500,250,250", data, TEXT),
    Row(DATA + "eod_mask_loss", True, num_target_labels, {MODEL + "encoder_seq_length": 4}),
    Row(DATA + "reset_position_ids", True, weights_trained_on_documents),
    Row(DATA + "reset_attention_mask", True, weights_trained_on_documents),
    Row(DATA + "reset_attention_mask", True, attention_masks, {MODEL + "attention_backend": "unfused"}),
    Row(DATA + "num_workers", 1, workers),
    Row(DATA + "seq_length_dec", 32, task_batch),
    Row(DATA + "seq_length_dec", 16, task_batch, PREFIX),
    Row(DATA + "masked_lm_prob", 0.3, task_batch),
    Row(DATA + "masked_lm_prob", 0.3, task_batch, NGRAMS),
    Row(DATA + "masked_lm_prob", 0.3, task_batch, {DATA + "dataset_type": "bert"}),
    Row(DATA + "mean_ngram_size", 1.0, task_batch),
    Row(DATA + "mean_ngram_size", 1.0, task_batch, NGRAMS),
    Row(DATA + "geometric_dist", True, task_batch),
    Row(DATA + "geometric_dist", False, task_batch, {**NGRAMS, DATA + "seq_length_dec": 32}),
    Row(DATA + "geometric_dist", True, task_batch, {DATA + "dataset_type": "bert"}),
    Row(DATA + "max_ngram_size", 1, task_batch, NGRAMS),
    Row(DATA + "favor_longer_ngrams", True, task_batch, {DATA + "geometric_dist": False, DATA + "masked_lm_prob": 0.4}),
    Row(DATA + "whole_word_masking", False, task_batch, NGRAMS),
    Row(DATA + "respect_document_boundaries", True, task_batch),
    Row(DATA + "short_seq_prob", 0.5, task_batch, PIECES),
    Row(DATA + "packed_sequence", True, task_batch, PIECES),
    Row(DATA + "packed_sequence", True, task_batch, {DATA + "dataset_type": "seq2seq"}),
    Row(DATA + "context_key", "other", task_batch, {DATA + "dataset_type": "seq2seq"}),
    Row(DATA + "label_key", "other", task_batch, {DATA + "dataset_type": "seq2seq"}),
    Row(DATA + "reset_attention_mask", True, task_batch, {DATA + "dataset_type": "bert"}),
    Row(DATA + "reset_position_ids", True, task_batch, {DATA + "dataset_type": "bert"}),
    Row(TOKENIZER + "num_sentinel_tokens", 20, task_batch),
    Row(TOKENIZER + "num_sentinel_tokens", 20, task_batch, {DATA + "dataset_type": "bert"}),
    Row(OPTIM + "lr", 1e-3, learning_rates),
    Row(OPTIM + "lr", 1e-3, trained),
    Row(OPTIM + "weight_decay", 0.5, optimizer_groups),
    Row(OPTIM + "weight_decay", 0.5, stepped),
    Row(OPTIM + "betas", [0.5, 0.98], stepped),
    Row(OPTIM + "betas", [0.9, 0.5], stepped),
    Row(OPTIM + "eps", 1e-2, stepped),
    Row(SCHED + "warmup_steps", 2, rates),
    Row(SCHED + "warmup_ratio", 0.5, rates),
    Row(SCHED + "constant_steps", 2, rates),
    Row(SCHED + "constant_ratio", 0.5, rates),
    Row(SCHED + "min_lr", 5e-3, rates),
    Row(SCHED + "min_lr", 5e-3, rates, {SCHED + "name": "WarmupAnnealing"}),
    Row(SCHED + "max_steps", 8, rates),
    Row(OPTIM + "weight_decay", 0.5, stepped, SGD),
    Row(OPTIM + "weight_decay", 0.5, stepped, ADAFACTOR),
    Row(OPTIM + "weight_decay", 0.5, stepped, MUON),
    Row(OPTIM + "momentum", 0.9, stepped, SGD),
    Row(OPTIM + "momentum", 0.5, stepped, MUON),
    Row(OPTIM + "nesterov", True, stepped, {**SGD, OPTIM + "momentum": 0.5}),
    Row(OPTIM + "nesterov", False, stepped, MUON),
    Row(OPTIM + "betas", [0.5, 0.98], stepped, MUON),
    Row(OPTIM + "eps", 1e-2, stepped, MUON),
    Row(OPTIM + "eps", [1e-3, 1e-3], stepped, ADAFACTOR),
    Row(OPTIM + "eps", [1e-30, 1.0], stepped, ADAFACTOR),
    Row(OPTIM + "clip_threshold", 0.1, stepped, ADAFACTOR),
    Row(OPTIM + "decay_rate", -0.1, stepped, ADAFACTOR),
    Row(OPTIM + "beta1", 0.5, stepped, ADAFACTOR),
    Row(OPTIM + "scale_parameter", False, stepped, ADAFACTOR),
    Row(OPTIM + "scale_parameter", True, stepped),
    Row(OPTIM + "relative_step", True, rates, ADAFACTOR),
    Row(OPTIM + "relative_step", True, stepped, ADAFACTOR),
    Row(OPTIM + "warmup_init", True, rates, {**ADAFACTOR, OPTIM + "relative_step": True}),
    Row(OPTIM + "ns_steps", 2, stepped, MUON),
    Row(SCHED + "hold_steps", 2, rates, {SCHED + "name": "WarmupHoldAnnealLinear"}),
    Row(SCHED + "hold_ratio", 0.5, rates, {SCHED + "name": "PolynomialHoldDecayAnnealing"}),
    Row(SCHED + "power", 2.0, rates, {SCHED + "name": "PolynomialDecayAnnealing"}),
    Row(
        SCHED + "decay_rate",
        1.0,
        rates,
        {SCHED + "name": "NoamHoldAnnealing", SCHED + "warmup_steps": 2},
    ),
    Row(SCHED + "d_model", 4, rates, {SCHED + "name": "NoamAnnealing"}, before=16),
]


BEFORE: dict[str, Any] = {}
"""Observations of a configuration that rows have in common."""


FIRST = {row.key: row for row in reversed(ROWS)}.values()


@pytest.mark.parametrize("row", cases([row for row in ROWS if row in FIRST or extra(row)], fast=48), ids=str)
def test_a_key_changes_what_it_says(row: Row, harness: ConfigHarness) -> None:
    others = dict(row.others or {})
    if row.observable in (data, first_batch) and others == TEXT:
        others[DATA + "path"] = str(harness.text)
    if row.before is not ...:
        others[row.key] = row.before
    after = row.observable(harness, {**others, row.key: row.value})
    same = f"{row.observable.__name__} {others}"
    if same not in BEFORE:
        BEFORE[same] = row.observable(harness, others)
    assert after != BEFORE[same]


def test_every_key_has_an_entry_and_every_entry_a_key() -> None:
    rows = {row.key for row in ROWS}
    keys = {key for key in schema_keys() if not key.startswith("model.peft.")} - KEYS_OF_FINE_TUNING
    assert rows | set(VALUES) | set(SCENARIOS) == keys
    assert set(VALUES) == {path for path in keys if len(schema_keys()[path].choices)}
    for path, values in VALUES.items():
        assert set(values.aliases) | set(values.aliases.values()) <= set(schema_keys()[path].choices)
    single = {path for path in keys if len(schema_keys()[path].choices) == 1}
    assert single <= set(SCENARIOS)
