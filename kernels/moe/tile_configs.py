"""Tile sizes, warps and stages of the grouped matmuls: static tables per GPU architecture, without autotuning."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Kind = Literal["gated", "activated", "rows", "outer"]


class TileConfig(NamedTuple):
    """Launch configuration of a kernel.

    Attributes:
        block_m: rows of an output tile (BLOCK_M); for `outer`, columns of its left operand.
        block_n: columns of an output tile (BLOCK_N); for `gated`, of each half.
        block_k: reduction length of a step (BLOCK_K).
        num_warps: warps per program.
        num_stages: pipeline stages.
        group_m: row tiles in a group that is processed column by column, for L2 reuse (GROUP_SIZE_M in Triton's
            tutorials).
        programs_per_sm: concurrent programs per multiprocessor.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    programs_per_sm: int = 1


_Table = dict[Kind, TileConfig]  # tiles of all kinds but `outer` have the same number of rows

_INTERPRETER: _Table = {
    "gated": TileConfig(16, 16, 16, 4, 1, 2),
    "activated": TileConfig(16, 32, 16, 4, 1, 2),
    "rows": TileConfig(16, 32, 16, 4, 1, 2),
    "outer": TileConfig(16, 32, 16, 4, 1, 2),
}

# Hopper and Blackwell data center GPUs: 227 KB of shared memory, two warp groups per tile
_HOPPER: _Table = {
    "gated": TileConfig(128, 128, 64, 8, 3),
    "activated": TileConfig(128, 128, 64, 8, 4),
    "rows": TileConfig(128, 256, 64, 8, 3),
    "outer": TileConfig(128, 256, 64, 8, 3),
}

# Ampere data center GPUs: 163 KB of shared memory, and operands take registers too
_AMPERE: _Table = {
    "gated": TileConfig(128, 64, 32, 8, 4),
    "activated": TileConfig(128, 128, 32, 8, 4),
    "rows": TileConfig(128, 256, 32, 8, 4),
    "outer": TileConfig(128, 128, 32, 8, 5),
}

# sm_86, sm_89, sm_120: 99 KB of shared memory
_SMALL: _Table = {
    "gated": TileConfig(128, 64, 32, 8, 4),
    "activated": TileConfig(128, 128, 32, 8, 4),
    "rows": TileConfig(128, 128, 32, 8, 4),
    "outer": TileConfig(128, 128, 32, 8, 5),
}

# fp32, and rows that do not start at multiples of 16 elements, whose loads are not vectorized
_FP32: _Table = {
    "gated": TileConfig(64, 32, 32, 8, 2),
    "activated": TileConfig(64, 64, 32, 8, 2),
    "rows": TileConfig(64, 64, 32, 8, 2),
    "outer": TileConfig(64, 64, 32, 8, 2),
}

FEW_ROWS_BLOCK_M = 64
"""Rows of a tile when experts have few rows, for all kinds but `outer`."""


def tile_config(
    kind: Kind,
    dtype: torch.dtype,
    capability: int | None,
    *,
    few_rows: bool = False,
    aligned: bool = True,
    exact_gelu: bool = False,
) -> TileConfig:
    """Return the configuration of a kernel.

    Args:
        kind: `rows`, rows times the matrix of their expert; `activated` and `gated`, the same with a fused plain or
            gated activation; `outer`, the gradient of an expert's matrix.
        dtype: dtype of the operands.
        capability: compute capability of the GPU, 90 for sm_90; None in the interpreter.
        few_rows: experts have so few rows that tiles of `FEW_ROWS_BLOCK_M` waste less.
        aligned: all widths and strides are multiples of 16 elements.
        exact_gelu: the activation is the exact GELU, whose intermediates need the registers of half a gated tile.
    """
    if capability is None:
        return _INTERPRETER[kind]
    if dtype == torch.float32 or not aligned:
        return _FP32[kind]
    if capability in (80, 87):
        config = _AMPERE[kind]
    elif 90 <= capability < 120:
        config = _HOPPER[kind]
    else:
        config = _SMALL[kind]
    if few_rows and kind != "outer":
        config = config._replace(block_m=FEW_ROWS_BLOCK_M)
    if exact_gelu and kind == "gated" and config.block_n > 64:
        config = config._replace(block_n=64, num_stages=config.num_stages + 1)
    return config


def has_few_rows(rows: int, experts: int) -> bool:
    """Return True if experts have so few rows on average that tiles of 128 rows would mostly be padding."""
    return rows < 96 * experts


def is_aligned(*numbers: int) -> bool:
    """Return True if widths and strides are all multiples of 16 elements, except for strides of 1."""
    return all(number == 1 or number % 16 == 0 for number in numbers)
