"""Rotary embedding as a module that the layers of a stack share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..kernels.rope import rotary_table


class RotaryEmbedding(nn.Module):
    """The table of angles of a stack. It is computed, not learned and not saved.

    Args:
        dim: channels of a head that turn, even.
        positions: longest sequence.
        base: base of the frequencies.
        position_scale: factor of every position.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(self, dim: int, positions: int, *, base: float, position_scale: float) -> None:
        super().__init__()
        self.dim = dim
        self.positions = positions
        self.base = base
        self.position_scale = position_scale
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
            dtype=dtype,
            device=self.cosine.device,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves and casts of the model end here: a bf16 table would be wrong, one from the meta device empty."""
        super()._apply(fn, recurse)
        self._fill()
        return self

    def forward(self, positions: int | Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of positions.

        Args:
            positions: how many, from 0 on, or which, int64 (batch, tokens).

        Returns:
            Each (tokens, dim / 2), or (batch, tokens, dim / 2).
        """
        if isinstance(positions, int):
            return self.cosine[:positions], self.sine[:positions]
        return self.cosine[positions], self.sine[positions]

    def extra_repr(self) -> str:
        """The angles in words, for the printed model."""
        facts: dict[str, Any] = {"dim": self.dim, "positions": self.positions, "base": self.base}
        return ", ".join(f"{name}={value}" for name, value in facts.items())
