"""Combinations in which a key has no effect are told, and those in which it acts are not."""

from __future__ import annotations

import pytest
from config_harness import CALLBACK, DATA, MANAGER, MODEL, OPTIM, TOKENIZER, TRAINER
from config_helpers import load
from tiers import looped

WEIGHTS = "model.restore_from_path=x"
OVERLAPPED = ["model.optim.name=distributed_fused_adam", "model.optim.overlap_param_sync=true", "trainer.devices=2"]
OVERLAPPED += ["model.global_batch_size=16", "model.micro_batch_size=8"]
LORA, ADAPTER, IA3 = ([WEIGHTS, f"model.peft.peft_scheme={scheme}"] for scheme in ("lora", "adapter", "ia3"))


@looped(
    ("overrides", "key"),
    [
        (["model.fp8_margin=2"], MODEL + "fp8_margin"),
        (["model.fp8_params=true"], MODEL + "fp8_params"),
        (["model.fp8_dot_product_attention=true"], MODEL + "fp8_dot_product_attention"),
        (["model.fp8=true", "model.fp8_amax_history_len=2"], MODEL + "fp8_amax_history_len"),
        (["model.fp8=true", "model.num_layers_at_end_in_bf16=2"], MODEL + "num_layers_at_end_in_bf16"),
        (["model.fp8=true", "model.fp8_e4m3=true", "model.fp8_hybrid=true"], MODEL + "fp8_hybrid"),
        (["model.fp8=true", "model.fp8_recipe=rowwise", "model.reduce_amax=false"], MODEL + "reduce_amax"),
        (
            ["model.fp8=true", "model.first_last_layers_bf16=true", "model.num_layers_at_start_in_bf16=9"],
            MODEL + "first_last_layers_bf16",
        ),
        (["model.optim.overlap_param_sync=true"], OPTIM + "overlap_param_sync"),
        ([*OVERLAPPED, "model.fp8=true", "model.micro_batch_size=4"], OPTIM + "overlap_param_sync"),
        (
            [*OVERLAPPED, *(f"model.cpu_offloading{key}" for key in ("=true", "_num_layers=1", "_weights=true"))],
            OPTIM + "overlap_param_sync",
        ),
        (["data=mock", "model.data.splits_string='1,1,1'"], DATA + "splits_string"),
        (["model.data.index_mapping_dir=x"], DATA + "index_mapping_dir"),
        (["model.data.shuffle_documents=false"], DATA + "shuffle_documents"),
        (["model.data.dataset_kwargs.a=1"], DATA + "dataset_kwargs"),
        (["data=mock", "model.data.eod_mask_loss=true"], DATA + "eod_mask_loss"),
        (["model.data.masked_lm_prob=0.3"], DATA + "masked_lm_prob"),
        (["model.data.packed_sequence=true"], DATA + "packed_sequence"),
        (["model.data.label_key=x"], DATA + "label_key"),
        (["model.tokenizer.num_sentinel_tokens=5"], TOKENIZER + "num_sentinel_tokens"),
        (
            ["model.position_embedding_type=none", "model.data.reset_position_ids=true"],
            DATA + "reset_position_ids",
        ),
        (["data=mmap", "model.data.data_prefix={train: a, validation: [1, b]}"], DATA + "data_prefix.validation"),
        (
            ["data=mmap", "model.data.data_prefix={train: a, validation: b}", "model.data.splits_string='1,1'"],
            DATA + "splits_string",
        ),
        (["trainer.limit_val_batches=0", "trainer.num_sanity_val_steps=1"], TRAINER + "num_sanity_val_steps"),
        (
            ["trainer.limit_val_batches=0", "trainer.val_check_interval=5", f"{CALLBACK}every_n_train_steps=5"],
            TRAINER + "val_check_interval",
        ),
        (["exp_manager.version=1", "exp_manager.use_datetime_version=false"], MANAGER + "use_datetime_version"),
        (["exp_manager.version=0", "exp_manager.use_datetime_version=false"], MANAGER + "use_datetime_version"),
        (["exp_manager.resume_ignore_no_checkpoint=false"], MANAGER + "resume_ignore_no_checkpoint"),
        ([f"{CALLBACK}save_top_k=0", f"{CALLBACK}save_last=false"], CALLBACK + "save_top_k"),
        ([f"{CALLBACK}every_n_train_steps=9999", f"{CALLBACK}save_last=false"], CALLBACK + "every_n_train_steps"),
        (
            ["model.normalization=layernorm1p", "model.layernorm_zero_centered_gamma=false"],
            MODEL + "layernorm_zero_centered_gamma",
        ),
        (["trainer.precision=bf16-true", "model.megatron_amp_O2=false"], MODEL + "megatron_amp_O2"),
        (["trainer.accelerator=cpu", "model.megatron_amp_O2=false"], MODEL + "megatron_amp_O2"),
        (["trainer.precision=16-true", "model.megatron_amp_O2=false"], MODEL + "megatron_amp_O2"),
        (["trainer.precision=bf16", "model.hysteresis=3"], MODEL + "hysteresis"),
        (["trainer.precision=16-mixed", "model.fp32_residual_connection=true"], MODEL + "fp32_residual_connection"),
        (["trainer.precision=16", "model=t5_tiny"], "trainer.precision"),
        (["trainer.precision=16-mixed", "model=t5_tiny", WEIGHTS], "trainer.precision"),
        (["trainer.limit_val_batches=0", f"{DATA}validation_drop_last=true"], DATA + "validation_drop_last"),
        (["trainer.overfit_batches=2", f"{DATA}validation_drop_last=true"], DATA + "validation_drop_last"),
        (["model.do_layer_norm_weight_decay=true", f"{OPTIM}weight_decay=0.0"], MODEL + "do_layer_norm_weight_decay"),
        ([*LORA, "model.do_layer_norm_weight_decay=true"], MODEL + "do_layer_norm_weight_decay"),
        ([*IA3, "model.do_layer_norm_weight_decay=true"], MODEL + "do_layer_norm_weight_decay"),
        (
            [*ADAPTER, "model.peft.adapter_tuning.norm_position=null", "model.do_layer_norm_weight_decay=true"],
            MODEL + "do_layer_norm_weight_decay",
        ),
        ([WEIGHTS, "model.init_method_std=0.5"], MODEL + "init_method_std"),
        ([WEIGHTS, "model.use_scaled_init_method=false"], MODEL + "use_scaled_init_method"),
        ([WEIGHTS, "model.embedding_init_method_std=0.5"], MODEL + "embedding_init_method_std"),
        (["model=t5_tiny", WEIGHTS, "model.decoder.init_method_std=0.5"], MODEL + "decoder.init_method_std"),
        (
            [*LORA, "model.peft.restore_from_path=y", "model.peft.lora_tuning.row_init_method=normal"],
            MODEL + "peft.lora_tuning.row_init_method",
        ),
    ],
)
def test_a_key_without_effect_is_told(overrides: list[str], key: str) -> None:
    warned = [finding.keys[0] for finding in load(*overrides).findings if finding.level == "warning"]
    assert warned == [key]


