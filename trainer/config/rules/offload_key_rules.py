"""Rules between activation/weight offloading and other keys; `models/config` has the rules within offloading."""

from __future__ import annotations

from collections.abc import Iterator

from ....models.config.families import keys_by_stack
from ....models.config.key_block import Finding
from ....models.config.memory import OffloadSlice, full_recompute_layers, offload_slice, selected_modules
from .rule_context import RuleContext, no_effect, num_processes

_HOST_MEMORY_ACCELERATORS = ("cpu", "mps")
"""Accelerators that use host memory."""


def _offload_slices(context: RuleContext) -> Iterator[tuple[str, OffloadSlice]]:
    """Yield the key prefix and the offload settings of each stack that offloads."""
    for at, stack in keys_by_stack(context.root.model).items():
        if (offload := offload_slice(stack)) is not None:
            yield f"model.{at}", offload


def offloading_needs_cuda(context: RuleContext) -> Iterator[Finding]:
    """Offloading has no effect on CPU and MPS; `accelerator: auto` is checked when the run starts."""
    accelerator = context.root.trainer.accelerator
    if accelerator in _HOST_MEMORY_ACCELERATORS:
        for at, _ in _offload_slices(context):
            when = f"with `accelerator` ({accelerator}), which uses host memory"
            yield no_effect(f"{at}cpu_offloading", "trainer.accelerator", when)


def recompute_with_offloading(context: RuleContext) -> Iterator[Finding]:
    """Note that recompute and offloading are combined, which Megatron does not allow."""
    if context.root.trainer.accelerator in _HOST_MEMORY_ACCELERATORS:
        return
    stacks = keys_by_stack(context.root.model)
    for path, offload in _offload_slices(context):
        keys = stacks[path.removeprefix("model.")]
        chunk, whole = full_recompute_layers(keys)
        if not offload.activations or not (whole or selected_modules(keys)):
            continue
        names = ("activations_checkpoint_granularity", "activations_checkpoint_modules", "moe_layer_recompute")
        recomputed = next(name for name in names if getattr(keys, name))
        inputs = "the input of each chunk" if chunk > 1 else "the input of each recomputed layer"
        what = f"{inputs} is offloaded" if whole else "the remaining saved activations are offloaded"
        yield Finding.info(
            (f"{path}cpu_offloading", f"{path}{recomputed}"),
            f"`cpu_offloading` (True) is combined with `{recomputed}`, which Megatron does not allow: {what}",
        )


def offloaded_weights_are_not_sharded(context: RuleContext) -> Iterator[Finding]:
    """Weight offloading and FSDP2 exclude each other: FSDP2 manages the storage of its sharded parameters."""
    model = context.root.model
    if not model.fsdp or model.fsdp_sharding_strategy == "grad" or num_processes(context) == 1:
        return
    for at, offload in _offload_slices(context):
        if offload.weights:
            yield Finding.error(
                (f"{at}cpu_offloading_weights", "model.fsdp"),
                "`cpu_offloading_weights` (True) is not supported with `fsdp` (True), which shards the weights",
                f"{at}cpu_offloading_weights=false, or model.fsdp=false",
            )


def cuda_graph_excludes_offloading(context: RuleContext) -> Iterator[Finding]:
    """Offloading saves nothing with CUDA graphs, which keep a private memory pool."""
    if not context.root.model.enable_cuda_graph:
        return
    for at, _ in _offload_slices(context):
        yield Finding.error(
            (f"{at}cpu_offloading", "model.enable_cuda_graph"),
            "`cpu_offloading` (True) is not supported with `enable_cuda_graph` (True): a CUDA graph keeps a private "
            "memory pool",
            f"model.enable_cuda_graph=null, or {at}cpu_offloading=false",
        )
