"""Rotary position embedding (RoFormer, arXiv 2104.09864): the table of angles and its application."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(
    positions: int,
    dim: int,
    *,
    base: float = 10000.0,
    position_scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of p * position_scale * base ** (-2i / dim), each (positions, dim / 2).

    Computed in fp64 on the CPU and rounded once, so that every device and every sharding holds the same table.
    """
    channel = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu")
    position = torch.arange(positions, dtype=torch.float64, device="cpu") * position_scale
    angle = torch.outer(position, base ** (-channel / dim))
    # rounded before it travels: not every device knows fp64 (MPS)
    return angle.cos().to(dtype).to(device), angle.sin().to(dtype).to(device)


def apply_rotary(heads: Tensor, cosine: Tensor, sine: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn the first channels of every head by the angle of its position; the others pass.

    Args:
        heads: (batch, tokens, heads, head_dim).
        cosine: (tokens, dim / 2), or (batch, tokens, dim / 2) for rows of different positions, with dim <= head_dim;
            fp32 (fp64 for fp64 heads).
        sine: like `cosine`.
        interleaved: turn the pairs (2i, 2i + 1); otherwise channel i with channel i + dim / 2.

    Returns:
        Like `heads`, computed in the dtype of the table and rounded once.
    """
    dim = 2 * cosine.shape[-1]
    passing = heads[..., dim:]
    turning = heads[..., :dim].to(cosine.dtype)
    cosine, sine = cosine.unsqueeze(-2), sine.unsqueeze(-2)  # (tokens, 1, dim / 2)
    if interleaved:
        first, second = turning.unflatten(-1, (dim // 2, 2)).unbind(-1)
    else:
        first, second = turning.chunk(2, dim=-1)
    turned_first, turned_second = first * cosine - second * sine, second * cosine + first * sine
    if interleaved:
        turned = torch.stack((turned_first, turned_second), dim=-1).flatten(-2)
    else:
        turned = torch.cat((turned_first, turned_second), dim=-1)
    turned = turned.to(heads.dtype)
    return turned if dim == heads.shape[-1] else torch.cat((turned, passing), dim=-1)
