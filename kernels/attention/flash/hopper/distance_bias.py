"""Distance bias of the Hopper kernels: the lookup table they read, and the final reduction of the gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....launch import jit, tl, triton
from ..kernel_arguments import device_guard
from .launch_cache import launch_kernel

_NUMBERS = (
    "entries", "width", "extent", "reach", "inverse_scale", "batch", "heads", "key_blocks", "bands", "length", "begin",
)  # fmt: skip
kernel: Any = jit(do_not_specialize=_NUMBERS)

# upper bound of a tile's queries plus keys: a tile that overlaps the reach has distances below reach + SPAN
MAX_TILE_SPAN = 256


@kernel
def table_kernel(bias_pointer, table_pointer, entries, width, extent, reach, inverse_scale, BLOCK: tl.constexpr):
    """Each program writes BLOCK entries of both halves of `distance_table`: `entries` per half, `width` per head."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    distance = entry % width - extent
    row = bias_pointer + entry // width * (2 * reach + 1) + reach
    inside = entry < entries
    for neighbor in tl.static_range(-1, 2):
        clipped = tl.minimum(tl.maximum(distance + neighbor, -reach), reach)
        value = tl.load(row + clipped, mask=inside, other=0.0) * inverse_scale
        if neighbor != -1:
            tl.store(table_pointer + 2 * entry + neighbor, value, mask=inside)
        if neighbor != 1:
            tl.store(table_pointer + 2 * (entries + entry) - neighbor, value, mask=inside)


def distance_table(distance_bias: Tensor, scale: float) -> tuple[Tensor, int]:
    """Build the lookup table of a distance bias for the kernels: divided by the scale, its ends extended by SPAN.

    With the extension, a tile that overlaps the reach looks up every pair without clipping. A thread holds two adjacent
    elements of a row and loads both biases at once; along a row distances increase in one kernel and decrease in
    another, hence the two halves.

    Args:
        distance_bias: (heads, 2 reach + 1).
        scale: factor of the scores, > 0.

    Returns:
        fp32 (2, heads, 2 extent + 1, 2) and the extent, reach + SPAN. Entry extent + d of the first half contains the
        biases of the distances d and d + 1, of the second half those of d and d - 1.
    """
    heads, reach = distance_bias.shape[0], distance_bias.shape[1] // 2
    extent = reach + MAX_TILE_SPAN
    width = 2 * extent + 1
    table = distance_bias.new_empty(2, heads, width, 2, dtype=torch.promote_types(distance_bias.dtype, torch.float32))
    with device_guard(table):
        launch_kernel(table_kernel, triton.cdiv(heads * width, 1024), distance_bias.dtype, table.device, {
            "bias_pointer": distance_bias.contiguous(),
            "table_pointer": table,
            "entries": heads * width,
            "width": width,
            "extent": extent,
            "reach": reach,
            "inverse_scale": 1 / scale,
            "BLOCK": 1024,
        })  # fmt: skip
    return table, extent


def num_bands(reach: int) -> int:
    """Return the maximum number of tiles of 64 queries within the reach of a block of 64 keys."""
    return (2 * reach + 126) // 64 + 1


