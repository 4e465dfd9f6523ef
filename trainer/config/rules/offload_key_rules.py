"""Rules between the keys of offloading and others; `models/config` has those between themselves."""

from __future__ import annotations

from collections.abc import Iterator

from ....models.config.family_rules import stacks_of_keys
from ....models.config.key_block import Finding
from ....models.config.memory_slice import OffloadSlice, modules_of, offload_slice, whole_layers
from .rule_context import Facts, Rule, no_effect, processes

_WITHOUT_MEMORY = ("cpu", "mps")
"""Accelerators whose memory is that of the host."""


def _offloads(facts: Facts) -> Iterator[tuple[str, OffloadSlice]]:
    """What each stack keeps in host memory, with the beginning of its paths."""
    for at, stack in stacks_of_keys(facts.root.model).items():
        if (offload := offload_slice(stack)) is not None:
            yield f"model.{at}", offload


def offloading_needs_a_gpu(facts: Facts) -> Iterator[Finding]:
    """Elsewhere the device's memory is that of the host; `accelerator: auto` is told when the run starts."""
    accelerator = facts.root.trainer.accelerator
    if accelerator in _WITHOUT_MEMORY:
        for at, _ in _offloads(facts):
            when = f"with `accelerator` ({accelerator}), whose memory is that of the host"
            yield no_effect(f"{at}cpu_offloading", "trainer.accelerator", when)


def recomputation_may_stay(facts: Facts) -> Iterator[Finding]:
    """Megatron refuses both; here each does its part, where there is a GPU."""
    if facts.root.trainer.accelerator in _WITHOUT_MEMORY:
        return
    stacks = stacks_of_keys(facts.root.model)
    for path, offload in _offloads(facts):
        keys = stacks[path.removeprefix("model.")]
        chunk, whole = whole_layers(keys)
        if not offload.activations or not (whole or modules_of(keys)):
            continue
        names = ("activations_checkpoint_granularity", "activations_checkpoint_modules", "moe_layer_recompute")
        recomputed = next(name for name in names if getattr(keys, name))
        kept = "the input of each chunk" if chunk > 1 else "the input of each such layer"
        what = f"{kept} is what goes to the host" if whole else "what is still kept goes to the host"
        yield Finding(
            "info",
            (f"{path}cpu_offloading", f"{path}{recomputed}"),
            f"`cpu_offloading` (True) acts beside `{recomputed}`, which Megatron does not allow: {what}",
        )


def offloaded_weights_are_whole(facts: Facts) -> Iterator[Finding]:
    """FSDP2 keeps rows of the weights and gathers them for each layer: it has places of its own for them."""
    if not facts.root.model.fsdp or processes(facts) == 1:
        return
    for at, offload in _offloads(facts):
        if offload.weights:
            yield Finding(
                "error",
                (f"{at}cpu_offloading_weights", "model.fsdp"),
                "`cpu_offloading_weights` (True) must not meet `fsdp`, which cuts the weights over the processes",
                f"{at}cpu_offloading_weights=false, or model.fsdp=false",
            )


def recordings_do_not_offload(facts: Facts) -> Iterator[Finding]:
    """A CUDA graph keeps its memory to itself, so there would be nothing to gain."""
    if not facts.root.model.enable_cuda_graph:
        return
    for at, _ in _offloads(facts):
        yield Finding(
            "error",
            (f"{at}cpu_offloading", "model.enable_cuda_graph"),
            "`cpu_offloading` (True) must not meet `enable_cuda_graph` (True): a recording keeps its memory for itself",
            f"model.enable_cuda_graph=null, or {at}cpu_offloading=false",
        )


OFFLOAD_RULES: tuple[Rule, ...] = (
    offloading_needs_a_gpu,
    recomputation_may_stay,
    offloaded_weights_are_whole,
    recordings_do_not_offload,
)
