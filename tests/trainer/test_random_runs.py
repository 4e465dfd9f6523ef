"""Random combinations of plausible values, through the command line: each trains a step, or exits 2 naming a key."""

import random
from typing import get_args

import pytest
from tiers import TIER, full_only

from stoker.models.config.dense_stack import Activation, AttentionBackend
from stoker.models.config.positions import PositionEmbedding
from stoker.trainer.cli.main import main
from stoker.trainer.config.schema.key_index import schema_keys

POOLS = {
    "trainer.precision": ["null", 32, "bf16", "bf16-mixed", "bf16-true"],
    "trainer.limit_val_batches": [0, 1, 0.001],
    "trainer.gradient_clip_val": ["null", 0, 0.5],
    "trainer.log_every_n_steps": [1, 3],
    "trainer.num_sanity_val_steps": [0, 1],
    "trainer.val_check_interval": [1, 2],
    "trainer.devices": [1, 1, "auto", 2],
    "exp_manager.create_tensorboard_logger": ["true", "false"],
    "exp_manager.create_checkpoint_callback": ["true", "false"],
    "exp_manager.checkpoint_callback_params.save_top_k": [-1, 0, 1],
    "exp_manager.checkpoint_callback_params.save_last": ["true", "false"],
    "exp_manager.checkpoint_callback_params.every_n_train_steps": ["null", 1],
    "model.num_layers": [1, 2],
    "model.hidden_size": [16, 24, 31],
    "model.ffn_hidden_size": [1, 40],
    "model.num_attention_heads": [1, 2, 3, 4],
    "model.kv_channels": ["null", 8, 6, 5],
    "model.num_query_groups": ["null", 1, 2, 3],
    "model.normalization": ["layernorm", "layernorm1p", "rmsnorm"],
    "model.layernorm_zero_centered_gamma": ["true", "false"],
    "model.activation": list(get_args(Activation)),
    "model.openai_gelu": ["true", "false"],
    "model.bias": ["true", "false"],
    "model.qkv_bias": ["true", "false"],
    "model.hidden_dropout": [0.0, 0.1],
    "model.attention_dropout": [0.0, 0.1],
    "model.ffn_dropout": [0.0, 0.5],
    "model.use_scaled_init_method": ["true", "false"],
    "model.position_embedding_type": list(get_args(PositionEmbedding)),
    "model.rotary_percentage": [0.25, 0.5, 1.0],
    "model.rotary_interleaved": ["true", "false"],
    "model.seq_len_interpolation_factor": ["null", 2.0],
    "model.rotary_scaling": ["null", "llama3", "yarn"],
    "model.rotary_original_length": [4, 8192],
    "model.scale_positional_embedding": ["true", "false"],
    "model.num_attention_heads_alibi": ["null", 1, 3],
    "model.relative_attention_num_buckets": [2, 7, 32],
    "model.relative_attention_max_distance": [2, 20],
    "model.window_size": ["null", "[3,0]", "[-1,2]", "[40,5]"],
    "model.attn_logit_softcapping": ["null", 2.0],
    "model.softmax_type": ["vanilla", "off-by-one", "learnable"],
    "model.logits_soft_cap": ["null", 5.0],
    "model.apply_embedding_scaling": ["true", "false"],
    "model.qk_layernorm": ["true", "false"],
    "model.headscale": ["true", "false"],
    "model.transformer_block_type": ["pre_ln", "post_ln", "normformer", "parallel_ln"],
    "model.normalize_attention_scores": ["true", "false"],
    "model.use_flash_attention": ["null", "true", "false"],
    "model.attention_backend": list(get_args(AttentionBackend)),
    "model.encoder_seq_length": [1, 8, 33],
    "model.max_position_embeddings": ["null", 8, 64],
    "model.make_vocab_size_divisible_by": [1, 128],
    "model.override_vocab_size": ["null", 100, 300],
    "model.share_embeddings_and_output_weights": ["true", "false"],
    "model.micro_batch_size": [1, 2, 3],
    "model.global_batch_size": [1, 2, 4, 6],
    "model.megatron_amp_O2": ["true", "false"],
    "model.do_layer_norm_weight_decay": ["true", "false"],
    "model.tokenizer.library": ["byte-level", "char", "huggingface"],
    "model.data.data_impl": ["pystd", "mock", "text"],
    "model.data.seq_length": ["null", 8, 16],
    "model.data.splits_string": ["'900,50,50'", "'1,0,0'", "'90,10'"],
    "model.optim.name": ["adamw", "fused_adam", "distributed_fused_adam"],
    "model.optim.weight_decay": [0.0, 0.1],
    "model.optim.sched.name": ["CosineAnnealing", "WarmupAnnealing"],
    "model.optim.sched.warmup_steps": ["null", 0, 1, 5],
    "model.optim.sched.constant_steps": ["null", 0, 1],
    "model.optim.sched.min_lr": [0.0, 1e-4, 1.0],
}
BASE = [
    "trainer.accelerator=cpu",
    "trainer.max_steps=1",
    "trainer.limit_val_batches=1",
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.ffn_hidden_size=32",
    "model.num_attention_heads=2",
    "model.encoder_seq_length=16",
    "model.micro_batch_size=2",
    "model.global_batch_size=2",
    "model.optim.sched.warmup_ratio=null",
    "data=mock",
]


def train_or_be_refused(count, seed, directory, capsys):
    chance = random.Random(seed)
    codes = []
    for number in range(count):
        keys = chance.sample(list(POOLS), chance.randint(3, 9))
        overrides = [f"{key}={chance.choice(POOLS[key])}" for key in keys]
        code = main(["train", *BASE, *overrides, f"exp_manager.explicit_log_dir={directory / str(number)}"])
        printed = capsys.readouterr().err
        assert code in (0, 2), f"exit {code}: {overrides}\n{printed}"
        if code == 2:
            assert any(key in printed or key.rpartition(".")[2] in printed for key in schema_keys()), printed
        assert "Traceback" not in printed
        codes.append(code)
    assert {0, 2} == set(codes)


@pytest.mark.usefixtures("without_plots", "small_pystd")
def test_random_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert set(POOLS) <= set(schema_keys())
    train_or_be_refused(15 if TIER == "full" else 4, 1, tmp_path, capsys)


@full_only
def test_many_random_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train_or_be_refused(500, 1, tmp_path, capsys)