@kernel
def diagonal_sums_kernel(
    sums_pointer, line_pointer, batch, heads, key_blocks, bands, ROWS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Each program sums 64 distances of a head over sequences and key blocks, in order.

    Column c of band s is for the distance top - 64 s + c - 64, so the halves of adjacent bands cover the same 64
    distances. line: (heads, (bands + 1) * 64), distances from top - 64 bands on.
    """
    head = tl.program_id(0) // (bands + 1)
    band = tl.program_id(0) % (bands + 1)
    column = tl.arange(0, 64)[None, :]
    total = tl.zeros((64,), ACCUMULATE)
    upper_rows = tl.where(band < bands, batch * key_blocks, 0)
    lower_rows = tl.where(band > 0, batch * key_blocks, 0)
    for start in range(0, batch * key_blocks, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        block = (row // key_blocks * heads + head) * key_blocks + row % key_blocks
        pointers = sums_pointer + (block.to(tl.int64) * bands + band) * 128 + column
        upper = tl.load(pointers + 64, mask=row < upper_rows, other=0.0)
        lower = tl.load(pointers - 128, mask=row < lower_rows, other=0.0)
        total += tl.sum(upper + lower, 0)
    tl.store(line_pointer + (head * (bands + 1) + bands - band) * 64 + tl.arange(0, 64), total)


@kernel
def finalize_gradient_kernel(
    line_pointer, far_pointer, total_pointer, gradient_pointer,
    length, begin, reach,
    HAS_FAR: tl.constexpr, HAS_TOTAL: tl.constexpr, BLOCK: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Each program computes the gradient of a head from `line`, whose index `begin` is the distance 1 - reach.

    See `distance_gradient`.
    """
    head = tl.program_id(0)
    near, high = tl.zeros((BLOCK,), ACCUMULATE), tl.zeros((BLOCK,), ACCUMULATE)
    for start in range(0, length, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(line_pointer + head * length + index, mask=index < length, other=0.0)
        distance = index - begin + 1 - reach
        between = (distance > -reach) & (distance < reach)
        tl.store(gradient_pointer + head * (2 * reach + 1) + distance + reach, value, mask=between & (index < length))
        near += tl.where(between, value, 0.0)
        high += tl.where(distance >= reach, value, 0.0)
    total = tl.zeros((), ACCUMULATE)
    if HAS_TOTAL:
        total = tl.load(total_pointer + head)
    upper = tl.sum(high, 0)
    if HAS_FAR:
        upper += tl.load(far_pointer + head)
    tl.store(gradient_pointer + head * (2 * reach + 1) + 2 * reach, upper)
    tl.store(gradient_pointer + head * (2 * reach + 1), total - tl.sum(near, 0) - upper)


def distance_gradient(sums: Tensor, far: Tensor | None, total: Tensor | None, reach: int, offset: int) -> Tensor:
    """Compute the gradient of `distance_bias`, fp32 (heads, 2 reach + 1), from the sums of the two backward kernels.

    The sum over distances <= -reach is the remainder: the weights of a row sum to 1, so its score gradients sum to the
    gradient of its log-sum-exp.

    Args:
        sums: (batch, heads, key blocks, bands, 128), see `store_diagonals`.
        far: (batch, heads, queries), sums over far distances to the right, see `hopper_dq`; None for 0.
        total: (heads,), summed gradients of the log-sum-exp of all rows; None for 0.
        reach: reach of the bias.
        offset: keys - queries.
    """
    bands = num_bands(reach)
    batch, heads, key_blocks = sums.shape[:3]
    line = sums.new_empty(heads, (bands + 1) * 64)
    far = None if far is None else far.sum((0, 2))  # on all multiprocessors, unlike a program per head
    accumulate = tl.float64 if sums.dtype == torch.float64 else tl.float32
    first = (-offset - reach - 63) // 64 + 1  # query tile of band 0, seen from key 0
    top = -64 * first - offset  # distance of (key 0, query 0) of band 0
    gradient = sums.new_empty(heads, 2 * reach + 1)
    with device_guard(sums):
        launch_kernel(diagonal_sums_kernel, heads * (bands + 1), sums.dtype, sums.device, {
            "sums_pointer": sums,
            "line_pointer": line,
            "batch": batch,
            "heads": heads,
            "key_blocks": key_blocks,
            "bands": bands,
            "ROWS": 64,
            "ACCUMULATE": accumulate,
        })  # fmt: skip
        launch_kernel(finalize_gradient_kernel, heads, sums.dtype, sums.device, {
            "line_pointer": line,
            "far_pointer": line if far is None else far,
            "total_pointer": line if total is None else total,
            "gradient_pointer": gradient,
            "length": line.shape[1],
            "begin": 1 - reach - (top - 64 * bands),
            "reach": reach,
            "HAS_FAR": far is not None,
            "HAS_TOTAL": total is not None,
            "BLOCK": 1024,
            "ACCUMULATE": accumulate,
        })  # fmt: skip
    return gradient
