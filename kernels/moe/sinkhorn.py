"""Sinkhorn iteration: scale rows and columns of a positive matrix until all rows and all columns have the same sum.

As in Megatron (S-BASE, arXiv 2202.01169), but without overflow, with a bounded number of iterations, and without host
syncs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..custom_op import custom_op

SINKHORN_TOLERANCE = 1e-4  # mean change of the column factors at convergence
SINKHORN_FLOOR = 1e-8  # added to divisors
SINKHORN_ITERATIONS = 100


def sinkhorn_column_factors(logits: Tensor, token_mask: Tensor | None = None) -> Tensor:
    """Return the factors (E,) of the columns of exp(logits), finite and above 0 for any logits.

    Starting from factors of 1, rows and columns are scaled in turn, until the column factors change by 1e-4 or less on
    average, at most 100 times. Each row's maximum is subtracted first, which its row factor absorbs, so that exp cannot
    overflow. Row factors do not change the order within a row and are not returned.

    Args:
        logits: (T, E), fp32 or fp64.
        token_mask: (T,) bool, False for padding rows, which are excluded; None without padding.
    """
    if not len(logits):  # amax of no rows raises, and addmv does not broadcast
        return logits.new_ones(logits.shape[1])
    matrix = (logits - logits.amax(dim=1, keepdim=True)).exp()
    tokens = matrix.new_full((), len(matrix))
    if token_mask is not None:
        matrix = matrix.masked_fill(~token_mask[:, None], 0.0)
        tokens = token_mask.sum().clamp(min=1).to(matrix.dtype)
    experts = matrix.shape[1]
    share, row_floor, column_floor = tokens / experts, matrix.new_full((), SINKHORN_FLOOR), SINKHORN_FLOOR * tokens
    # factors after each iteration: without early exit, those of the first converged iteration are selected below
    columns = matrix.new_ones(SINKHORN_ITERATIONS + 1, experts)
    for done in range(1, SINKHORN_ITERATIONS + 1):
        rows = torch.addmv(row_floor, matrix, columns[done - 1]).reciprocal()  # times T, which `share` absorbs
        torch.div(share, torch.addmv(column_floor, matrix.T, rows), out=columns[done])
        if _has_converged_on_cpu(columns[done - 1 : done + 1]):
            columns = columns[: done + 1]
            break
    changes = F.pad(_changes(columns), (0, 1), value=math.inf)  # sentinel: the iteration stops after the last
    ending = _ends(changes).int().argmax().view(1)
    # non-finite logits make changes non-finite, which ends the iteration with the last finite factors
    return columns.index_select(0, ending + changes.index_select(0, ending).isfinite())[0]


def _changes(columns: Tensor) -> Tensor:
    """Return the mean absolute change of the column factors in each iteration."""
    return (columns[1:] - columns[:-1]).abs().mean(dim=1)


def _ends(changes: Tensor) -> Tensor:
    """Return True for changes that end the iteration: below the tolerance, NaN or infinite."""
    return ~(changes > SINKHORN_TOLERANCE) | changes.isinf()


def _has_converged_on_cpu(columns: Tensor) -> bool:
    """Return True if the last change ends the iteration; only checked on CPU, as it would be a host sync elsewhere."""
    return columns.device.type == "cpu" and bool(_ends(_changes(columns)).all())


@custom_op("stoker::sinkhorn_column_factors")
def column_factors(logits: Tensor, token_mask: Tensor | None) -> Tensor:
    """`sinkhorn_column_factors` as a custom op, since torch.compile would unroll the iteration."""
    with torch.autocast(logits.device.type, enabled=False):
        return sinkhorn_column_factors(logits, token_mask)


@torch.library.register_fake("stoker::sinkhorn_column_factors")
def _(logits: Tensor, real: Tensor | None) -> Tensor:
    return logits.new_empty(logits.shape[1])
