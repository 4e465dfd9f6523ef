"""Expert MLPs with LoRA: differentiable grouped matmuls with the frozen and the low-rank matrices.

The frozen matrices get no gradient and are not copied or merged: the low-rank products are separate grouped matmuls of
the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..launch import triton_runs_on
from .assignments import padded_assignments, sorted_assignments
from .grouped_matmul import Backend, grouped_matmul
from .permute import combine_rows, gather_rows
from .reference_experts import activated


class LoRAMatrices(NamedTuple):
    """LoRA matrices of one projection of all experts.

    Attributes:
        down: LoRA's A, (E, parts * r, in).
        up: LoRA's B, (E, out, r).
        parts: rows of `up` in each part of a fused projection, as in `lora_linear`.
        scale: alpha / r.
        dropout: dropout probability of the input of `down`; 0 outside training.
    """

    down: Tensor
    up: Tensor
    parts: tuple[int, ...]
    scale: float
    dropout: float

    def times(self, rows: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the update of the projection of rows.

        Args:
            rows: (..., in), sorted by expert.
            product: function that multiplies rows by the matrices (E, K, N) of their experts.
        """
        low = product(F.dropout(rows, self.dropout) if self.dropout else rows, self.down.transpose(1, 2))
        rank = self.up.shape[2]
        pairs = zip(low.split(rank, dim=-1), self.up.split(list(self.parts), dim=1), strict=True)
        return self.scale * torch.cat([product(part, up.transpose(1, 2)) for part, up in pairs], dim=-1)


def lora_expert_mlp(
    hidden: Tensor,
    experts: Tensor,
    gates: Tensor,
    up: Tensor,
    down: Tensor,
    up_lora: LoRAMatrices | None,
    down_lora: LoRAMatrices | None,
    *,
    nonlinearity: str,
    gated: bool,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    kept: Tensor | None = None,
    capacity: int | None = None,
    dropout: float = 0.0,
    one_by_one: bool = False,
) -> Tensor:
    """`expert_mlp` with LoRA.

    Args:
        hidden: as in `expert_mlp`.
        experts: as in `expert_mlp`.
        gates: as in `expert_mlp`.
        up: as in `expert_mlp`; frozen.
        down: as in `expert_mlp`; frozen.
        up_lora: LoRA matrices of `up`, or None.
        down_lora: LoRA matrices of `down`, or None.
        nonlinearity: as in `expert_mlp`.
        gated: as in `expert_mlp`.
        up_bias: as in `expert_mlp`.
        down_bias: as in `expert_mlp`.
        kept: as in `expert_mlp`.
        capacity: rows computed per expert; None for no padding.
        dropout: as in `expert_mlp`.
        one_by_one: loop over the experts, which reads counts on the host.

    Returns:
        (T, h) in the dtype of `hidden`, differentiable with respect to `hidden`, `gates` and the LoRA matrices.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, up, down = hidden.to(dtype), up.to(dtype), down.to(dtype)
        up_bias, down_bias = (None if bias is None else bias.to(dtype) for bias in (up_bias, down_bias))
        up_lora, down_lora = (
            None if low is None else LoRAMatrices(low.down.to(dtype), low.up.to(dtype), *low[2:])
            for low in (up_lora, down_lora)
        )
    if capacity is not None:
        order, places = padded_assignments(experts, len(up), capacity, kept)
        expert = torch.arange(len(up), device=hidden.device).repeat_interleave(capacity)

        def product(rows: Tensor, matrices: Tensor) -> Tensor:
            return torch.bmm(rows.unflatten(0, (len(matrices), capacity)), matrices).flatten(0, 1)

    else:
        order, ends, places = sorted_assignments(experts, len(up), kept)
        rows = torch.arange(len(order), device=order.device, dtype=ends.dtype)
        expert = torch.searchsorted(ends, rows, right=True).clamp(max=len(ends) - 1)
        backend: Backend = "loop" if one_by_one or not triton_runs_on(hidden) else "auto"

        def product(rows: Tensor, matrices: Tensor) -> Tensor:
            return grouped_matmul(rows.contiguous(), matrices, ends, backend=backend)

    def projected(rows: Tensor, matrices: Tensor, bias: Tensor | None, low: LoRAMatrices | None) -> Tensor:
        result = product(rows, matrices.transpose(1, 2))
        if bias is not None:
            result = result + bias[expert]
        return result if low is None else result + low.times(rows, product)

    dropout_mask = F.dropout(hidden.new_ones(len(order), down.shape[2]), dropout) if dropout else None
    inner = activated(
        projected(gather_rows(hidden, order, places), up, up_bias, up_lora), nonlinearity, gated, dropout_mask
    )
    return combine_rows(projected(inner, down, down_bias, down_lora), gates, places, order)
