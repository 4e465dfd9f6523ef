"""Embedding whose gradient is summed from the rows of equal tokens, in order, at memory bandwidth.

The gradient of a row of the table is the sum of the gradients of all places of its token. torch sorts the tokens and
sums in kernels that reach a tenth of the memory bandwidth. Here, too, the tokens are sorted, so that the sums have one
order; a program takes a span of sorted places, and sums of tokens that reach over spans are added in a second launch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .custom_op import custom_op
from .launch import jit, rounded, tl, triton, triton_runs_on

SPAN = 32
"""Sorted places of a program."""
BLOCK = 1024
"""Columns of a program: 8 per thread."""
SPANS = 8
"""Spans that are added at once where a token reaches over many."""

# ---------------------------------------------------------------- Triton


@jit
def sum_spans_kernel(
    sorted_pointer, order_pointer, gradient_pointer, table_pointer, partial_pointer, places, width,
    SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of the tokens of SPAN sorted places per program, of BLOCK columns.

    Read: sorted (places,), tokens in ascending order, order (places,), their rows of gradient, and gradient (places,
    width). Written: the rows of table (tokens, width) whose places are all in the span, and partial (spans, 2, width),
    fp32: the sum of a token that has places before the span, and that of one that has none before but some behind it.
    """
    span = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    begin = span * SPAN
    last = min(begin + SPAN, places)
    partial = partial_pointer + span.to(tl.int64) * 2 * width + columns
    token = tl.load(sorted_pointer + begin)
    continues = tl.load(sorted_pointer + begin - 1, mask=begin > 0, other=-1) == token
    row = tl.load(order_pointer + begin).to(tl.int64)
    gradient = tl.load(gradient_pointer + row * width + columns, mask=inside, other=0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    for place in range(begin, last):
        next_token = tl.load(sorted_pointer + place + 1, mask=place + 1 < places, other=-1)
        # the last time a row that is not used
        row = tl.load(order_pointer + place + 1, mask=place + 1 < places, other=0).to(tl.int64)
        next_gradient = tl.load(gradient_pointer + row * width + columns, mask=inside, other=0.0)
        total += gradient.to(tl.float32)
        ends = next_token != token
        if ends:
            if continues:
                tl.store(partial, total, mask=inside)
            else:
                target = table_pointer + token.to(tl.int64) * width + columns
                tl.store(target, rounded(total, table_pointer.dtype.element_ty), mask=inside)
            total = tl.zeros((BLOCK,), tl.float32)
        continues = continues & (next_token == token)
        token, gradient = next_token, next_gradient
    if tl.load(sorted_pointer + last, mask=last < places, other=-1) == tl.load(sorted_pointer + last - 1):
        # if it is the token of all places of the span and of one before, the sum has its place there
        tl.store(partial + tl.where(continues, 0, width), total, mask=inside)


@jit
def add_spans_kernel(
    sorted_pointer, partial_pointer, table_pointer, places, width,
    SPAN: tl.constexpr, SPANS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the row of table of the token that begins in the program's span and goes on, if there is one."""
    span = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    begin = span * SPAN
    last = min(begin + SPAN, places)
    token = tl.load(sorted_pointer + last - 1)
    goes_on = tl.load(sorted_pointer + last, mask=last < places, other=-1) == token
    begins = tl.load(sorted_pointer + begin - 1, mask=begin > 0, other=-1) != token
    if goes_on & begins:
        total = tl.load(partial_pointer + (span.to(tl.int64) * 2 + 1) * width + columns, mask=inside, other=0.0)
        span += 1
        while tl.load(sorted_pointer + span * SPAN, mask=span * SPAN < places, other=-1) == token:
            next_spans = span + tl.arange(0, SPANS)
            first = tl.load(sorted_pointer + next_spans * SPAN, mask=next_spans * SPAN < places, other=-1)
            rows = partial_pointer + next_spans.to(tl.int64)[:, None] * 2 * width + columns[None, :]
            total += tl.sum(tl.load(rows, mask=(first == token)[:, None] & inside[None, :], other=0.0), axis=0)
            span += SPANS
        target = table_pointer + token.to(tl.int64) * width + columns
        tl.store(target, rounded(total, table_pointer.dtype.element_ty), mask=inside)


def _launch(ordered: Tensor, order: Tensor, gradient: Tensor, table: Tensor) -> None:
    places, width = gradient.shape
    spans = triton.cdiv(places, SPAN)
    partial = gradient.new_empty(spans, 2, width, dtype=torch.float32)
    grid = (spans, triton.cdiv(width, BLOCK))
    sum_spans_kernel[grid](ordered, order, gradient, table, partial, places, width, SPAN=SPAN, BLOCK=BLOCK, num_warps=4)
    add_spans_kernel[grid](ordered, partial, table, places, width, SPAN=SPAN, SPANS=SPANS, BLOCK=BLOCK, num_warps=8)


# ---------------------------------------------------------------- custom operation and autograd


@custom_op("stoker::embedding_gradient")
def _embedding_gradient(gradient: Tensor, tokens: Tensor, rows: int) -> Tensor:
    """Return the gradient of a table of `rows` rows from that of its output (..., h)."""
    table = gradient.new_zeros(rows, gradient.shape[-1])
    if tokens.numel():
        # 32 bits are sorted in half the time of 64
        ordered, order = torch.sort(tokens.flatten().to(torch.int32), stable=True)
        _launch(ordered, order, gradient.flatten(0, -2).contiguous(), table)
    return table


@torch.library.register_fake("stoker::embedding_gradient")
def _(gradient: Tensor, tokens: Tensor, rows: int) -> Tensor:
    return gradient.new_empty(rows, gradient.shape[-1])


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = len(weight)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, _embedding_gradient(gradients[0], ctx.saved_tensors[0], ctx.rows)


# ---------------------------------------------------------------- public function


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return the rows of `weight` (rows, h) of int64 tokens (...): (..., h), as `F.embedding`.

    Where Triton runs, the gradient of `weight` is summed in fp32, in the order of the tokens, and rounded once.
    """
    if triton_runs_on(weight) and torch.is_grad_enabled() and weight.requires_grad:
        return _Embedding.apply(tokens, weight)
    return F.embedding(tokens, weight)
