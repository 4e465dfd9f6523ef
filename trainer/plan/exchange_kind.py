"""Tells who runs the collectives of weights and gradients of data-parallel ranks: copy engines, NCCL or gloo; and why.

`distributed.copy_engine.build_collectives` decides so when a run starts, of which this knows the GPUs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..config.parameter_layout import DataParallelLayout
from ..config.resolved_run import ResolvedRun
from .target import Target

ExchangeKind = Literal["copy engines", "NCCL", "gloo"]


class DataExchange(NamedTuple):
    """Collectives of weights and gradients of data-parallel ranks.

    Attributes:
        by: what runs them.
        reason: reason for that.
        experts: what runs those of experts that several ranks have; empty without.
    """

    by: ExchangeKind
    reason: str
    experts: ExchangeKind | Literal[""] = ""

    def __str__(self) -> str:
        experts = f"; those of experts by {self.experts}" if self.experts not in ("", self.by) else ""
        return f"by {self.by}: {self.reason}{experts}"


def data_exchange(run: ResolvedRun, target: Target, pipeline_rank: int = 0) -> DataExchange | None:
    """Return the collectives of a pipeline rank; None if no other rank has the same part of the model."""
    if run.layout is None:
        return None
    by, reason = _kind(run, run.layout, target, pipeline_rank)
    if run.model.copy_engine_collectives and by != "copy engines":
        reason += "; with model.copy_engine_collectives=True the run does not start"
    shared = run.mesh.world_size // run.mesh.pipeline > run.mesh.expert > 1
    return DataExchange(by, reason, ("NCCL" if by == "copy engines" else by) if shared else "")


def _kind(run: ResolvedRun, layout: DataParallelLayout, target: Target, pipeline_rank: int) -> tuple[ExchangeKind, str]:
    mesh = run.mesh
    if target.device != "cuda":
        return "gloo", "the ranks have no GPU"
    if run.model.copy_engine_collectives is False:
        return "NCCL", "model.copy_engine_collectives=False"
    if not layout.replicates_weights and layout.replicas > 1:
        return "NCCL", "model.fsdp_sharding_strategy=hybrid"
    stage = mesh.world_size // mesh.pipeline
    first = pipeline_rank * stage
    if first // run.ranks_per_node != (first + stage - mesh.tensor) // run.ranks_per_node:
        return "NCCL", "the ranks are on several hosts"
    if target.peer_access is not None:
        if not target.peer_access:
            return "NCCL", "the ranks do not see each other's GPUs, or these cannot read each other's memory"
        return "copy engines", "the ranks are on one host, and its GPUs read each other's memory"
    if target.gpu is not None and target.gpu.has_nvlink:
        return "copy engines", "the ranks are on one host, and its GPUs are linked by NVLink"
    return "NCCL", "GPUs without NVLink are assumed not to read each other's memory"


def moving_weights_reason(run: ResolvedRun, target: Target) -> str | None:
    """Return the reason why FSDP gathers weights into memory that changes; None if it is fixed, or nothing is gathered
    before its use.
    """
    layout = run.layout
    if layout is None or layout.replicates_weights:
        return None
    kinds = (_kind(run, layout, target, rank) for rank in range(run.mesh.pipeline))
    return next((f"by {by}: {reason}" for by, reason in kinds if by != "copy engines"), None)
