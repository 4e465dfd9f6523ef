"""Each value of a closed list is accepted and does something of its own; no other value is accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from config_harness import (
    CALLBACK,
    DATA,
    DROPS_TOKENS,
    MODEL,
    MOE,
    OPTIM,
    RECOMPUTE,
    ROPE,
    SCHED,
    STOPPING,
    TRAINER,
    WHOLE,
    Changes,
    ConfigHarness,
)
from config_helpers import problems
from key_observables import (
    activation,
    arithmetic,
    checkpoint_metric,
    delayed_scales,
    device,
    exchange_of_tokens,
    family_shapes,
    fp8_casts,
    gradient_reduce_dtype,
    gradients,
    hopper_backend,
    kept,
    layout,
    logits,
    normalization,
    optimizer,
    profiles,
    rates,
    router_calls,
    stepped,
    task_batch,
    tokens_of_file,
    watched,
)
from tiers import looped

from stoker.trainer.config.schema.key_index import schema_keys
from stoker.trainer.utils.errors import UserError

pytestmark = pytest.mark.usefixtures("without_plots", "small_pystd")


@dataclass(frozen=True)
class Values:
    """A closed list: its values give different observables, but for aliases, which give that of what they stand for."""

    observable: Callable[[ConfigHarness, Changes], Any]
    aliases: dict[Any, Any]
    others: Changes | None = None


OTHER_NAMES = {"reduced_train_loss": "loss", "train_loss": "loss", "validation_loss": "val_loss"}
VALUES = {
    TRAINER + "accelerator": Values(device, {"gpu": "cuda", "auto": "cuda"}),
    "model.cp_comm_type": Values(
        exchange_of_tokens,
        {},
        {
            "trainer.devices": 4,
            MODEL + "context_parallel_size": 4,
            MODEL + "hierarchical_context_parallel_sizes": [2, 2],
        },
    ),
    "model.fsdp_sharding_strategy": Values(layout, {}, {MODEL + "fsdp": True, MODEL + "fsdp_shard_size": 2}),
    "model.fsdp_grad_reduce_dtype": Values(gradient_reduce_dtype, {"32": 32, "fp32": 32}),
    TRAINER + "precision": Values(
        arithmetic,
        {"64": 64, "64-true": 64, "32": 32, "32-true": 32, "bf16-mixed": "bf16", "16": 16, "16-mixed": 16},
        {MODEL + "megatron_amp_O2": False},
    ),
    CALLBACK + "monitor": Values(checkpoint_metric, OTHER_NAMES),
    CALLBACK + "mode": Values(checkpoint_metric, {}),
    STOPPING + "monitor": Values(watched, OTHER_NAMES),
    STOPPING + "mode": Values(watched, {}),
    TRAINER + "profiler": Values(profiles, {}, {TRAINER + "profile_steps": [1, 2]}),
    MODEL + "family": Values(family_shapes, {}),
    RECOMPUTE + "granularity": Values(kept, {}, WHOLE),
    RECOMPUTE + "method": Values(kept, {}, WHOLE),
    MODEL + "fp8_amax_compute_algo": Values(
        delayed_scales, {}, {MODEL + name: True for name in ("fp8", "transformer_engine")}
    ),
    MODEL + "fp8_recipe": Values(fp8_casts, {}, {MODEL + "fp8": True}),
    MODEL + "transformer_block_type": Values(logits, {}),
    MODEL + "normalization": Values(normalization, {}),
    MODEL + "softmax_type": Values(gradients, {}),
    MODEL + "activation": Values(activation, {f"fast-{name}": name for name in ("geglu", "swiglu", "reglu")}),
    MODEL + "position_embedding_type": Values(logits, {}),
    MODEL + "moe_router_load_balancing_type": Values(gradients, {}, {**MOE, MODEL + "moe_aux_loss_coeff": 0.5}),
    MODEL + "moe_token_dispatcher_type": Values(  # each process has all experts; `test_config_moe.py` has what is said
        logits, dict.fromkeys(("alltoall", "alltoall_seq", "flex"), "allgather"), MOE
    ),
    MODEL + "moe_token_drop_policy": Values(logits, {}, DROPS_TOKENS),
    MODEL + "moe_router_dtype": Values(router_calls, {}, MOE),
    MODEL + "moe_router_score_function": Values(logits, {}, MOE),
    MODEL + "rotary_scaling": Values(logits, {}, {**ROPE, MODEL + "rotary_original_length": 8}),
    MODEL + "attention_backend": Values(
        hopper_backend, {"auto": "sdpa_cudnn", "fused": "sdpa_cudnn", "flash": "triton"}
    ),
    MODEL + "tokenizer.library": Values(tokens_of_file, {}),
    DATA + "dataset_type": Values(task_batch, {}),
    OPTIM + "name": Values(
        optimizer,
        dict.fromkeys(
            ("fused_adam", "distributed_fused_adam", "megatron_fused_adam", "mcore_distributed_optim"), "adamw"
        ),
    ),
    OPTIM + "adjust_lr_fn": Values(stepped, {}, {OPTIM + "name": "muon"}),
    SCHED + "name": Values(
        rates,
        {"WarmupHoldPolicy": "WarmupPolicy"},
        {
            SCHED + "warmup_steps": 1,
            SCHED + "hold_steps": 1,
            SCHED + "constant_steps": 2,
            SCHED + "power": 1.5,
            SCHED + "d_model": 16,
            SCHED + "min_lr": 1e-4,
            SCHED + "max_steps": 8,
        },
    ),
}


def canonical(values: Values, value: Any) -> Any:
    return values.aliases.get(value, value)


@pytest.mark.parametrize("key", VALUES)
def test_each_value_of_a_closed_list_is_accepted_and_distinct(key: str, harness: ConfigHarness) -> None:
    entry = VALUES[key]
    observed = [
        (canonical(entry, value), entry.observable(harness, {**(entry.others or {}), key: value}))
        for value in schema_keys()[key].choices
    ]
    for number, (name, seen) in enumerate(observed):
        for other_name, other in observed[:number]:
            assert (seen == other) == (name == other_name), (name, other_name)


@looped("key", VALUES)
def test_no_other_value_is_accepted(key: str) -> None:
    assert list(problems(f"{key}=word")) == [key]


def test_main_weights_set_bf16_apart(harness: ConfigHarness) -> None:
    precisions = ("bf16", "bf16-mixed", "bf16-true", 16, "16-mixed", "16-true", 32)
    assert len({arithmetic(harness, {TRAINER + "precision": precision}) for precision in precisions}) == 7


def test_every_backend_of_a_cpu_gives_the_same_logits(harness: ConfigHarness) -> None:
    def of(backend: str) -> torch.Tensor:
        with torch.no_grad():
            return harness.model({MODEL + "attention_backend": backend}).eval()(torch.arange(8)[None])

    for backend in ("flash", "unfused", "sdpa_flash", "sdpa_math", "reference"):
        torch.testing.assert_close(of(backend), of("auto"), atol=1e-5, rtol=1e-5)
    for backend in ("fused", "sdpa_efficient", "sdpa_cudnn"):
        with pytest.raises(UserError, match="needs a CUDA device"):
            of(backend)
