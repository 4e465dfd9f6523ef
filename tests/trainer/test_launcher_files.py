"""Files in the style of the NeMo-Framework-Launcher, of GPT, Llama and T5 in its layouts: `config`, `plan`, `train`."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from config_helpers import write
from tiers import cases, full_only

from stoker.trainer.cli.main import main

JOB = """\
hydra: {{searchpath: ["file:///opt/NeMo/conf"]}}
run: {{name: {name}, results_dir: "${{base_results_dir}}/${{.name}}", time_limit: "0-04:00:00", dependency: singleton}}
trainer:
  {{num_nodes: {nodes}, devices: 8, accelerator: gpu, precision: bf16, logger: false, enable_checkpointing: false,
   use_distributed_sampler: false, max_epochs: null, max_steps: 75000, max_time: "01:00:00:00",
   val_check_interval: 2000, limit_val_batches: 50, limit_test_batches: 50,
   accumulate_grad_batches: 1, gradient_clip_val: 1.0, benchmark: false}}
exp_manager:
  explicit_log_dir: ${{training.run.results_dir}}/results
  name: megatron_{name}
  resume_if_exists: true
  checkpoint_callback_params:
    {{monitor: val_loss, save_top_k: 10, mode: min, always_save_nemo: false, save_nemo_on_train_end: false,
     model_parallel_size: "${{multiply:${{training.model.tensor_model_parallel_size}},1}}"}}
  log_step_timing: true
"""
MODEL = """\
  pipeline_model_parallel_size: 1
  make_vocab_size_divisible_by: 128
  gradient_as_bucket_view: true
  native_amp_init_scale: 4294967296
  megatron_amp_O2: true
  seed: 1234
  nsys_profile: {enabled: false, start_step: 10, end_step: 10, ranks: [0], gen_shape: false}
"""
OPTIM = """\
  optim:
    name: mcore_distributed_optim
    lr: 1.6e-4
    weight_decay: 0.1
    betas: [0.9, 0.95]
    bucket_cap_mb: 125
    overlap_grad_sync: true
    overlap_param_sync: true
    contiguous_grad_buffer: true
    sched: {name: CosineAnnealing, warmup_steps: 115, constant_steps: 12500, min_lr: 1.6e-5}
  data:
    data_impl: mock
    splits_string: "99990,8,2"
    skip_warmup: true
    num_workers: 2
    dataloader_type: single
    reset_position_ids: false
    reset_attention_mask: false
    eod_mask_loss: false
"""
GPT = """\
  encoder_seq_length: {length}
  max_position_embeddings: ${{.encoder_seq_length}}
  num_layers: {layers}
  hidden_size: {hidden}
  ffn_hidden_size: ${{multiply:4, ${{.hidden_size}}}}
  num_attention_heads: {heads}
  apply_query_key_layer_scaling: true
  hidden_dropout: 0.1
  attention_dropout: 0.1
  layernorm_epsilon: 1e-5
  bias_activation_fusion: true
  masked_softmax_fusion: true
  transformer_engine: true
  fp8: false
  fp8_hybrid: true
  fsdp: false
  tokenizer: {{library: megatron, type: GPT2BPETokenizer, vocab_file: "${{data_dir}}/v", merge_file: "${{data_dir}}/m"}}
"""
LLAMA = """\
  encoder_seq_length: 8192
  max_position_embeddings: 8192
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 14336
  num_attention_heads: 32
  num_query_groups: 8
  hidden_dropout: 0.0
  attention_dropout: 0.0
  normalization: rmsnorm
  bias: false
  activation: fast-swiglu
  position_embedding_type: rope
  rotary_percentage: 1.0
  share_embeddings_and_output_weights: false
  transformer_engine: true
  tokenizer: {library: huggingface, type: meta-llama/Meta-Llama-3-8B, use_fast: true}
"""
T5_STACK = """\
    {num_layers: 24, hidden_size: 2048, ffn_hidden_size: 5120, num_attention_heads: 32, kv_channels: 64,
     init_method_std: 0.015, hidden_dropout: 0.1, attention_dropout: 0.1, position_embedding_type: learned_absolute,
     layernorm_epsilon: 1e-5, arch: transformer, activation: geglu, bias_activation_fusion: true, masked_softmax_fusion:
     true, activations_checkpoint_granularity: full, activations_checkpoint_method: block,
     activations_checkpoint_num_layers: 0}
