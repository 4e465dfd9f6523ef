"""Decide whether the micro batches of a run, or its layers, can be captured as CUDA graphs, see `cuda_graph.py`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...kernels.attention.dispatch import BackendSelection
from ...kernels.launch import HAS_TRITON
from ...models.config.families import keys_by_stack
from ...models.config.memory import offload_slice
from ...models.config.moe import moe_slice
from ...models.recompute.analysis import recompute_uses_rng
from ..config.captured_layers import captures_layers, layer_capture_reason, recompute_keys
from ..config.resolved_run import ResolvedRun
from ..utils.errors import UserError


def uses_cuda_graph(
    run: ResolvedRun,
    device: torch.device,
    decisions: Mapping[str, BackendSelection] | None = None,
    moving_weights: str | None = None,
) -> bool:
    """Return True if micro batches are captured, or layers of several processes; `model.enable_cuda_graph`.

    Arguments are those of `cuda_graph_unsupported_reason`.

    Raises:
        UserError: `enable_cuda_graph` is True, but capture is not supported.
    """
    enabled, reason = run.model.enable_cuda_graph, cuda_graph_unsupported_reason(run, device, decisions, moving_weights)
    if enabled and reason:
        raise UserError(f"`model.enable_cuda_graph` (True) {reason}; use model.enable_cuda_graph=False")
    return enabled is not False and reason is None


def cuda_graph_unsupported_reason(
    run: ResolvedRun,
    device: torch.device,
    decisions: Mapping[str, BackendSelection] | None = None,
    moving_weights: str | None = None,
) -> str | None:
    """Return the reason why neither micro batches nor layers can be captured, whether enabled or not; None if they can.

    Args:
        run: the run.
        device: its device.
        decisions: attention backends of training, which make some recomputation a no-op; if they are unknown, None,
            all recomputation counts.
        moving_weights: why FSDP gathers weights into memory that changes; None if it does not.
    """
    if device.type != "cuda":
        return f"needs a CUDA device, but this run is on {device.type}"
    if (reason := _communication_reason(run, moving_weights)) is not None:
        return reason
    if any(offload_slice(keys) for keys in keys_by_stack(run.model).values()):
        return "keeps its memory pool for the graph, but `cpu_offloading` (True) must free memory in between"
    return _expert_reason(run) or _recompute_reason(run, decisions or {})


def _communication_reason(run: ResolvedRun, moving_weights: str | None) -> str | None:
    """Return the reason why what communicates cannot be captured; None if it can, or nothing does.

    The graphs of micro batches and layers hold what NCCL launches for ranks that share a layer or its tokens. The
    reduction of gradients (a hook of the backward pass), messages between pipeline stages and the exchange of as many
    tokens as their experts have are not in those of micro batches, but between those of layers.
    """
    mesh = run.mesh
    if mesh.overlap_gather or mesh.overlap_scatter:
        return "does not capture copies of other ranks' memory, with `ub_tp_comm_overlap` (True)"
    if not captures_layers(run.model, mesh.world_size):
        return None
    reason = layer_capture_reason(run.model)
    if reason is None and moving_weights is not None:
        return f"needs weights in fixed memory, but with `fsdp` (True) they are gathered {moving_weights}"
    return reason


def _expert_reason(run: ResolvedRun) -> str | None:
    """Return the reason why a micro batch with experts cannot be captured; None if it can, or has none."""
    for keys in keys_by_stack(run.model).values():
        moe = moe_slice(keys)
        if moe is None or run.mesh.expert > 1:  # layers are captured up to experts of other ranks
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
        keys = [f"`{name}` ({value})" for name, value in recompute_keys(run.model)]
        return f"does not capture RNG state, which {' and '.join(keys)} must restore to recompute noise or dropout"
    return None
