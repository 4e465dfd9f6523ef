"""Bottleneck adapters: a small MLP after attention or MLP (arXiv 1902.00751, with NeMo's activation and norm)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.peft import AdapterSlice
from ..layers.dropout import DropoutMask, require_dropout
from ..layers.norm import LayerNorm
from .added_parameters import PeftModule, init_matrix

_EPSILON = 1e-5


class BottleneckAdapter(PeftModule):
    """Adapter y + dropout(up(silu(down(norm(y))))); with norm position `post`, the norm is on the output of `up`.

    Args:
        hidden_size: width of y.
        adapter: bottleneck width, norm position, dropout and initialization.
    """

    def __init__(self, hidden_size: int, adapter: AdapterSlice) -> None:
        super().__init__()
        self.adapter = adapter
        self.has_dropout = adapter.dropout > 0
        self.norm = LayerNorm(hidden_size, _EPSILON) if adapter.norm_position else None
        self.down = nn.Parameter(torch.empty(adapter.width, hidden_size))
        self.up = nn.Parameter(torch.empty(hidden_size, adapter.width))

    def forward(self, hidden: Tensor, dropout: DropoutMask | None = None) -> Tensor:
        """Map (..., hidden_size) to the same shape; `dropout` is the mask of its dropout in training."""
        position = self.adapter.norm_position
        inputs = self.norm(hidden) if self.norm is not None and position == "pre" else hidden
        update = F.linear(F.silu(F.linear(inputs, self.down)), self.up)
        if self.norm is not None and position == "post":
            update = self.norm(update)
        if self.training and self.adapter.dropout:
            return require_dropout(dropout).apply(update, self.adapter.dropout, hidden)
        return hidden + update

    def initial_parameter(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Initialize matrices by the configured methods, the norm to weight 1 and bias 0."""
        if name == "norm.weight":
            return torch.ones(shape)
        if name == "norm.bias":
            return torch.zeros(shape)
        return init_matrix(self.adapter.column_init if name == "down" else self.adapter.row_init, shape, generator)
