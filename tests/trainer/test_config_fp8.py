"""Keys of fp8 that exclude each other, or need what the model or the device does not have."""

from __future__ import annotations

import re

import pytest
from config_helpers import load, problems
from tiers import looped

from stoker.kernels.fp8.recipe import Fp8Recipe
from stoker.models.config.fp8 import Fp8Slice, check_fp8
from stoker.trainer.config.resolved_run import resolve_run

FP8_PARAMS: list[tuple[list[str], str]] = [
    (["model.peft.peft_scheme=selective"], "that are all trained or all frozen, not some of them (`peft_scheme`, sel"),
    (["model.transformer_engine=true"], "which TransformerEngine's linear layers (`transformer_engine`, True) do not"),
    (["model.fsdp=true", "trainer.devices=2"], "not with `fsdp` (True)"),
    (["model.cpu_offloading=true"], "not with `cpu_offloading` (True)"),
    (["model.cpu_offloading_optimizer=true"], "not with `cpu_offloading_optimizer` (True)"),
    (["trainer.precision=bf16-mixed"], "which a run with `precision` (bf16-mixed) does not have"),
    (["trainer.accelerator=cpu"], "which a run with `precision` (null) does not have"),
    (["trainer.precision=bf16", "model.megatron_amp_O2=false"], "a run with `megatron_amp_O2` (false) does not have"),
    *(
        (["model.fp8_recipe=rowwise", "trainer.devices=2", *shares], "(tensorwise, not rowwise) on 2 ranks that each")
        for shares in (
            ["model.optim.name=distributed_fused_adam"],
            ["model.fsdp=true", "model.fsdp_sharding_strategy=grad"],
            ["model.optim.name=distributed_fused_adam", "model.context_parallel_size=2"],
        )
    ),
]
"""Keys with which weights cannot be kept in fp8."""

TE, ATTENTION_KEY = "model.transformer_engine=true", "model.fp8_dot_product_attention"
ATTENTION = f"{ATTENTION_KEY}=true"


@looped(
    ("overrides", "key", "says"),
    [
        (["model.fp8_hybrid=false"], "model.fp8_hybrid", "gradients are cast to e5m2 or to e4m3"),
        (["model.ffn_hidden_size=1000"], "model.ffn_hidden_size", "`ffn_hidden_size` (1000) must be a multiple of 16"),
        (
            ["model.ffn_hidden_size=48", "model.tensor_model_parallel_size=2", "trainer.devices=2"],
            "model.ffn_hidden_size",
            "(24 on each of 2 tensor-parallel ranks) must be a multiple of 16",
        ),
        (["trainer.accelerator=gpu", "trainer.precision=32"], "trainer.precision", "must be bf16 with `fp8` (True)"),
        (["trainer.accelerator=mps"], "model.fp8", "must be False with `accelerator` (mps)"),
        (["model.fp8_recipe=delayed"], "model.fp8_recipe", "needs `transformer_engine` (True)"),
        (
            ["model.transformer_engine=true", "model.reduce_amax=false", "trainer.devices=2"],
            "model.reduce_amax",
            "must be True with `fp8_recipe` (delayed) on 2 ranks",
        ),
        (["model.fp8_recipe=mxfp8"], "model.fp8_recipe", "need a Blackwell GPU"),
        *((["model.fp8_params=true", *others], "model.fp8_params", says) for others, says in FP8_PARAMS),
        (["model.fp8_params=true", "peft=lora", "model.fsdp=true"], "model.fp8_params", "not with `fsdp` (True)"),
        (["model.fp8_params=true", "peft=lora", "model.cpu_offloading=true"], "model.fp8_params", "`cpu_offloading`"),
        (["model.fp8_multi_head_attention=true"], "model.fp8_multi_head_attention", "refused: fp8 tensors between"),
        ([ATTENTION], ATTENTION_KEY, "needs `transformer_engine` (True): stoker's own kernels have no"),
        ([ATTENTION, TE, "model.attention_dropout=0.1"], ATTENTION_KEY, "`attention_dropout` (0.1) must be 0 with"),
        ([ATTENTION, TE, "model.fp8_recipe=blockwise"], ATTENTION_KEY, "cannot be combined with `fp8_recipe` (blockwi"),
        (
            [ATTENTION, TE, "model.context_parallel_size=2", "trainer.devices=2"],
            ATTENTION_KEY,
            "needs whole sequences, which ranks have with `cp_comm_type` a2a, not p2p",
        ),
        (
            [ATTENTION, TE, "model.fp8_recipe=tensorwise", "model.reduce_amax=false", "trainer.devices=2"],
            "model.reduce_amax",
            "must be True with `fp8_dot_product_attention` (True) on 2 ranks",
        ),
    ],
)
def test_what_fp8_needs(overrides: list[str], key: str, says: str) -> None:
    problem = problems("model.fp8=true", *overrides)[key]
    assert says in problem.rule
    assert problem.fix


