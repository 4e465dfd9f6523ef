"""Whether the micro batches of a run can be recorded as CUDA graphs, see `cuda_graph.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ...kernels.attention.dispatch import Decision
from ...kernels.launch import HAS_TRITON
from ...models.config.families import family_slice
from ...models.config.family_rules import stacks_of_keys
from ...models.config.memory_slice import offload_slice
from ...models.config.moe_slice import moe_slice
from ...models.config.peft_slice import peft_slice
from ...models.config.t5 import T5Keys
from ...models.recompute.analysis import acting_recompute, recomputes_draws
from ..config.batch_spec import sample_form
from ..config.schema.root import RootBlock
from ..utils.errors import UserError


def uses_cuda_graph(
    root: RootBlock, device: torch.device, processes: int, decisions: Mapping[str, Decision] | None = None
) -> bool:
    """Whether micro batches are recorded: `model.enable_cuda_graph`, where null means wherever they can be.

    Args:
        root: the keys.
        device: of this process.
        processes: of the run.
        decisions: see `why_not_recorded`.

    Raises:
        UserError: they shall be, but the device is not CUDA, there are several processes, or the host has to wait.
    """
    wish, reason = root.model.enable_cuda_graph, why_not_recorded(root, device, processes, decisions)
    if wish and reason:
        raise UserError(f"`model.enable_cuda_graph` (True) {reason}; use model.enable_cuda_graph=False")
    return wish is not False and reason is None


def why_not_recorded(
    root: RootBlock, device: torch.device, processes: int, decisions: Mapping[str, Decision] | None = None
) -> str | None:
    """Why micro batches of a run cannot be recorded, whether they shall be or not; None where they can.

    Args:
        root: the keys.
        device: of this process.
        processes: of the run.
        decisions: what was chosen for each attention in training, by which some recomputation has no effect; None
            where that is not known, and all of it counts.
    """
    if device.type != "cuda":
        return f"records work of a CUDA device, but this run is on {device.type}"
    if processes > 1:
        return f"records no communication, but this run has {processes} processes"
    if any(offload_slice(keys) for keys in stacks_of_keys(root.model).values()):
        return "keeps the memory of a recording to itself, which `cpu_offloading` (True) would give back in between"
    return _what_experts_need(root) or _what_recomputation_needs(root, decisions or {})


def _what_experts_need(root: RootBlock) -> str | None:
    """Why a micro batch with such experts cannot be recorded; None where it can, or has none."""
    for keys in stacks_of_keys(root.model).values():
        moe = moe_slice(keys, of_t5=isinstance(root.model, T5Keys))
        if moe is None:
            continue
        one_by_one = not HAS_TRITON or str(root.trainer.precision).startswith("64")
        if moe.reads_counts or (one_by_one and not moe.pad_to_capacity):
            return (
                "records no waits of the host, as experts need that run one after the other: those of "
                "`moe_grouped_gemm` (False), of fp64, and without Triton"
            )
    return None


def _what_recomputation_needs(root: RootBlock, decisions: Mapping[str, Decision]) -> str | None:
    """Why a micro batch of which parts run twice cannot be recorded; None where it can, or nothing is recomputed."""
    family = family_slice(root.model, vocab_size=root.model.override_vocab_size or 1, form=sample_form(root))
    for stack, recompute in zip(family.stacks, acting_recompute(family, decisions), strict=True):
        if recomputes_draws(replace(stack, recompute=recompute), peft_slice(root.model.peft)):
            keys = [f"`{name}` ({value})" for name, value in _recompute_keys(root)]
            return (
                f"records no state of random generators, which {' and '.join(keys)} need where noise or dropout is "
                "drawn again"
            )
    return None


def _recompute_keys(root: RootBlock) -> Iterator[tuple[str, Any]]:
    """The keys that switch recomputation on, of every stack."""
    for at, keys in stacks_of_keys(root.model).items():
        for name in ("activations_checkpoint_granularity", "activations_checkpoint_modules", "moe_layer_recompute"):
            if value := getattr(keys, name):
                yield f"{at}{name}", ", ".join(value) if isinstance(value, list) else value
