"""A distance bias on its way into the Hopper kernels, and its gradient on its way out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ....launch import jit, tl
from ..problem import on_device

# tiles of at most this many queries and keys together: a tile that is not far has distances below reach + this
SPAN = 256


def distance_table(distance_bias: Tensor, scale: float) -> tuple[Tensor, int]:
    """A distance bias as the kernels read it: in units of the unscaled scores, its ends drawn out by SPAN.

    A tile of which some pair is nearer than the reach then looks up every pair without a comparison.

    Args:
        distance_bias: (heads, 2 reach + 1).
        scale: of the scores, > 0.

    Returns:
        fp32 (heads, 2 extent + 1) and the extent, reach + SPAN; entry extent + d is for distance d.
    """
    table = F.pad((distance_bias.float() / scale)[None], (SPAN, SPAN), mode="replicate")[0]
    return table, distance_bias.shape[1] // 2 + SPAN


def bands_of(reach: int) -> int:
    """How many tiles of 64 queries have a pair nearer than the reach with some key of a block of 64, at most."""
    return (2 * reach + 126) // 64 + 1


@jit
def line_kernel(
    sums_pointer, line_pointer, batch, heads, key_blocks, bands, ROWS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """One program: 64 distances of a head, summed over sequences and key blocks in order.

    Column c of band s is for the distance top - 64 s + c - 64, so halves of neighbours cover the same 64 distances.
    line: (heads, (bands + 1) * 64), distances from top - 64 bands on.
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
        here = sums_pointer + (block.to(tl.int64) * bands + band) * 128 + column
        upper = tl.load(here + 64, mask=row < upper_rows, other=0.0)
        lower = tl.load(here - 128, mask=row < lower_rows, other=0.0)
        total += tl.sum(upper + lower, 0)
    tl.store(line_pointer + (head * (bands + 1) + bands - band) * 64 + tl.arange(0, 64), total)


def distance_gradient(sums: Tensor, far: Tensor | None, total: Tensor | None, reach: int, offset: int) -> Tensor:
    """Gradient of `distance_bias`, fp32 (heads, 2 reach + 1), from the sums that the two backward kernels leave.

    What is far to the left is the rest: a row's weights add up to 1, so the gradients of its scores add up to the
    gradient of its log-sum-exp.

    Args:
        sums: (batch, heads, key blocks, bands, 128), see `store_diagonals`.
        far: (batch, heads, queries), what is far to the right, see `hopper_dq`; None for nothing.
        total: (heads,), the gradients of the log-sum-exps of all rows; None for 0.
        reach: of the bias.
        offset: keys - queries.
    """
    bands = bands_of(reach)
    batch, heads, key_blocks = sums.shape[:3]
    line = sums.new_empty(heads, (bands + 1) * 64)
    accumulate = tl.float64 if sums.dtype == torch.float64 else tl.float32
    with on_device(sums):
        line_kernel[(heads * (bands + 1),)](
            sums, line, batch, heads, key_blocks, bands, ROWS=32, ACCUMULATE=accumulate, num_warps=4
        )
    first = (-offset - reach - 63) // 64 + 1  # query tile of band 0, seen from key 0
    top = -64 * first - offset  # distance of (key 0, query 0) of band 0
    begin, end = (limit - (top - 64 * bands) for limit in (1 - reach, reach))  # of the distances between the two ends
    between, high = line[:, begin:end], line[:, end:].sum(1)
    if far is not None:
        high = high + far.sum((0, 2))
    low = -between.sum(1) - high
    if total is not None:
        low = low + total
    return torch.cat([low[:, None], between, high[:, None]], dim=1)
