"""Runs of several processes, whose layers are captured as CUDA graphs one by one (`models.layer_graphs`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...models.config.dense_stack import is_own_block
from ...models.config.families import keys_by_stack
from .schema.root import AnyModelBlock


def captures_layers(model: AnyModelBlock, processes: int) -> bool:
    """Return True if something between the layers cannot be captured: the reduction of gradients over data-parallel
    ranks, those of context parallelism among them, messages to other pipeline stages, or the exchange of tokens with
    experts of other ranks.
    """
    return processes > model.tensor_model_parallel_size or (processes > 1 and model.expert_model_parallel_size > 1)


def uncaptured_layer_keys(model: AnyModelBlock) -> Iterator[tuple[str, Any]]:
    """Yield the keys, below `model`, with which layers cannot be captured one by one, with their values."""
    shards_weights = model.fsdp and model.fsdp_sharding_strategy != "grad"
    if shards_weights:
        if model.fsdp_sharding_strategy == "hybrid":  # weights are gathered into memory that changes
            yield "fsdp_sharding_strategy", "hybrid"
        elif model.copy_engine_collectives is False:  # likewise
            yield "copy_engine_collectives", False
    if model.fp8 and (shards_weights or model.expert_model_parallel_size > 1):
        yield "fp8", model.fp8  # casts are those of gathered weights; expert ranks agree on scales in every layer
    yield from recompute_keys(model)  # a layer would run twice
    if model.expert_model_parallel_size > 1:
        for at, keys in keys_by_stack(model).items():
            if is_own_block(keys.transformer_block_type):  # its experts may run anywhere in it
                yield f"{at}transformer_block_type", keys.transformer_block_type


def recompute_keys(model: AnyModelBlock) -> Iterator[tuple[str, Any]]:
    """Yield the keys that enable recomputation, of every stack, with their values."""
    for at, keys in keys_by_stack(model).items():
        for name in ("activations_checkpoint_granularity", "activations_checkpoint_modules", "moe_layer_recompute"):
            if value := getattr(keys, name):
                yield f"{at}{name}", ", ".join(value) if isinstance(value, list) else value


def layer_capture_reason(model: AnyModelBlock) -> str | None:
    """Return the reason why the layers cannot be captured one by one; None if they can."""
    keys = [f"`{name}` ({value})" for name, value in uncaptured_layer_keys(model)]
    return f"captures the layers of several processes one by one, but not with {', '.join(keys)}" if keys else None
