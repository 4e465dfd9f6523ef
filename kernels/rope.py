"""Rotary position embedding (RoPE, arXiv 2104.09864): cos/sin tables and their application."""

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
    """Return cos and sin of p * position_scale * base ** (-2i / dim), each (positions, dim / 2).

    Computed in fp64 on the CPU and rounded once, so that the table is the same on every device and rank.

    Args:
        positions: number of positions p.
        dim: rotated channels of a head, even.
        base: base of the frequencies.
        position_scale: factor of every position.
        scaling: frequency scaling for long contexts; its amplitude multiplies the whole table.
        dtype: dtype of the tables.
        device: device of the tables.
    """
    frequencies, amplitude = rotary_frequencies(dim, base), 1.0
    if scaling is not None:
        frequencies, amplitude = scaling.apply(frequencies, base), scaling.attention_factor
    position = torch.arange(positions, dtype=torch.float64, device="cpu") * position_scale
    angle = torch.outer(position, torch.tensor(frequencies, dtype=torch.float64, device="cpu"))
    cosine, sine = angle.cos() * amplitude, angle.sin() * amplitude
    # cast before the copy: some devices do not support fp64 (MPS)
    return cosine.to(dtype).to(device), sine.to(dtype).to(device)


def xpos_table(
    positions: int,
    dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the xPos tables (arXiv 2212.10554): cos and sin of queries, then of keys, each (positions, dim / 2).

    Rotation as in `rotary_table` with base 10000. In addition, channel pair k of a query at position p is multiplied by
    s_k^(p / 2048), and that of a key divided by it, with s_k = (2 k / dim + 0.4) / 1.4, so that scores decay with
    distance. Only differences of positions matter; p starts at -positions / 2, which keeps both factors small.
    """
    cosine, sine = rotary_table(positions, dim, dtype=torch.float64, device="cpu")
    pair = torch.arange(dim // 2, dtype=torch.float64, device="cpu")
    position = torch.arange(positions, dtype=torch.float64, device="cpu") - positions // 2
    growth = ((2 * pair / dim + 0.4) / 1.4) ** (position / 2048)[:, None]
    tables = cosine * growth, sine * growth, cosine / growth, sine / growth
    first, second, third, fourth = (table.to(dtype).to(device) for table in tables)
    return first, second, third, fourth


def apply_rotary(heads: Tensor, cosine: Tensor, sine: Tensor, *, interleaved: bool = False) -> Tensor:
    """Apply the rotary embedding to the first `dim` channels of every head; the others pass through unchanged.

    Args:
        heads: queries or keys, (batch, tokens, heads, head_dim).
        cosine: (tokens, dim / 2), or (batch, tokens, dim / 2) if rows have different positions, with dim <= head_dim;
            fp32 (fp64 for fp64 heads).
        sine: like `cosine`.
        interleaved: rotate pairs (2i, 2i + 1) (GPT-J style); otherwise channel i with i + dim / 2 (GPT-NeoX style).

    Returns:
        Same shape and dtype as `heads`, computed in the dtype of the tables and rounded once.
    """
    dim = 2 * cosine.shape[-1]
    unrotated = heads[..., dim:]
    channels = heads[..., :dim].to(cosine.dtype)
    cosine, sine = cosine.unsqueeze(-2), sine.unsqueeze(-2)  # (tokens, 1, dim / 2)
    if interleaved:
        first, second = channels.unflatten(-1, (dim // 2, 2)).unbind(-1)
    else:
        first, second = channels.chunk(2, dim=-1)
    rotated_first, rotated_second = first * cosine - second * sine, second * cosine + first * sine
    if interleaved:
        rotated = torch.stack((rotated_first, rotated_second), dim=-1).flatten(-2)
    else:
        rotated = torch.cat((rotated_first, rotated_second), dim=-1)
    rotated = rotated.to(heads.dtype)
    return rotated if dim == heads.shape[-1] else torch.cat((rotated, unrotated), dim=-1)
