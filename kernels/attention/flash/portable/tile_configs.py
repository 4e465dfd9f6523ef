"""Launch configurations of the flash attention kernels: tables per architecture, no autotuning."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from ....launch import next_power_of_2

KernelKind = Literal["forward", "dq", "dkdv", "bias_gradient", "distance_gradient"]


class TileConfig(NamedTuple):
    """Queries and keys per tile, warps per program and software pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


# head width, padded to a power of two -> config
_Table = dict[int, TileConfig]

# small tiles, so that even the short sequences of tests have several per axis
INTERPRETER = TileConfig(32, 32, 4, 1)

# data center GPUs, Ampere to Blackwell: at least 163 KB of shared memory per program
_LARGE: dict[KernelKind, _Table] = {
    "forward": {
        16: TileConfig(128, 64, 8, 3),
        32: TileConfig(128, 64, 8, 3),
        64: TileConfig(128, 64, 8, 3),
        128: TileConfig(128, 64, 8, 3),
        256: TileConfig(128, 64, 8, 2),
    },
    "dq": {
        16: TileConfig(128, 64, 8, 2),
        32: TileConfig(128, 64, 8, 2),
        64: TileConfig(128, 64, 8, 2),
        128: TileConfig(128, 64, 8, 2),
        256: TileConfig(64, 32, 8, 2),
    },
    "dkdv": {
        16: TileConfig(64, 128, 8, 2),
        32: TileConfig(64, 128, 8, 2),
        64: TileConfig(64, 128, 8, 2),
        128: TileConfig(32, 128, 8, 2),
        256: TileConfig(32, 64, 8, 2),
    },
}

# GPUs with 99 KB: sm_86, sm_89, sm_120
_SMALL: dict[KernelKind, _Table] = {
    "forward": _LARGE["forward"] | {128: TileConfig(128, 32, 8, 2), 256: TileConfig(64, 32, 8, 1)},
    "dq": {
        16: TileConfig(64, 64, 8, 2),
        32: TileConfig(64, 64, 8, 2),
        64: TileConfig(64, 64, 8, 2),
        128: TileConfig(64, 32, 4, 2),
        256: TileConfig(64, 16, 8, 1),
    },
    "dkdv": {
        16: TileConfig(64, 64, 8, 2),
        32: TileConfig(64, 64, 8, 2),
        64: TileConfig(64, 64, 8, 2),
        128: TileConfig(32, 64, 8, 2),
        256: TileConfig(16, 64, 8, 1),
    },
}

# the two kernels of bias gradients hold four tiles of rows and loop over heads or along a diagonal; the one of
# `distance_bias` requires square tiles
_GRADIENTS: _Table = {
    16: TileConfig(64, 64, 4, 1),
    32: TileConfig(64, 64, 4, 1),
    64: TileConfig(64, 64, 4, 1),
    128: TileConfig(64, 64, 4, 1),
    256: TileConfig(32, 32, 4, 1),
}


def tile_config(
    kind: KernelKind, head_dim: int, dtype: torch.dtype, capability: int | None, *, dense_bias: bool = False
) -> TileConfig:
    """Return the launch configuration of a kernel.

    Args:
        kind: the kernel.
        head_dim: width of a head, 16 to 256.
        dtype: of the tensors; fp32 tiles need twice the shared memory of 16-bit ones, so they are halved.
        capability: of the GPU, 90 for sm_90; None in the interpreter. An unknown one uses the nearest table.
        dense_bias: a bias tile is loaded with each tile of scores, for which one pipeline stage is dropped.
    """
    if capability is None:
        return INTERPRETER
    width = max(16, next_power_of_2(head_dim))
    if kind in ("bias_gradient", "distance_gradient"):
        config = _GRADIENTS[width]
    else:
        config = (_LARGE if has_large_memory(capability) else _SMALL)[kind][width]
    if dense_bias:
        config = config._replace(stages=max(1, config.stages - 1))
    if dtype == torch.float32:
        widest = width == 256 and not has_large_memory(capability)
        keys = 16 if widest else max(16, config.keys // 2)
        config = config._replace(queries=max(16, config.queries // 2), keys=keys)
    return config


def has_large_memory(capability: int) -> bool:
    """Return True for at least 163 KB of shared memory per program: sm_80, 87, and 90 to 110."""
    return capability in (80, 87) or 90 <= capability < 120
