"""Expert MLPs with LoRA: differentiable grouped matmuls with the frozen and the low-rank matrices.

The frozen matrices get no gradient and are not copied or merged: the low-rank products are separate grouped matmuls of
the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..autocast import autocast
from ..dropout import dropout as apply_dropout
from ..launch import triton_runs_on
from .assignments import Assignments, draw_assignment_rows, padded_assignments, sorted_assignments
from .grouped_matmul import Backend, grouped_matmul
from .permute import combine_rows, gather_rows
from .reference_experts import apply_activation


class LoRAMatrices(NamedTuple):
    """LoRA matrices of one projection of all experts.

    Attributes:
        lora_a: LoRA's A, (E, parts * r, in).
        lora_b: LoRA's B, (E, out, r).
        parts: rows of `lora_b` in each part of a fused projection, as in `lora_linear`.
        scale: alpha / r.
        dropout: dropout probability of the input of `lora_a`; 0 outside training.
    """

    lora_a: Tensor
    lora_b: Tensor
    parts: tuple[int, ...]
    scale: float
    dropout: float

    def compute_update(
        self, rows: Tensor, product: Callable[[Tensor, Tensor], Tensor], places: Tensor | None, number: int
    ) -> Tensor:
        """Return the update of the projection of rows.

        Args:
            rows: (..., in), sorted by expert.
            product: function that multiplies rows by the matrices (E, K, N) of their experts.
            places: what the dropout masks of the rows are functions of, int64; None without dropout.
            number: of this dropout among those of the same rows.
        """
        dropped = rows
        if self.dropout and places is not None:
            dropped = apply_dropout(rows, self.dropout, places.new_full((2,), number), places)
        low = product(dropped, self.lora_a.transpose(1, 2))
        rank = self.lora_b.shape[2]
        pairs = zip(low.split(rank, dim=-1), self.lora_b.split(list(self.parts), dim=1), strict=True)
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
    dropout_rows: Tensor | None = None,
    assignments: Assignments | None = None,
    sequential: bool = False,
) -> Tensor:
    """`expert_mlp` with LoRA.

    Args:
        up: frozen; this and all arguments not listed here are as in `expert_mlp`.
        down: frozen.
        up_lora: LoRA matrices of `up`, or None.
        down_lora: LoRA matrices of `down`, or None.
        capacity: rows computed per expert; None for no padding.
        sequential: loop over the experts, which reads counts on the host.

    Returns:
        (T, h) in the dtype of `hidden`, differentiable with respect to `hidden`, `gates` and the LoRA matrices.
    """
    hidden, up, down, up_bias, down_bias = autocast(hidden, up, down, up_bias, down_bias)
    up_lora, down_lora = (
        None if low is None else LoRAMatrices(*autocast(low.lora_a, low.lora_b), *low[2:])
        for low in (up_lora, down_lora)
    )
    if capacity is not None:
        order, places = padded_assignments(experts, len(up), capacity, kept)

        def product(rows: Tensor, matrices: Tensor, bias: Tensor | None = None) -> Tensor:
            rows = rows.unflatten(0, (len(matrices), capacity))
            result = torch.bmm(rows, matrices) if bias is None else torch.baddbmm(bias[:, None], rows, matrices)
            return result.flatten(0, 1)

    else:
        order, ends, places = assignments or sorted_assignments(experts, len(up), kept)
        backend: Backend = "loop" if sequential or not triton_runs_on(hidden) else "auto"

        def product(rows: Tensor, matrices: Tensor, bias: Tensor | None = None) -> Tensor:
            return grouped_matmul(rows.contiguous(), matrices, ends, backend=backend, bias=bias)

    def projected(rows: Tensor, matrices: Tensor, bias: Tensor | None, low: LoRAMatrices | None, number: int) -> Tensor:
        result = product(rows, matrices.transpose(1, 2), bias)
        return result if low is None else result + low.compute_update(rows, product, row_places, number)

    row_places = dropout_mask = None
    if dropout or any(low is not None and low.dropout for low in (up_lora, down_lora)):
        places_of = draw_assignment_rows(experts) if dropout_rows is None else dropout_rows
        row_places = places_of.flatten()[order.clamp(min=0)]
    if dropout and row_places is not None:
        ones = hidden.new_ones(len(order), down.shape[2])
        dropout_mask = apply_dropout(ones, dropout, row_places.new_zeros(2), row_places)
    inner = apply_activation(
        projected(gather_rows(hidden, order, places), up, up_bias, up_lora, 1), nonlinearity, gated, dropout_mask
    )
    return combine_rows(projected(inner, down, down_bias, down_lora, 2), gates, places, order)
