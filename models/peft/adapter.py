"""Adapters: a small MLP after a part of a layer (arXiv 1902.00751, with NeMo's activation and norm)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.peft_slice import AdapterSlice
from ..layers.norm import LayerNorm
from .added_parameters import Added, drawn

_EPSILON = 1e-5


class Bottleneck(Added):
    """y + dropout(up(silu(down(norm(y))))); `post` norms what `up` gives instead.

    Args:
        hidden_size: width of y.
        adapter: what it is like.
    """

    def __init__(self, hidden_size: int, adapter: AdapterSlice) -> None:
        super().__init__()
        self.adapter = adapter
        self.draws = adapter.dropout > 0
        self.norm = LayerNorm(hidden_size, _EPSILON) if adapter.norm_position else None
        self.down = nn.Parameter(torch.empty(adapter.width, hidden_size))
        self.up = nn.Parameter(torch.empty(hidden_size, adapter.width))

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., hidden_size) to the same shape."""
        position = self.adapter.norm_position
        read = self.norm(hidden) if self.norm is not None and position == "pre" else hidden
        update = F.linear(F.silu(F.linear(read, self.down)), self.up)
        if self.norm is not None and position == "post":
            update = self.norm(update)
        if self.training and self.adapter.dropout:
            update = F.dropout(update, self.adapter.dropout)
        return hidden + update

    def initial(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Matrices as the keys say, a norm that changes nothing but the scale."""
        if name == "norm.weight":
            return torch.ones(shape)
        if name == "norm.bias":
            return torch.zeros(shape)
        return drawn(self.adapter.column_init if name == "down" else self.adapter.row_init, shape, generator)
