"""Rotary position embedding (RoFormer, arXiv 2104.09864): the table of angles and its application."""

from __future__ import annotations

import torch
from torch import Tensor

from .rope_scaling import RotaryScaling, rotary_frequencies


def rotary_table(
    positions: int,
    dim: int,
    *,
    base: float = 10000.0,
    position_scale: float = 1.0,
    scaling: RotaryScaling | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of p * position_scale * base ** (-2i / dim), each (positions, dim / 2).

    Computed in fp64 on the CPU and rounded once, so that every device and every sharding holds the same table.

    Args:
        positions: rows.
        dim: rotated channels of a head, even.
        base: of the frequencies.
        position_scale: factor of every position.
        scaling: other frequencies for long texts; its amplitude is a factor of the whole table.
        dtype: of the table.
        device: of the table.
    """
    frequencies, amplitude = rotary_frequencies(dim, base), 1.0
    if scaling is not None:
        frequencies, amplitude = scaling.apply(frequencies, base), scaling.amplitude
    position = torch.arange(positions, dtype=torch.float64, device="cpu") * position_scale
    angle = torch.outer(position, torch.tensor(frequencies, dtype=torch.float64, device="cpu"))
    cosine, sine = angle.cos() * amplitude, angle.sin() * amplitude
    # rounded before it travels: not every device knows fp64 (MPS)
    return cosine.to(dtype).to(device), sine.to(dtype).to(device)


def xpos_table(
    positions: int,
    dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cosine and sine of queries, then of keys, each (positions, dim / 2): xPos (arXiv 2212.10554).

    Rotation as in `rotary_table` with base 10000. Besides, channel pair k of a query at p grows by s_k^(p / 2048) and
    that of a key shrinks by it, s_k = (2 k / dim + 0.4) / 1.4: a score fades with distance. Only differences of
    positions matter; p counts from -positions / 2, so that neither factor gets large.
    """
    cosine, sine = rotary_table(positions, dim, dtype=torch.float64, device="cpu")
    pair = torch.arange(dim // 2, dtype=torch.float64, device="cpu")
    position = torch.arange(positions, dtype=torch.float64, device="cpu") - positions // 2
    growth = ((2 * pair / dim + 0.4) / 1.4) ** (position / 2048)[:, None]
    tables = cosine * growth, sine * growth, cosine / growth, sine / growth
    first, second, third, fourth = (table.to(dtype).to(device) for table in tables)
    return first, second, third, fourth


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