@looped(
    "others",
    [
        [],
        ["trainer.precision=bf16", "trainer.accelerator=cpu"],
        ["model.tensor_model_parallel_size=2", "trainer.devices=2"],
        ["model.optim.name=distributed_fused_adam", "trainer.devices=4", "model.fp8_recipe=tensorwise"],
        ["model.fp8_recipe=rowwise", "trainer.devices=4"],
        ["model.fp8_recipe=blockwise", "model.optim.name=distributed_fused_adam"],
    ],
)
def test_trained_weights_are_kept_in_fp8(others: list[str]) -> None:
    load("model.fp8=true", "model.fp8_params=true", "trainer.accelerator=gpu", "model.global_batch_size=64", *others)


def test_a_cpu_without_main_weights_is_found_when_the_run_starts() -> None:
    """`accelerator: auto` trains in fp32 on a CPU, which no rule can know."""
    root = load("model.fp8=true", "model.fp8_params=true").root
    assert (
        "fp32 main weights, and this run has fp32; set trainer.precision=bf16" in resolve_run(root).why_not_fp8_params
    )
    assert not resolve_run(root, capability=(9, 0)).why_not_fp8_params


def test_ranks_found_when_the_run_starts_do_not_share_the_update_of_other_scales() -> None:
    sharded = ["model.optim.name=distributed_fused_adam", "trainer.devices=auto", "trainer.precision=bf16"]
    root = load("model.fp8=true", "model.fp8_params=true", "model.fp8_recipe=rowwise", *sharded).root
    assert not resolve_run(root, world_size=1).why_not_fp8_params
    assert "not rowwise, on 2 ranks" in resolve_run(root, world_size=2).why_not_fp8_params


def test_ranks_that_shard_gradients_keep_whole_weights_in_fp8() -> None:
    grad = ["model.fsdp=true", "model.fsdp_sharding_strategy=grad", "trainer.devices=2", "model.global_batch_size=32"]
    load("model.fp8=true", "model.fp8_params=true", "peft=lora", "model.restore_from_path=x", *grad)


def test_attention_in_fp8_where_it_may() -> None:
    given = ["model.fp8=true", ATTENTION, TE, "model.attention_dropout=0"]
    load(*given, "model.fp8_recipe=tensorwise", "model.fp8_amax_history_len=4")
    load(*given, "model.context_parallel_size=2", "model.cp_comm_type=a2a", "trainer.devices=2")


@looped("accelerator", ["cpu", "auto"])
def test_a_cpu_emulates_any_precision(accelerator: str) -> None:
    load("model.fp8=true", f"trainer.accelerator={accelerator}", "trainer.precision=64")


@looped(
    ("device", "capability", "dtype", "scaling", "says"),
    [
        ("mps", None, "bf16", "tensorwise", "must be False on mps"),
        ("cpu", None, "fp32", "delayed", "this is cpu; use transformer_engine=null."),
        ("cuda", (8, 0), "bf16", "tensorwise", "8.9 or later (Ada, Hopper, Blackwell), and this one has 8.0"),
        ("cuda", (9, 0), "fp16", "tensorwise", "use trainer.precision=bf16"),
        ("cuda", (10, 0), "bf16", "blockwise", "use model.fp8_recipe=rowwise"),
    ],
)  # fmt: skip
def test_what_a_device_lacks(device, capability, dtype, scaling, says) -> None:
    fp8 = Fp8Slice(recipe=Fp8Recipe(scaling=scaling), layers=(True,), reduce_amax=True)
    with pytest.raises(ValueError, match=re.escape(says)):
        check_fp8(fp8, device, capability, dtype)


@looped(
    ("device", "capability", "scaling"),
    [
        ("cpu", None, "blockwise"),
        ("cuda", (8, 9), "rowwise"),
        ("cuda", (9, 0), "blockwise"),
        ("cuda", (12, 0), "rowwise"),
        ("cuda", (8, 9), "delayed"),
    ],
)
def test_what_a_device_has(device, capability, scaling) -> None:
    fp8 = Fp8Slice(recipe=Fp8Recipe(scaling=scaling), layers=(True,), reduce_amax=True)
    check_fp8(fp8, device, capability, "bf16")
