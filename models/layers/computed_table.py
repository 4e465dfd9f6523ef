"""What modules with computed tables have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn


class ComputedTable(nn.Module):
    """A module with tables that are computed, not learned and not saved.

    Moves and casts of a model end in `_fill`: a table in bf16 would be wrong, one from the meta device empty.
    """

    def _fill(self) -> None:
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._fill()
        return self
