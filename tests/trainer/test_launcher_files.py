"""Files of the sizes and layouts of the NeMo-Framework-Launcher pass `config` and `plan`, and train when shrunk.

The launcher's own files are not copied: these have its keys, blocks, references and functions.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from config_helpers import write
from run_metrics import metric_rows
from tiers import cases, full_only

from stoker.trainer.cli.main import main
from stoker.trainer.utils.errors import EXIT_BAD_INPUT, EXIT_OK

RUN = """\
defaults:
  - _self_
  - optional tp_overlap@model.ub_tp_comm_overlap_cfg: NAME_overlap
hydra:
  searchpath: [file:///opt/NeMo/conf]
run: {name: NAME, results_dir: '${base_results_dir}/${.name}', time_limit: '1-00:00:00', dependency: singleton}
trainer:
  {num_nodes: NODES, devices: 8, accelerator: gpu, precision: bf16, logger: False, enable_checkpointing: False,
   use_distributed_sampler: False, max_epochs: null, max_steps: 75000, max_time: '05:23:30:00', log_every_n_steps: 10,
   val_check_interval: 2000, limit_val_batches: 50, limit_test_batches: 50, accumulate_grad_batches: 1,
   gradient_clip_val: 1.0}
exp_manager:
  explicit_log_dir: ${training.run.results_dir}/results
  exp_dir: null
  name: megatron
  create_wandb_logger: False
  wandb_logger_kwargs: {project: NAME, name: '${training.run.name}'}
  resume_if_exists: True
  resume_ignore_no_checkpoint: True
  create_checkpoint_callback: True
  checkpoint_callback_params:
    {monitor: val_loss, save_top_k: 10, mode: min, always_save_nemo: False, save_nemo_on_train_end: False,
     filename: 'megatron--{val_loss:.2f}-{step}-{consumed_samples}',
     model_parallel_size:
       '${multiply:${training.model.tensor_model_parallel_size}, ${training.model.pipeline_model_parallel_size}}'}
  log_step_timing: True
  step_timing_kwargs: {sync_cuda: True, buffer_size: 5}
"""
SENTENCEPIECE = """\
{library: sentencepiece, type: null, model: '${data_dir}/256k.model', delimiter: null, vocab_file: null,
                merge_file: null, sentencepiece_legacy: false}"""
MODEL = """\
  transformer_engine: True, make_vocab_size_divisible_by: 128, pre_process: True, post_process: True,
  megatron_amp_O2: True, grad_allreduce_chunk_size_mb: 125, gradient_as_bucket_view: True,
  native_amp_init_scale: 4294967296, native_amp_growth_interval: 1000, fp16_lm_cross_entropy: False, seed: 1234,
  sync_batch_comm: False, use_cpu_initialization: False, apex_transformer_log_level: 30, resume_from_checkpoint: null,
  nsys_profile: {enabled: False, trace: [nvtx, cuda], start_step: 10, end_step: 10, ranks: [0], gen_shape: False},
"""
GPT = """\
  mcore_gpt: True, rampup_batch_size: null, virtual_pipeline_model_parallel_size: null, kv_channels: null,
   apply_query_key_layer_scaling: True, layernorm_epsilon: 1e-5, persist_layer_norm: True, grad_div_ar_fusion: True,
   gradient_accumulation_fusion: True, bias_activation_fusion: True, bias_dropout_add_fusion: True,
   masked_softmax_fusion: True, activations_checkpoint_granularity: null, activations_checkpoint_method: null,
   activations_checkpoint_num_layers: null, num_micro_batches_with_partial_activation_checkpoints: null,
   activations_checkpoint_layers_per_pipeline: null, hysteresis: 2, fp32_residual_connection: False, onnx_safe: False,
   fp8: False, fp8_e4m3: False, fp8_hybrid: True, fp8_margin: 0, fp8_interval: 1, fp8_amax_history_len: 1024,
   fp8_amax_compute_algo: max, gc_interval: 100,
   optim: {name: mcore_distributed_optim, bucket_cap_mb: 400, overlap_grad_sync: True, overlap_param_sync: True,
           contiguous_grad_buffer: True, contiguous_param_buffer: True, lr: 1.6e-4, weight_decay: 0.1,
           betas: [0.9, 0.95],
           sched: {name: CosineAnnealing, warmup_steps: 115, constant_steps: 12500, min_lr: 1.6e-5}},
   data: {data_impl: mmap, splits_string: '99990,8,2', seq_length: '${training.model.encoder_seq_length}',
          skip_warmup: True, num_workers: 2, dataloader_type: single, reset_position_ids: PACKED,
          reset_attention_mask: PACKED, eod_mask_loss: False, index_mapping_dir: null,
          data_prefix: [.5, '${data_dir}/a_text_document', .5, '${data_dir}/b_text_document']},
"""
GPT3 = (
    GPT.replace("PACKED", "False")
    + """\
   ffn_hidden_size: '${multiply:4, ${.hidden_size}}', hidden_dropout: 0.1, attention_dropout: 0.1,
   num_query_groups: null, fsdp: False, fsdp_sharding_strategy: full, fsdp_grad_reduce_dtype: 32,
   fsdp_sharded_checkpoint: False, overlap_p2p_comm: False, batch_p2p_comm: True, sharp: False, fp8_wgrad: True,
   tokenizer: {library: megatron, type: GPT2BPETokenizer, model: null, delimiter: null,
                vocab_file: '${data_dir}/bpe/vocab.json', merge_file: '${data_dir}/bpe/merges.txt'},
"""
)
LLAMA = (
    GPT.replace("PACKED", "true")
    + """\
   use_scaled_init_method: true, hidden_dropout: 0.0, attention_dropout: 0.0, ffn_dropout: 0.0, normalization: rmsnorm,
   do_layer_norm_weight_decay: false, bias: false, activation: fast-swiglu, headscale: false,
   transformer_block_type: pre_ln, openai_gelu: false, normalize_attention_scores: true, position_embedding_type: rope,
   rotary_percentage: 1.0, apply_rope_fusion: true, cross_entropy_loss_fusion: true, attention_type: multihead,
   share_embeddings_and_output_weights: false, deterministic_mode: false, use_flash_attention: true,
   tokenizer: {library: huggingface, type: meta-llama/Meta-Llama-3-8B, use_fast: true},
"""
)
MIXTRAL = (
    LLAMA.replace("true, eod", "False, eod").replace("position_ids: true", "position_ids: False")
    + """\
   moe_grouped_gemm: false, moe_router_topk: 2, num_moe_experts: 8, rotary_base: 1000000.0, reduce_amax: true,
   ub_tp_comm_overlap_cfg: null, use_emha: false, seq_len_interpolation_factor: null, precision: bf16,
   get_attention_mask_from_fusion: true,
   mcore_customization_config: {new_decoder_architecture: false, parallel_attention: false},
"""
)
NEMOTRON = (
    LLAMA.replace("position_ids: true", "position_ids: False")
    .replace("attention_mask: true", "attention_mask: False")
    .replace("normalization: rmsnorm", "normalization: layernorm1p, layernorm_zero_centered_gamma: True")
    .replace("fast-swiglu", "squared-relu")
    .replace("mcore_distributed_optim,", "mcore_distributed_optim, grad_sync_dtype: bf16, dtype: bf16,")
    .replace("rotary_percentage: 1.0", "rotary_percentage: 0.5")
    .replace("{library: huggingface, type: meta-llama/Meta-Llama-3-8B, use_fast: true}", SENTENCEPIECE)
    + """\
   fsdp: False, fsdp_sharding_strategy: full, fsdp_grad_reduce_dtype: 32, fsdp_sharded_checkpoint: False,
   enable_vboost: True, deteministic_mode: False, sharp: False, fp8_wgrad: True,
"""
)
STACK = """{num_layers: 24, hidden_size: 2048, ffn_hidden_size: 5120, num_attention_heads: 32, kv_channels: 64,
    init_method_std: 0.015, hidden_dropout: 0.1, attention_dropout: 0.1, position_embedding_type: learned_absolute,
    relative_attention_num_buckets: 32, relative_attention_max_distance: 128,
    relative_position_bias_self_attention_only: True, apply_query_key_layer_scaling: True, layernorm_epsilon: 1e-5,
    persist_layer_norm: True, bias_activation_fusion: True, grad_div_ar_fusion: True, masked_softmax_fusion: True,
    bias_dropout_add_fusion: True, bias: True, normalization: layernorm, arch: transformer, activation: geglu,
    headscale: False, transformer_block_type: pre_ln, openai_gelu: False, onnx_safe: False,
    fp32_residual_connection: False, activations_checkpoint_granularity: full, activations_checkpoint_method: block,
    activations_checkpoint_num_layers: 0}"""
T5 = (
    f"  encoder: {STACK}, decoder: {STACK},"
    + """
  mcore_t5: True, pipeline_model_parallel_split_rank: '${divide_floor:${.pipeline_model_parallel_size}, 2}',
   max_position_embeddings: '${.seq_length}', share_token_embeddings: True,
   share_decoder_tokens_head_embeddings: True,
   tokenizer: {library: megatron, type: BertWordPieceCase, model: null, vocab_file: '${data_dir}/bpe/vocab.txt',
                merge_file: null, num_sentinel_tokens: 100},
   optim: {name: distributed_fused_adam, bucket_cap_mb: 200, overlap_grad_sync: False, contiguous_grad_buffer: True,
            lr: 0.0001, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.01,
            sched: {name: WarmupAnnealing, min_lr: 0.00001, last_epoch: -1, warmup_ratio: 0.01}},
   data: {data_impl: mmap, splits_string: '999982,9,9', seq_length: 512, seq_length_dec: 128, skip_warmup: True,
           num_workers: 4, dataloader_type: single, masked_lm_prob: 0.15, dataset_type: t5, short_seq_prob: 0.0,
           max_ngram_size: 10, mean_ngram_size: null, geometric_dist: True, permutation: False,
           whole_word_masking: True, favor_longer_ngrams: False, respect_document_boundaries: True,
           index_mapping_dir: null, data_prefix: [1.0, '${data_dir}/a_text_document']},
"""
)
WIDE = "num_layers: 24, hidden_size: 4096, ffn_hidden_size: 10240, num_attention_heads: 64"
FILES = {
    "llama3_8b": (
        16,
        LLAMA,
        "micro_batch_size: 1, global_batch_size: 2048, tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1,"
        "context_parallel_size: 2, sequence_parallel: false, encoder_seq_length: 8192, max_position_embeddings: 8192,"
        "num_layers: 32, hidden_size: 4096, ffn_hidden_size: 14336, num_attention_heads: 32, num_query_groups: 8,"
        "init_method_std: 0.01, ub_tp_comm_overlap: false",
    ),
    "gpt3_5b": (
        16,
        GPT3,
        "micro_batch_size: 4, global_batch_size: 2048, tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1,"
        "context_parallel_size: 1, sequence_parallel: False, encoder_seq_length: 2048, max_position_embeddings: 2048,"
        "num_layers: 24, hidden_size: 4096, num_attention_heads: 32, init_method_std: 0.01, ub_tp_comm_overlap: False",
    ),
    "gpt3_20b": (
        64,
        GPT3,
        "micro_batch_size: 2, global_batch_size: 2048, tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1,"
        "context_parallel_size: 1, sequence_parallel: True, encoder_seq_length: 2048, max_position_embeddings: 2048,"
        "num_layers: 44, hidden_size: 6144, num_attention_heads: 48, init_method_std: 0.008, ub_tp_comm_overlap: True",
    ),
    "gpt3_5b_32k": (
        2,
        GPT3,
        "micro_batch_size: 1, global_batch_size: 32, tensor_model_parallel_size: 8, pipeline_model_parallel_size: 1,"
        "context_parallel_size: 1, sequence_parallel: False, encoder_seq_length: 32768,"
        "max_position_embeddings: '${.encoder_seq_length}', num_layers: 24, hidden_size: 4096,"
        "num_attention_heads: 32, init_method_std: 0.01, ub_tp_comm_overlap: False",
    ),
    # the launcher's file of this size has four pipeline stages
    "gpt3_40b_32k": (
        16,
        GPT3,
        "micro_batch_size: 1, global_batch_size: 32, tensor_model_parallel_size: 8, pipeline_model_parallel_size: 1,"
        "context_parallel_size: 2, sequence_parallel: True, encoder_seq_length: 32768,"
        "max_position_embeddings: '${.encoder_seq_length}', num_layers: 48, hidden_size: 8192,"
        "num_attention_heads: 64, init_method_std: 0.007, ub_tp_comm_overlap: True",
    ),
    "gpt3_175b": (
        128,
        GPT3,
        "micro_batch_size: 1, global_batch_size: 2048, tensor_model_parallel_size: 4, pipeline_model_parallel_size: 8,"
        "virtual_pipeline_model_parallel_size: 12, sequence_parallel: True, encoder_seq_length: 2048,"
        "max_position_embeddings: 2048, num_layers: 96, hidden_size: 12288, num_attention_heads: 96,"
        "init_method_std: 0.006, activations_checkpoint_granularity: selective, activations_checkpoint_method: block,"
        "activations_checkpoint_num_layers: 0, overlap_p2p_comm: True, batch_p2p_comm: False, ub_tp_comm_overlap: True",
    ),
    "llama3_70b": (
        128,
        LLAMA,
        "micro_batch_size: 1, global_batch_size: 2048, tensor_model_parallel_size: 4, pipeline_model_parallel_size: 4,"
        "virtual_pipeline_model_parallel_size: 5, context_parallel_size: 2, sequence_parallel: true,"
        "encoder_seq_length: 8192, max_position_embeddings: 8192, num_layers: 80, hidden_size: 8192,"
        "ffn_hidden_size: 28672, num_attention_heads: 64, num_query_groups: 8, init_method_std: 0.008944,"
        "defer_embedding_wgrad_compute: true, wgrad_deferral_limit: 22, overlap_p2p_comm: true, batch_p2p_comm: false,"
        "ub_tp_comm_overlap: true",
    ),
    "mixtral_8x7b": (
        8,
        MIXTRAL,
        "micro_batch_size: 1, global_batch_size: 256, tensor_model_parallel_size: 1, pipeline_model_parallel_size: 4,"
        "expert_model_parallel_size: 8, virtual_pipeline_model_parallel_size: 8, sequence_parallel: true,"
        "encoder_seq_length: 4096, max_position_embeddings: 32768, num_layers: 32, hidden_size: 4096,"
        "ffn_hidden_size: 14336, num_attention_heads: 32, num_query_groups: 8, init_method_std: 0.02,"
        "moe_token_dispatcher_type: alltoall, moe_pad_expert_input_to_capacity: True, moe_expert_capacity_factor: 1.0,"
        "moe_aux_loss_coeff: 0.01, overlap_p2p_comm: true, batch_p2p_comm: false, ub_tp_comm_overlap: false",
    ),
    "nemotron_340b": (
        768,
        NEMOTRON,
        "micro_batch_size: 1, global_batch_size: 2304, tensor_model_parallel_size: 8, pipeline_model_parallel_size: 8,"
        "virtual_pipeline_model_parallel_size: 12, context_parallel_size: 1, sequence_parallel: true,"
        "encoder_seq_length: 4096, max_position_embeddings: 4096, num_layers: 96, hidden_size: 18432,"
        "ffn_hidden_size: '${multiply:4, ${.hidden_size}}', num_attention_heads: 96, num_query_groups: 8,"
        "init_method_std: 0.0063, defer_embedding_wgrad_compute: True, wgrad_deferral_limit: 22,"
        "overlap_p2p_comm: True, batch_p2p_comm: False, ub_tp_comm_overlap: True",
    ),
    "mixtral_8x22b": (
        48,
        MIXTRAL,
        "micro_batch_size: 1, global_batch_size: 1, tensor_model_parallel_size: 8, pipeline_model_parallel_size: 2,"
        "virtual_pipeline_model_parallel_size: null, sequence_parallel: true, encoder_seq_length: 65536,"
        "max_position_embeddings: 65536, num_layers: 56, hidden_size: 6144, ffn_hidden_size: 16384,"
        "num_attention_heads: 48, num_query_groups: 8, init_method_std: 0.02, use_flash_attention: false",
    ),
    "t5_11b": (
        20,
        T5.replace("num_layers: 24, hidden_size: 2048, ffn_hidden_size: 5120, num_attention_heads: 32", WIDE),
        "micro_batch_size: 24, global_batch_size: 1920, tensor_model_parallel_size: 4,"
        "pipeline_model_parallel_size: 1, seq_length: 512",
    ),
    "t5_3b": (
        20,
        T5,
        "micro_batch_size: 24, global_batch_size: 1920, tensor_model_parallel_size: 2,"
        "pipeline_model_parallel_size: 1, seq_length: 512",
    ),
}
"""Number of nodes, keys of the model that files of its kind share, and its own."""

LAYOUTS = {
    "llama3_8b": (128, {"data": 64, "context": 2}),
    "gpt3_5b": (128, {"data": 128}),
    "gpt3_20b": (512, {"data": 256, "tensor": 2, "sequence": True, "overlap_gather": True, "overlap_scatter": True}),
    "gpt3_5b_32k": (16, {"data": 2, "tensor": 8}),
    "gpt3_40b_32k": (128, {"data": 8, "tensor": 8, "context": 2, "sequence": True}),
    "gpt3_175b": (1024, {"data": 32, "tensor": 4, "pipeline": 8, "sequence": True}),
    "llama3_70b": (1024, {"data": 32, "tensor": 4, "pipeline": 4, "context": 2, "sequence": True}),
    "mixtral_8x7b": (64, {"data": 16, "pipeline": 4, "expert": 8}),
    "nemotron_340b": (6144, {"data": 96, "tensor": 8, "pipeline": 8, "sequence": True}),
    "t5_11b": (160, {"data": 40, "tensor": 4}),
    "t5_3b": (160, {"data": 80, "tensor": 2}),
}
"""Number of processes, and sizes of the mesh."""
STEPS = (
    "trainer.accelerator=cpu trainer.num_nodes=1 trainer.max_steps=3 trainer.val_check_interval=3"
    " trainer.limit_val_batches=1 trainer.log_every_n_steps=1 model.transformer_engine=null"
    " model.override_vocab_size=512 model.global_batch_size=8"
)
WIDTH = "model.num_layers=2 model.hidden_size=64 model.num_attention_heads=8 model.encoder_seq_length=32"
STAGES = " model.pipeline_model_parallel_size=2 model.virtual_pipeline_model_parallel_size=2"
DEEP = WIDTH.replace("num_layers=2", "num_layers=4") + STAGES
STACKS = "".join(
    f" model.{stack}.{key}"
    for stack in ("encoder", "decoder")
    for key in ("num_layers=2", "hidden_size=64", "ffn_hidden_size=128", "num_attention_heads=4", "kv_channels=16")
)
SMALL = {
    "llama3_8b": (4, f"{WIDTH} model.ffn_hidden_size=128 model.num_query_groups=2"),
    "gpt3_5b": (2, WIDTH),
    "gpt3_20b": (4, WIDTH),
    "gpt3_5b_32k": (8, WIDTH),
    "gpt3_40b_32k": (4, f"{WIDTH} model.tensor_model_parallel_size=2"),
    "gpt3_175b": (4, f"{DEEP} model.tensor_model_parallel_size=2"),
    "llama3_70b": (
        8,
        f"{DEEP} model.tensor_model_parallel_size=2 model.ffn_hidden_size=128 model.num_query_groups=2",
    ),
    "mixtral_8x7b": (
        4,
        f"{DEEP} model.expert_model_parallel_size=2 model.ffn_hidden_size=128 model.num_query_groups=2",
    ),
    "nemotron_340b": (4, f"{DEEP} model.tensor_model_parallel_size=2"),
    "t5_11b": (
        4,
        f"model.micro_batch_size=4 model.seq_length=32 model.data.seq_length=32 model.data.seq_length_dec=16{STACKS}",
    ),
    "t5_3b": (
        2,
        f"model.micro_batch_size=4 model.seq_length=32 model.data.seq_length=32 model.data.seq_length_dec=16{STACKS}",
    ),
}
"""Number of processes, and overrides of width, depth and, beyond 8 processes, parallel sizes."""


def arguments(name: str, folder: Path) -> list[str]:
    """Write the file where the launcher has it, and return the arguments that choose it, with mock data."""
    nodes, shared, own = FILES[name]
    for key in re.findall(r"(\w+): ", own):
        shared = re.sub(rf"(?<!\w){key}: [^,{{]+, *", "", shared)
    head = RUN.replace("NAME", name).replace("NODES", str(nodes))
    write(folder, f"training/{name}", f"{head}model: {{\n{MODEL}{shared}{own}}}\n")
    mock = ["data_dir=/data", f"base_results_dir={folder}", "model.data.data_impl=mock", "~model.data.data_prefix"]
    return ["--config-dir", str(folder / "training"), "--config-name", name, *mock]


@pytest.mark.parametrize("name", cases(LAYOUTS, fast=4))
def test_config_and_plan_accept_the_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(name, tmp_path)
    assert main(["config", *given]) == EXIT_OK, capsys.readouterr().err
    assert "needs TransformerEngine" in capsys.readouterr().err
    assert main(["plan", *given, "--device", "h100", "--json"]) == EXIT_OK
    plan = json.loads(capsys.readouterr().out)
    processes, mesh = LAYOUTS[name]
    assert (plan["processes"], plan["mesh"]) == (processes, plan["mesh"] | mesh)


def test_a_batch_that_no_ranks_can_share_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in NeMo, a global batch of one sample suits no 24 data-parallel ranks."""
    assert main(["config", *arguments("mixtral_8x22b", tmp_path)]) == EXIT_BAD_INPUT
    told = capsys.readouterr().err
    assert "`global_batch_size` (1) must be a multiple of `micro_batch_size` (1) * data-parallel ranks (24)" in told
    assert "fix: model.global_batch_size=24" in told
    assert "1 error in the configuration" in told
    assert main(["config", *arguments("mixtral_8x22b", tmp_path), "model.global_batch_size=24"]) == EXIT_OK


@full_only
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_file_trains_when_shrunk(name: str, tmp_path: Path) -> None:
    processes, width = SMALL[name]
    overrides = [*STEPS.split(), *width.split(), f"trainer.devices={processes}"]
    command = [sys.executable, "-m", "stoker", "train", *arguments(name, tmp_path), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == EXIT_OK, done.stderr
    run = tmp_path / name / "results"
    assert len(json.loads((run / "environment.json").read_text())["processes"]) == processes
    lines = metric_rows(run)
    losses = [line.get("loss", line.get("val_loss")) for line in lines]  # of three steps and a validation
    assert losses == pytest.approx([math.log(512)] * 4, abs=0.1)
    assert (run / "checkpoints" / "step-3").is_dir()
