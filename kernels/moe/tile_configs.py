"""Tile sizes, warps and stages of the grouped matmuls: tables per architecture, never tuned at run time."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from ..launch import INTERPRETED

Kind = Literal["gated", "activated", "rows", "outer"]


class TileConfig(NamedTuple):
    """How a kernel is launched.

    Attributes:
        rows: height of a tile of the result; of `outer`, columns of its left operand.
        columns: width of a tile; of `gated`, of each half.
        depth: length of a step along the sum.
        warps: warps of a program.
        stages: steps whose loads are under way.
        together: tiles one above the other that are computed at about the same time, so that they share what they
            read in the L2 cache.
        resident: programs that a multiprocessor holds at once.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    together: int = 8
    resident: int = 1


_Table = dict[Kind, TileConfig]  # all kinds but `outer` have tiles of the same height

_INTERPRETER: _Table = {
    "gated": TileConfig(16, 16, 16, 4, 1, 2),
    "activated": TileConfig(16, 32, 16, 4, 1, 2),
    "rows": TileConfig(16, 32, 16, 4, 1, 2),
    "outer": TileConfig(16, 32, 16, 4, 1, 2),
}

# Hopper and Blackwell data centre GPUs: 227 KB of shared memory, two warp groups share a tile
_HOPPER: _Table = {
    "gated": TileConfig(128, 128, 64, 8, 3),
    "activated": TileConfig(128, 128, 64, 8, 4),
    "rows": TileConfig(128, 256, 64, 8, 3),
    "outer": TileConfig(128, 256, 64, 8, 3),
}

# Ampere data centre GPUs: 163 KB, and registers hold the operands too
_AMPERE: _Table = {
    "gated": TileConfig(128, 64, 32, 8, 4),
    "activated": TileConfig(128, 128, 32, 8, 4),
    "rows": TileConfig(128, 256, 32, 8, 4),
    "outer": TileConfig(128, 128, 32, 8, 5),
}

# 99 KB: sm_86, sm_89, sm_120
_SMALL: _Table = {
    "gated": TileConfig(128, 64, 32, 8, 4),
    "activated": TileConfig(128, 128, 32, 8, 4),
    "rows": TileConfig(128, 128, 32, 8, 4),
    "outer": TileConfig(128, 128, 32, 8, 5),
}

# fp32, and rows that do not start at multiples of 16 elements, which are read one by one
_FP32: _Table = {
    "gated": TileConfig(64, 32, 32, 8, 2),
    "activated": TileConfig(64, 64, 32, 8, 2),
    "rows": TileConfig(64, 64, 32, 8, 2),
    "outer": TileConfig(64, 64, 32, 8, 2),
}

LOW_ROWS = 64
"""Height of a tile of `gated` and `rows` where experts have few rows; a table gives both the same height."""


def device_capability(device: torch.device) -> int | None:
    """Compute capability of a device, 90 for sm_90; None in the interpreter."""
    if INTERPRETED:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def tile_config(
    kind: Kind,
    dtype: torch.dtype,
    capability: int | None,
    *,
    low: bool = False,
    aligned: bool = True,
    erf: bool = False,
) -> TileConfig:
    """Config of a kernel.

    Args:
        kind: `rows`, rows of an expert times its matrix; `activated` and `gated`, that with an activation or a gated
            one behind it; `outer`, the gradient of an expert's matrix.
        dtype: of the operands.
        capability: of the GPU, 90 for sm_90; None in the interpreter.
        low: the experts have so few rows that tiles of `LOW_ROWS` waste less.
        aligned: all widths and strides are multiples of 16 elements.
        erf: the activation is the exact GELU, whose numbers need the registers of half a gated tile.
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
    if low and kind != "outer":
        config = config._replace(rows=LOW_ROWS)
    if erf and kind == "gated" and config.columns > 64:
        config = config._replace(columns=64, stages=config.stages + 1)
    return config


def is_low(rows: int, experts: int) -> bool:
    """Whether an expert has so few rows on average that a tile of 128 would mostly be padding."""
    return rows < 96 * experts


def is_aligned(*numbers: int) -> bool:
    """Whether widths and strides are all multiples of 16 elements, but for the stride 1."""
    return all(number == 1 or number % 16 == 0 for number in numbers)
