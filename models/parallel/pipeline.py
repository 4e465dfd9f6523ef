"""The ranks of a pipeline, and what one of them has of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .stages import PipelineSplit, Stage


@dataclass(frozen=True, slots=True)
class PipelineParallel:
    """The pipeline ranks of this process.

    Attributes:
        rank: rank in the pipeline.
        split: how they share the layers.
        replica: index of this rank among those of its stages that hold the same parameters, if it shares these with no
            tensor-parallel or expert-parallel ranks.
        num_replicas: number of those.
    """

    rank: int
    split: PipelineSplit
    replica: int = 0
    num_replicas: int = 1


@dataclass(frozen=True, slots=True)
class RankStages:
    """Stages of a rank.

    Attributes:
        stages: first to last.
        shared: pipeline ranks that hold the same parameter, by its name, for those held by several: tied embeddings,
            and position biases, which all layers of a stack share. Of each rank only its own parameters.
        groups: those of `shared` for all parameters of the model, in an order that is the same on every rank.
    """

    stages: tuple[Stage, ...]
    shared: Mapping[str, tuple[int, ...]]
    groups: tuple[tuple[int, ...], ...]