@pytest.mark.parametrize(
    ("overrides", "warns"),
    [(["data=mock", "peft=lora"], True), (["experiment=llama_1b_lora"], False), (["data=mock", *LORA], False)],
)
def test_an_adapter_on_random_weights_is_told(overrides: list[str], warns: bool) -> None:
    told = [one for one in load(*overrides).findings if "freezes random weights" in one.message]
    assert [(one.level, one.fix) for one in told] == [("warning", "model.restore_from_path=FOLDER")] * warns


@pytest.mark.parametrize("kept", [-1, 0])
def test_ranks_that_choose_no_checkpoint_are_told(kept: int) -> None:
    given = [f"{CALLBACK}monitor=grad_norm", f"{CALLBACK}mode=max", f"{CALLBACK}save_top_k={kept}"]
    found = load(*given).findings
    assert [(one.level, one.keys[0]) for one in found] == [("info", CALLBACK + "monitor"), ("info", CALLBACK + "mode")]


@looped(
    "overrides",
    [
        ["trainer.limit_val_batches=0"],
        ["trainer.limit_val_batches=0", "trainer.val_check_interval=5"],
        ["experiment=llama_1b_bench"],
        ["trainer.precision=32", "model.megatron_amp_O2=false"],
        ["model.megatron_amp_O2=false"],
        ["trainer.precision=16", "model.megatron_amp_O2=false", "model.hysteresis=3"],
        ["trainer.precision=16", "model.apply_query_key_layer_scaling=true", "model.fp32_residual_connection=true"],
        ["trainer.precision=16-mixed", "model=t5_tiny"],
        ["trainer.precision=16", "model=t5_tiny"]
        + [f"model.{stack}.fp32_residual_connection=true" for stack in ("encoder", "decoder")],
        ["trainer.precision=bf16", "model.native_amp_growth_interval=1000"],
        ["trainer.precision=bf16", "trainer.accelerator=cpu", "model.megatron_amp_O2=false"],
        [*ADAPTER, "model.do_layer_norm_weight_decay=true"],
        ["model.init_method_std=0.5", "model.embedding_init_method_std=0.5"],
        ["model=t5_tiny", WEIGHTS],
        ["experiment=shakespeare_char_cpu", "model.data.path=x", WEIGHTS],
        [*LORA, "model.peft.lora_tuning.row_init_method=normal"],
        [f"{DATA}validation_drop_last=true"],
        [f"{CALLBACK}save_top_k=-1"],
        [f"{CALLBACK}save_top_k=-1", f"{CALLBACK}monitor=val_loss", f"{CALLBACK}mode=min"],
        [f"{CALLBACK}monitor=grad_norm", f"{CALLBACK}mode=max"],
        [
            "exp_manager.create_checkpoint_callback=false",
            "exp_manager.resume_if_exists=true",
            f"{CALLBACK}dirpath=somewhere",
        ],
    ],
)
def test_what_acts_is_not_warned_of(overrides: list[str]) -> None:
    assert not load(*overrides).findings
