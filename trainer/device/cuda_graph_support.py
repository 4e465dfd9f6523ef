"""Decide whether the micro batches of a run can be captured as CUDA graphs, see `cuda_graph.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...kernels.attention.dispatch import BackendSelection
from ...kernels.launch import HAS_TRITON
from ...models.config.families import keys_by_stack
from ...models.config.memory import offload_slice
from ...models.config.moe import moe_slice
from ...models.recompute.analysis import recompute_uses_rng
from ..config.resolved_run import ResolvedRun
from ..config.schema.root import AnyModelBlock
from ..utils.errors import UserError


def uses_cuda_graph(
    run: ResolvedRun, device: torch.device, decisions: Mapping[str, BackendSelection] | None = None
) -> bool:
    """Return True if micro batches are captured: `model.enable_cuda_graph`, where null means if supported.

    Raises:
        UserError: `enable_cuda_graph` is True, but capture is not supported.
    """
    enabled, reason = run.model.enable_cuda_graph, cuda_graph_unsupported_reason(run, device, decisions)
    if enabled and reason:
        raise UserError(f"`model.enable_cuda_graph` (True) {reason}; use model.enable_cuda_graph=False")
    return enabled is not False and reason is None


def cuda_graph_unsupported_reason(
    run: ResolvedRun, device: torch.device, decisions: Mapping[str, BackendSelection] | None = None
) -> str | None:
    """Return the reason why micro batches cannot be captured, whether enabled or not; None if they can.

    The attention backends of training (`decisions`) make some recomputation a no-op; if they are unknown, None, all
    recomputation counts.
    """
    if device.type != "cuda":
        return f"needs a CUDA device, but this run is on {device.type}"
    if (reason := _communication_reason(run)) is not None:
        return reason
    if any(offload_slice(keys) for keys in keys_by_stack(run.model).values()):
        return "keeps its memory pool for the graph, but `cpu_offloading` (True) must free memory in between"
    return _expert_reason(run) or _recompute_reason(run, decisions or {})


def _communication_reason(run: ResolvedRun) -> str | None:
    """Return the reason why a micro batch that communicates cannot be captured; None if it can, or does not.

    A graph holds what NCCL launches for tensor-parallel ranks. The exchange of gradients (a hook of the backward pass),
    of passes of a pipeline and of as many tokens as their experts have is not in it.
    """
    mesh = run.mesh
    if mesh.world_size > mesh.tensor:
        return (
            f"captures the communication of tensor-parallel ranks only, but this run has {mesh.world_size} processes "
            f"and `tensor_model_parallel_size` ({mesh.tensor})"
        )
    if mesh.expert > 1:
        return f"does not capture the exchange of tokens with `expert_model_parallel_size` ({mesh.expert})"
    if mesh.overlap_gather or mesh.overlap_scatter:
        return "does not capture copies of other ranks' memory, with `ub_tp_comm_overlap` (True)"
    return None


def _expert_reason(run: ResolvedRun) -> str | None:
    """Return the reason why a micro batch with experts cannot be captured; None if it can, or has none."""
    for keys in keys_by_stack(run.model).values():
        moe = moe_slice(keys)
        if moe is None:
            continue
        looped = not HAS_TRITON or run.precision.weights == "fp64"
        if moe.reads_counts or (looped and not moe.pad_to_capacity):
            return (
                "does not support host synchronization, which experts need that run one by one: with "
                "`moe_grouped_gemm` (False), in fp64, or without Triton"
            )
    return None


def _recompute_reason(run: ResolvedRun, decisions: Mapping[str, BackendSelection]) -> str | None:
    """Return the reason why a micro batch with recomputation cannot be captured; None if it can, or has none."""
    if recompute_uses_rng(run.family, decisions):
        keys = [f"`{name}` ({value})" for name, value in _recompute_keys(run.model)]
        return f"does not capture RNG state, which {' and '.join(keys)} must restore to recompute noise or dropout"
    return None


def _recompute_keys(model: AnyModelBlock) -> Iterator[tuple[str, Any]]:
    """Yield the keys that enable recomputation, of every stack, with their values."""
    for at, keys in keys_by_stack(model).items():
        for name in ("activations_checkpoint_granularity", "activations_checkpoint_modules", "moe_layer_recompute"):
            if value := getattr(keys, name):
                yield f"{at}{name}", ", ".join(value) if isinstance(value, list) else value
