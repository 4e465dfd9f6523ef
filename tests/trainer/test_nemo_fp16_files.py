"""Files with the keys and values of NeMo's stock files in fp16 load without a word about precision, and train."""

from pathlib import Path

import pytest
from config_helpers import write
from run_metrics import metric_rows
from tiers import full_only

from stoker.trainer.cli.main import main
from stoker.trainer.utils.errors import EXIT_OK

TRAINER = """\
name: NAME
restore_from_path: null
trainer:
  {devices: 1, num_nodes: 1, accelerator: gpu, precision: PRECISION, logger: False, enable_checkpointing: False,
   use_distributed_sampler: False, max_epochs: -1, max_steps: 100000, log_every_n_steps: 10, val_check_interval: 100,
   limit_val_batches: 50, limit_test_batches: 500, accumulate_grad_batches: 1, gradient_clip_val: 1.0, benchmark: False}
exp_manager: {explicit_log_dir: null, exp_dir: null, name: NAME, create_wandb_logger: False, resume_if_exists: False}
"""
STACK = """num_layers: 12, hidden_size: 768, ffn_hidden_size: 3072, num_attention_heads: 12, init_method_std: 0.02,
   hidden_dropout: 0.1, attention_dropout: 0.1, kv_channels: null, apply_query_key_layer_scaling: APPLY,
   layernorm_epsilon: 1e-5, persist_layer_norm: True, grad_div_ar_fusion: True, gradient_as_bucket_view: True,
   masked_softmax_fusion: True, bias_dropout_add_fusion: True, bias: True, normalization: layernorm,
   fp32_residual_connection: False, onnx_safe: False, openai_gelu: False"""
COMMON = """micro_batch_size: 4, global_batch_size: 8, tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1,
   native_amp_init_scale: 4294967296, native_amp_growth_interval: 1000, hysteresis: 2, fp16_lm_cross_entropy: False,
   megatron_amp_O2: O2, seed: 1234, use_cpu_initialization: False, apex_transformer_log_level: 30,
   make_vocab_size_divisible_by: 128, resume_from_checkpoint: null, grad_allreduce_chunk_size_mb: 125,
   tokenizer: {library: byte-level}, optim: {name: fused_adam, lr: 2e-4, weight_decay: 0.01, betas: [0.9, 0.98],
    sched: {name: CosineAnnealing, warmup_steps: 500, constant_steps: 50000, min_lr: 2e-5}}"""
DATA = "data_prefix: [], data_impl: mmap, splits_string: '900,50,50', skip_warmup: True, num_workers: 2"
MODELS = {
    "gpt": f"model: {{{COMMON}, {STACK}, encoder_seq_length: 512, max_position_embeddings: 512, pre_process: True,"
    f"  post_process: True, mcore_gpt: False, data: {{{DATA}, seq_length: 512, eod_mask_loss: False}}}}",
    "bert": f"model: {{family: bert, {COMMON}, {STACK}, encoder_seq_length: 512, max_position_embeddings: 512,"
    f"  bert_binary_head: False, mcore_bert: False, data: {{{DATA}, seq_length: 512, masked_lm_prob: 0.15}}}}",
    "t5": f"model: {{{COMMON}, seq_length: 512, max_position_embeddings: 512, mcore_t5: False,"
    f"  encoder: {{{STACK}, arch: transformer}}, decoder: {{{STACK}, arch: transformer}},"
    f"  data: {{{DATA}, seq_length: 512, seq_length_dec: 128, dataset_type: t5, masked_lm_prob: 0.15}}}}",
}
SHRUNK = (
    "trainer.accelerator=cpu trainer.max_steps=3 trainer.val_check_interval=3 trainer.limit_val_batches=1 "
    "trainer.log_every_n_steps=1 exp_manager.create_tensorboard_logger=false model.optim.sched.warmup_steps=1 "
    "model.optim.sched.constant_steps=0 model.data.data_impl=mock ~model.data.data_prefix "
    "model.data.seq_length=32 model.data.num_workers=0 model.native_amp_init_scale=1024"
)
WIDTH = ("num_layers=2", "hidden_size=64", "ffn_hidden_size=128", "num_attention_heads=4")


FILES = [
    ("bert", "16", True), ("t5", "16", False), ("gpt", "16", False), ("gpt", "16", True), ("gpt", "'16'", True),
    ("gpt", "16-mixed", False), ("bert", "16", False), ("t5", "16", True), ("t5", "16-mixed", False),
]  # fmt: skip


@full_only
@pytest.mark.parametrize(("family", "precision", "o2"), FILES)
def test_three_steps(family: str, precision: str, o2: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (TRAINER + MODELS[family]).replace("NAME", f"megatron_{family}").replace("PRECISION", precision)
    write(tmp_path, f"megatron_{family}", text.replace("O2: O2", f"O2: {o2}").replace("APPLY", "True"))
    stacks = ("encoder.", "decoder.") if family == "t5" else ("",)
    words = [f"model.{stack}{key}" for stack in stacks for key in WIDTH] + SHRUNK.split()
    lengths = ("seq_length", "data.seq_length_dec") if family == "t5" else ("encoder_seq_length",)
    words += [f"model.{name}=32" for name in lengths] + [f"exp_manager.explicit_log_dir={tmp_path / 'run'}"]
    assert main(["train", "--config-dir", str(tmp_path), "--config-name", f"megatron_{family}", *words]) == EXIT_OK
    said = capsys.readouterr()
    for key in ("apply_query", "native_amp", "hysteresis", "fp16_lm", "fp32_residual"):
        told = [line for line in (said.out + said.err).splitlines() if key in line]
        assert not told or (family == "t5" and o2 and key == "fp32_residual"), told
    rows = metric_rows(tmp_path / "run")
    steps = [(row["loss_scale"], row["skipped_steps"]) for row in rows if "lr" in row]
    assert steps == [(1024, 0)] * 3
