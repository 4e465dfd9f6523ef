"""Sinkhorn's iteration: scale the rows and columns of a positive matrix until all have the same sum.

As Megatron does it (S-BASE, arXiv 2202.01169), but it cannot overflow, ends always, and does not wait for a device.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SINKHORN_TOLERANCE = 1e-4  # mean change of the column factors that ends the iteration
SINKHORN_FLOOR = 1e-8  # added to the sums it divides by
SINKHORN_ITERATIONS = 100


def sinkhorn_column_factors(logits: Tensor, real: Tensor | None = None) -> Tensor:
    """The factors (E,) of the columns of exp(logits), finite and above 0 whatever the logits.

    From factors of 1, rows and columns are scaled in turn, until the column factors change by 1e-4 or less in the mean,
    100 times at most. A row's maximum is subtracted first: the factor of the row takes it up, and exp cannot overflow.
    The factors of the rows, which order nothing within a row, are not returned.

    Args:
        logits: fp32 or fp64 (T, E).
        real: bool (T,), False for rows that take no part; None where all do.
    """
    matrix = (logits - logits.amax(dim=1, keepdim=True)).exp()
    tokens = matrix.new_full((), len(matrix))
    if real is not None:
        matrix = matrix.masked_fill(~real[:, None], 0.0)
        tokens = real.sum().clamp(min=1).to(matrix.dtype)
    experts = matrix.shape[1]
    share, row_floor, column_floor = tokens / experts, matrix.new_full((), SINKHORN_FLOOR), SINKHORN_FLOOR * tokens
    # the factors after each iteration. What does not end early picks the ones that a loop would have ended with
    columns = matrix.new_ones(SINKHORN_ITERATIONS + 1, experts)
    for done in range(1, SINKHORN_ITERATIONS + 1):
        rows = torch.addmv(row_floor, matrix, columns[done - 1]).reciprocal()  # times T, which `share` takes up
        torch.div(share, torch.addmv(column_floor, matrix.T, rows), out=columns[done])
        if _is_known_to_end(columns[done - 1 : done + 1]):
            columns = columns[: done + 1]
            break
    changes = F.pad(_changes(columns), (0, 1), value=math.inf)  # as if something ended it after the last
    ending = _ends(changes).int().argmax().view(1)
    # numbers that are not finite, of logits that are not, end it with the last factors that were
    return columns.index_select(0, ending + changes.index_select(0, ending).isfinite())[0]


def _changes(columns: Tensor) -> Tensor:
    return (columns[1:] - columns[:-1]).abs().mean(dim=1)


def _ends(changes: Tensor) -> Tensor:
    return ~(changes > SINKHORN_TOLERANCE) | changes.isinf()


def _is_known_to_end(columns: Tensor) -> bool:
    """Whether the last change ends the iteration, as far as one sees it without waiting for a device."""
    return columns.device.type == "cpu" and bool(_ends(_changes(columns)).all())


@torch.library.custom_op("stoker::sinkhorn_column_factors", mutates_args=())
def column_factors(logits: Tensor, real: Tensor | None) -> Tensor:
    """`sinkhorn_column_factors` as one operation: the compiler would unroll the iteration."""
    with torch.autocast(logits.device.type, enabled=False):
        return sinkhorn_column_factors(logits, real)


@column_factors.register_fake
def _(logits: Tensor, real: Tensor | None) -> Tensor:
    return logits.new_empty(logits.shape[1])
