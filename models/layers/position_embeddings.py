"""Rotary embeddings and learned position embeddings, shared by the layers of a stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from ...kernels.rope import rotary_table, xpos_table
from ...kernels.rope_scaling import RotaryScaling
from ..config.model import EmbeddedStackSlice
from ..config.positions import RotarySlice


class RotaryTables(NamedTuple):
    """Cos/sin tables for rotary embedding, each (tokens, dim / 2) or (batch, tokens, dim / 2).

    Attributes:
        cosine: for queries, and for keys unless `key_cosine` is given.
        sine: for queries, and for keys unless `key_sine` is given.
        key_cosine: for keys, if different (xPos); else None.
        key_sine: for keys, if different (xPos); else None.
    """

    cosine: Tensor
    sine: Tensor
    key_cosine: Tensor | None = None
    key_sine: Tensor | None = None

    def for_keys(self) -> tuple[Tensor, Tensor]:
        """Return the cosine and sine for keys."""
        if self.key_cosine is None or self.key_sine is None:
            return self.cosine, self.sine
        return self.key_cosine, self.key_sine


class ComputedTable(nn.Module):
    """Module with tables that are computed: neither learned nor saved.

    `_fill` runs after every move or cast of the model: a table cast to bf16 would be inexact, and one moved from the
    meta device uninitialized.
    """

    def _fill(self) -> None:
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._fill()
        return self


class RotaryEmbedding(ComputedTable):
    """Rotary embedding: precomputed cos/sin tables, neither learned nor saved.

    Args:
        dim: rotated channels of a head, even.
        max_positions: maximal sequence length.
        base: base of the frequencies.
        position_scale: factor of every position (position interpolation).
        scaling: frequency scaling for long contexts, None for unscaled frequencies.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(
        self,
        dim: int,
        max_positions: int,
        *,
        base: float,
        position_scale: float,
        scaling: RotaryScaling | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.max_positions = max_positions
        self.base = base
        self.position_scale = position_scale
        self.scaling = scaling
        empty = torch.empty(max_positions, dim // 2)
        self.register_buffer("cosine", empty, persistent=False)
        self.register_buffer("sine", empty.clone(), persistent=False)
        self._fill()

    def _fill(self) -> None:
        """Compute the tables on the device of the buffers, in fp32 (fp64 in an fp64 model)."""
        if self.cosine.is_meta:
            return
        dtype = torch.promote_types(self.cosine.dtype, torch.float32)
        self.cosine, self.sine = rotary_table(
            self.max_positions,
            self.dim,
            base=self.base,
            position_scale=self.position_scale,
            scaling=self.scaling,
            dtype=dtype,
            device=self.cosine.device,
        )

    def forward(self, positions: int | Tensor) -> RotaryTables:
        """Return the cosine and sine of positions.

        Args:
            positions: position ids, int64 (batch, tokens), or their number n for 0 to n - 1.

        Returns:
            Each (tokens, dim / 2), or (batch, tokens, dim / 2).
        """
        if isinstance(positions, int):
            return RotaryTables(self.cosine[:positions], self.sine[:positions])
        return RotaryTables(self.cosine[positions], self.sine[positions])

    def extra_repr(self) -> str:
        """Return the settings shown by `print(model)`."""
        return f"dim={self.dim}, positions={self.max_positions}, base={self.base}"


class XPosEmbedding(ComputedTable):
    """Rotary embedding whose scores decay with distance (xPos, arXiv 2212.10554); see `kernels.rope.xpos_table`.

    Args:
        dim: channels of a head, even; all of them are rotated.
        max_positions: maximal sequence length.
    """

    tables: Tensor

    def __init__(self, dim: int, max_positions: int) -> None:
        super().__init__()
        self.dim = dim
        self.max_positions = max_positions
        self.register_buffer("tables", torch.empty(4, max_positions, dim // 2), persistent=False)
        self._fill()

    def _fill(self) -> None:
        if not self.tables.is_meta:
            dtype = torch.promote_types(self.tables.dtype, torch.float32)
            self.tables = torch.stack(xpos_table(self.max_positions, self.dim, dtype=dtype, device=self.tables.device))

    def forward(self, positions: int | Tensor) -> RotaryTables:
        """Return the cosine and sine for queries and for keys; positions as in `RotaryEmbedding`."""
        if isinstance(positions, int):
            return RotaryTables(*self.tables[:, :positions])
        return RotaryTables(*self.tables[:, positions])

    def extra_repr(self) -> str:
        """Return the settings shown by `print(model)`."""
        return f"dim={self.dim}, positions={self.max_positions}"


class SamplePositionEmbedding(nn.Module):
    """Learned position embedding indexed by the place in a sample, across documents (NeMo's `learned_parameters`).

    Args:
        positions: maximal sequence length.
        hidden_size: width of the residual stream.
    """

    def __init__(self, positions: int, hidden_size: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(positions, hidden_size))

    def forward(self, tokens: int) -> Tensor:
        """Return the embeddings of the first `tokens` positions, (tokens, hidden_size)."""
        return self.table[:tokens]


PositionEmbedding = nn.Embedding | SamplePositionEmbedding


def build_rotary(rotary: RotarySlice | None) -> RotaryEmbedding | XPosEmbedding | None:
    """Build the rotary embedding, or return None without one."""
    if rotary is None:
        return None
    if rotary.xpos:
        return XPosEmbedding(rotary.dim, rotary.positions)
    return RotaryEmbedding(
        rotary.dim,
        rotary.positions,
        base=rotary.base,
        position_scale=rotary.position_scale,
        scaling=rotary.scaling,
    )


def build_position_table(part: EmbeddedStackSlice) -> PositionEmbedding | None:
    """Build the learned position embedding of a stack, or return None without one."""
    if part.learned_positions is None:
        return None
    kind = nn.Embedding if part.positions_by_document else SamplePositionEmbedding
    return kind(part.learned_positions, part.stack.hidden_size)


# ---------------------------------------------------------------- cost


def rotary_table_bytes(rotary: RotarySlice | None) -> int:
    """Return the bytes of rotary tables: cos and sin in fp32, for xPos separate ones for keys."""
    return 0 if rotary is None else rotary.positions * rotary.dim * 4 * (2 if rotary.xpos else 1)
