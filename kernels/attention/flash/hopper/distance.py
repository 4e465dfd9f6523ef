"""A distance bias on its way into the Hopper kernels, and its gradient on its way out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
    by_band = sums.sum((0, 2))  # (heads, bands, 128)
    first = (-offset - reach - 63) // 64 + 1  # query tile of band 0, seen from key 0
    top = -64 * first - offset  # distance of (key 0, query 0) of band 0
    # column c of band s is for the distance top - 64 s + c - 64: halves of neighbours cover the same 64 distances
    lower, upper = by_band[..., :64], by_band[..., 64:]
    line = F.pad(upper, (0, 0, 0, 1)) + F.pad(lower, (0, 0, 1, 0))  # (heads, bands + 1, 64), the farthest first
    line = line.flip(1).flatten(1)  # distances from top - 64 bands on
    begin, end = (limit - (top - 64 * bands) for limit in (1 - reach, reach))  # of the distances between the two ends
    between, high = line[:, begin:end], line[:, end:].sum(1)
    if far is not None:
        high = high + far.sum((0, 2))
    low = -between.sum(1) - high
    if total is not None:
        low = low + total
    return torch.cat([low[:, None], between, high[:, None]], dim=1)
