"""Positions that turn queries and keys, or are added to the embeddings, as modules that the layers of a stack share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.rope import rotary_table, xpos_table
from ...kernels.rope_scaling import RotaryScaling
from .computed_table import ComputedTable


class Rotation(NamedTuple):
    """How far queries and keys turn: cosine and sine, each (tokens, dim / 2), or (batch, tokens, dim / 2).

    Attributes:
        cosine: of queries and keys.
        sine: likewise.
        key_cosine: of keys, where theirs differ from those of queries.
        key_sine: likewise.
    """

    cosine: Tensor
    sine: Tensor
    key_cosine: Tensor | None = None
    key_sine: Tensor | None = None

    def of_keys(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the keys."""
        if self.key_cosine is None or self.key_sine is None:
            return self.cosine, self.sine
        return self.key_cosine, self.key_sine


class RotaryEmbedding(ComputedTable):
    """The table of angles of a stack. It is computed, not learned and not saved.

    Args:
        dim: channels of a head that turn, even.
        positions: longest sequence.
        base: base of the frequencies.
        position_scale: factor of every position.
        scaling: other frequencies for long texts, None for those of `base`.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(
        self,
        dim: int,
        positions: int,
        *,
        base: float,
        position_scale: float,
        scaling: RotaryScaling | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.positions = positions
        self.base = base
        self.position_scale = position_scale
        self.scaling = scaling
        empty = torch.empty(positions, dim // 2)
        self.register_buffer("cosine", empty, persistent=False)
        self.register_buffer("sine", empty.clone(), persistent=False)
        self._fill()

    def _fill(self) -> None:
        """Compute the table where the buffers are, in fp32 (fp64 in an fp64 model)."""
        if self.cosine.is_meta:
            return
        dtype = torch.promote_types(self.cosine.dtype, torch.float32)
        self.cosine, self.sine = rotary_table(
            self.positions,
            self.dim,
            base=self.base,
            position_scale=self.position_scale,
            scaling=self.scaling,
            dtype=dtype,
            device=self.cosine.device,
        )

    def forward(self, positions: int | Tensor) -> Rotation:
        """Cosine and sine of positions.

        Args:
            positions: how many, from 0 on, or which, int64 (batch, tokens).

        Returns:
            Each (tokens, dim / 2), or (batch, tokens, dim / 2).
        """
        if isinstance(positions, int):
            return Rotation(self.cosine[:positions], self.sine[:positions])
        return Rotation(self.cosine[positions], self.sine[positions])

    def extra_repr(self) -> str:
        """The angles in words, for the printed model."""
        facts: dict[str, Any] = {"dim": self.dim, "positions": self.positions, "base": self.base}
        return ", ".join(f"{name}={value}" for name, value in facts.items())


class XPosEmbedding(ComputedTable):
    """Rotary embedding whose scores fade with distance (xPos, arXiv 2212.10554); see `kernels.rope.xpos_table`.

    Args:
        dim: channels of a head, even; all of them turn.
        positions: longest sequence.
    """

    tables: Tensor

    def __init__(self, dim: int, positions: int) -> None:
        super().__init__()
        self.dim = dim
        self.positions = positions
        self.register_buffer("tables", torch.empty(4, positions, dim // 2), persistent=False)
        self._fill()

    def _fill(self) -> None:
        if not self.tables.is_meta:
            dtype = torch.promote_types(self.tables.dtype, torch.float32)
            self.tables = torch.stack(xpos_table(self.positions, self.dim, dtype=dtype, device=self.tables.device))

    def forward(self, positions: int | Tensor) -> Rotation:
        """Cosine and sine of queries and of keys; positions as in `RotaryEmbedding`."""
        if isinstance(positions, int):
            return Rotation(*self.tables[:, :positions])
        return Rotation(*self.tables[:, positions])

    def extra_repr(self) -> str:
        """The angles in words, for the printed model."""
        return f"dim={self.dim}, positions={self.positions}"


class PositionTable(nn.Module):
    """One learned vector per place in a sample, whatever documents it holds (NeMo's `learned_parameters`).

    Args:
        positions: longest sequence.
        hidden_size: width of the residual stream.
    """

    def __init__(self, positions: int, hidden_size: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(positions, hidden_size))

    def forward(self, tokens: int) -> Tensor:
        """The vectors of the first places, (tokens, hidden_size)."""
        return self.table[:tokens]
