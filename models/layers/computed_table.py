"""Base class of modules with computed, non-persistent tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn


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