"""


def layout(micro: int, batch: int, **sizes: int | str) -> str:
    lines = {"micro_batch_size": micro, "global_batch_size": batch, **sizes}
    return "model:\n" + "".join(f"  {name}: {value}\n" for name, value in lines.items()) + MODEL


def gpt_file(name: str, nodes: int, shape: dict[str, int], head: str) -> str:
    length = "    seq_length: ${training.model.encoder_seq_length}\n"
    return JOB.format(name=name, nodes=nodes) + head + GPT.format(**shape) + OPTIM + length


TP, CP, SP = "tensor_model_parallel_size", "context_parallel_size", "sequence_parallel"
FILES = {
    "llama3_8b": JOB.format(name="llama3_8b", nodes=16)
    + layout(1, 2048, **{TP: 1, CP: 2})
    + LLAMA
    + OPTIM
    + "    seq_length: 8192\n",
    "gpt3_5b": gpt_file(
        "gpt3_5b", 16, {"length": 2048, "layers": 24, "hidden": 4096, "heads": 32}, layout(4, 2048, **{TP: 1, CP: 1})
    ),
    "gpt3_20b": gpt_file(
        "gpt3_20b",
        64,
        {"length": 2048, "layers": 44, "hidden": 6144, "heads": 48},
        layout(2, 2048, **{TP: 2, CP: 1, SP: "true"}),
    ),
    "t5_3b": JOB.format(name="t5_3b", nodes=20)
    + layout(24, 1920, **{TP: 2, "seq_length": 512, "max_position_embeddings": "${.seq_length}"})
    + "  transformer_engine: true\n"
    + f"  encoder:\n{T5_STACK}  decoder:\n{T5_STACK}"
    + "  tokenizer: {library: megatron, type: GPT2BPETokenizer}\n"
    + OPTIM
    + "    seq_length: 512\n    seq_length_dec: 128\n    dataset_type: t5\n    short_seq_prob: 0.0\n",
    "gpt3_5b_32k": gpt_file(
        "gpt3_5b_32k", 2, {"length": 32768, "layers": 24, "hidden": 4096, "heads": 32}, layout(1, 32, **{TP: 8, CP: 1})
    ),
}
"""Layouts as published: the launcher's 5b_32k has tensor 8."""
AXES = {
    "llama3_8b": "128 processes (context 2, data 64)",
    "gpt3_5b": "128 processes, distributed optimizer",
    "gpt3_20b": "512 processes (tensor 2 (sequence parallel), data 256)",
    "t5_3b": "160 processes (tensor 2, data 80)",
    "gpt3_5b_32k": "16 processes (tensor 8, data 2)",
}
SMALL = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 8, "kv_channels": 8}
SHRUNK = {
    "llama3_8b": (4, {"num_query_groups": 2, "encoder_seq_length": 32, "data.seq_length": 32}),
    "gpt3_5b": (2, {"encoder_seq_length": 32}),
    "gpt3_20b": (4, {"encoder_seq_length": 32}),
    "t5_3b": (2, {"seq_length": 32, "data.seq_length": 32, "data.seq_length_dec": 16, "micro_batch_size": 4}),
    "gpt3_5b_32k": (8, {"encoder_seq_length": 64}),
}
"""Processes, and keys below `model` that the run needs small; every parallel size is that of the file."""


def stage(folder: Path, name: str) -> list[str]:
    write(folder, f"training/{name}", FILES[name])
    directories = ["data_dir=/data", f"base_results_dir={folder / 'results'}"]
    return [f"--config-dir={folder / 'training'}", f"--config-name={name}", *directories]


@pytest.mark.parametrize("name", cases(FILES, fast=2))
def test_config_and_plan_accept_them(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = stage(tmp_path, name)
    assert main(["config", *arguments]) == 0
    assert main(["plan", *arguments, "--device", "h100"]) == 0
    assert AXES[name] in capfd.readouterr().out


@full_only
@pytest.mark.parametrize("name", FILES)
def test_they_train_when_shrunk(name: str, tmp_path: Path) -> None:
    processes, keys = SHRUNK[name]
    stacks = ("model.encoder", "model.decoder") if name == "t5_3b" else ("model",)
    shape = {f"{stack}.{key}": value for stack in stacks for key, value in SMALL.items()}
    shape |= {f"model.{key}": value for key, value in keys.items()}
    shape |= {"model.global_batch_size": 16, "model.override_vocab_size": 512, "model.transformer_engine": "null"}
    run = {"num_nodes": 1, "devices": processes, "accelerator": "cpu", "max_steps": 3, "log_every_n_steps": 1}
    shape |= {f"trainer.{key}": value for key, value in (run | {"limit_val_batches": 0}).items()}
    overrides = [f"{key}={value}" for key, value in shape.items()]
    command = [sys.executable, "-m", "stoker", "train", *stage(tmp_path, name), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    (log,) = (tmp_path / "results").rglob("metrics.jsonl")
    losses = [found["loss"] for found in map(json.loads, log.read_text().splitlines()) if "loss" in found]
    assert len(losses) == 3
    assert losses == pytest.approx([math.log(512)] * 3, abs=0.1)
