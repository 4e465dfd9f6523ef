"""The experts with low-rank updates of their matrices: grouped matmuls that autograd sees, frozen and low-rank ones.

The matrices of the experts get no gradient and no copy: the products with the pairs of an update are grouped matmuls
of their own, of the same rows.
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


class LowRank(NamedTuple):
    """The update of one projection of all experts.

    Attributes:
        down: (E, parts * r, in), LoRA's A.
        up: (E, out, r), LoRA's B.
        parts: rows of `up` that belong to each r rows of `down`.
        scale: alpha / r.
        dropout: of what `down` reads; 0 outside training.
    """

    down: Tensor
    up: Tensor
    parts: tuple[int, ...]
    scale: float
    dropout: float

    def times(self, rows: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """What is added to the projection of rows.

        Args:
            rows: (..., in), sorted by expert.
            product: rows times matrices (E, K, N), row by row of the expert's.
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
    up_lora: LowRank | None,
    down_lora: LowRank | None,
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
    """`expert_mlp` with low-rank updates; arguments as there, and:

    Args:
        hidden: and the others: as in `expert_mlp`; `up` and `down` are frozen.
        experts: see above.
        gates: see above.
        up: see above.
        down: see above.
        up_lora: the update of `up`; None for none.
        down_lora: the update of `down`; None for none.
        nonlinearity: see above.
        gated: see above.
        up_bias: see above.
        down_bias: see above.
        kept: see above.
        capacity: rows that every expert computes; None for as many as it has.
        dropout: see above.
        one_by_one: products expert after expert, which reads counts on the host.

    Returns:
        (T, h) in the dtype of `hidden`, differentiable in `hidden`, `gates` and the updates.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, up, down = hidden.to(dtype), up.to(dtype), down.to(dtype)
        up_bias, down_bias = (None if bias is None else bias.to(dtype) for bias in (up_bias, down_bias))
        up_lora, down_lora = (
            None if low is None else low._replace(down=low.down.to(dtype), up=low.up.to(dtype))
            for low in (up_lora, down_lora)
        )
    if capacity is not None:
        order, places = padded_assignments(experts, len(up), capacity, kept)
        expert = torch.arange(len(up), device=hidden.device).repeat_interleave(capacity)

        def product(rows: Tensor, matrices: Tensor) -> Tensor:
            return torch.bmm(rows.unflatten(0, (len(matrices), capacity)), matrices).flatten(0, 1)

    else:
        order, ends, places = sorted_assignments(experts, len(up), kept)
        numbers = torch.arange(len(order), device=order.device, dtype=ends.dtype)
        expert = torch.searchsorted(ends, numbers, right=True).clamp(max=len(ends) - 1)
        backend: Backend = "loop" if one_by_one or not triton_runs_on(hidden) else "auto"

        def product(rows: Tensor, matrices: Tensor) -> Tensor:
            return grouped_matmul(rows.contiguous(), matrices, ends, backend=backend)

    def projected(rows: Tensor, matrices: Tensor, bias: Tensor | None, low: LowRank | None) -> Tensor:
        result = product(rows, matrices.transpose(1, 2))
        if bias is not None:
            result = result + bias[expert]
        return result if low is None else result + low.times(rows, product)

    noise = F.dropout(hidden.new_ones(len(order), down.shape[2]), dropout) if dropout else None
    inner = activated(projected(gather_rows(hidden, order, places), up, up_bias, up_lora), nonlinearity, gated, noise)
    return combine_rows(projected(inner, down, down_bias, down_lora), gates, places, order)
