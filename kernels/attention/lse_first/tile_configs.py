"""Launch configurations of the LSE-first and recompute-scores kernels: tables per architecture, no autotuning."""

from __future__ import annotations

from typing import Literal

import torch

from ...launch import next_power_of_2
from ..flash.portable.tile_configs import INTERPRETER, TileConfig, has_large_memory

Stage = Literal["lse", "output", "weights", "score_gradient"]

# head width, padded to a power of two and at least 64 -> config; with eight warps no registers spill
_Table = dict[int, TileConfig]

# data center GPUs, Ampere to Blackwell: at least 163 KB of shared memory per program
_LARGE: dict[Stage, _Table] = {
    "lse": {64: TileConfig(128, 64, 8, 3), 128: TileConfig(128, 64, 8, 3), 256: TileConfig(128, 64, 8, 2)},
    "output": {64: TileConfig(128, 64, 8, 3), 128: TileConfig(128, 64, 8, 3), 256: TileConfig(64, 64, 8, 2)},
    "weights": {64: TileConfig(128, 64, 8, 3), 128: TileConfig(128, 64, 8, 3), 256: TileConfig(128, 64, 8, 2)},
    "score_gradient": {64: TileConfig(128, 64, 8, 2), 128: TileConfig(128, 64, 8, 2), 256: TileConfig(64, 32, 8, 2)},
}
# GPUs with 99 KB: sm_86, sm_89, sm_120
_SMALL: dict[Stage, _Table] = {
    "lse": {64: TileConfig(128, 64, 8, 3), 128: TileConfig(128, 32, 8, 2), 256: TileConfig(64, 32, 8, 1)},
    "output": {64: TileConfig(128, 64, 8, 2), 128: TileConfig(128, 32, 8, 2), 256: TileConfig(64, 32, 8, 1)},
    "weights": {64: TileConfig(128, 64, 8, 3), 128: TileConfig(128, 64, 8, 1), 256: TileConfig(64, 32, 8, 1)},
    "score_gradient": {64: TileConfig(64, 64, 8, 2), 128: TileConfig(64, 64, 8, 2), 256: TileConfig(32, 32, 4, 2)},
}


def stage_config(stage: Stage, head_dim: int, dtype: torch.dtype, capability: int | None) -> TileConfig:
    """Return the launch configuration of a stage's kernel.

    Args:
        stage: the kernel.
        head_dim: width of a head, 16 to 256.
        dtype: of the tensors; fp32 tiles need twice the shared memory of 16-bit ones, so they are halved.
        capability: of the GPU, 90 for sm_90; None in the interpreter. An unknown one uses the nearest table.
    """
    if capability is None:
        return INTERPRETER
    config = (_LARGE if has_large_memory(capability) else _SMALL)[stage][max(64, next_power_of_2(head_dim))]
    if dtype != torch.float32:
        return config
    return config._replace(queries=max(16, config.queries // 2), keys=max(16, config.keys // 2))
