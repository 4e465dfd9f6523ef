"""RMS normalisation of a stream that goes on beside it, as in a pre-norm layer; all its gradients meet in one kernel.

The stream x of such a layer is read by a norm and by the sum with what the part behind the norm gives, and the normed
may have two readers, such as a router and the experts. A compiler adds these gradients, takes the norm's gradient, and
sums that of its weight over the rows, in kernels that keep no GPU's memory busy. Here each tensor is read once; of the
forward pass nothing is kept but x. A projection of the norm keeps the normed for the gradient of its weight; where that
shall not be kept either, the same kernel writes it again from what it has read in any case.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .interpreter_rounding import rounded
from .launch import jit, next_power_of_2, tl, triton_runs_on
from .norm_functions import rms_norm

WIDEST = 4096
"""A wider row does not fit in the registers of a program."""
PROGRAMS = 528
"""Four for each multiprocessor of a large GPU; each leaves a partial sum of the weight's gradient."""


# ---------------------------------------------------------------- Triton


@jit
def _tile(
    inputs_pointer, stream_gradient_pointer, first_gradient_pointer, second_gradient_pointer, start, last, width,
    SECOND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of each tensor, not yet converted, for that would wait for them."""
    row = (start + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    place = row.to(tl.int64) * width + column
    mask = (row < last) & (column < width)
    inputs = tl.load(inputs_pointer + place, mask=mask, other=0.0)
    stream = tl.load(stream_gradient_pointer + place, mask=mask, other=0.0)
    first = tl.load(first_gradient_pointer + place, mask=mask, other=0.0)
    second = first
    if SECOND:
        second = tl.load(second_gradient_pointer + place, mask=mask, other=0.0)
    return inputs, stream, first, second


@jit
def forked_norm_backward_kernel(
    inputs_pointer, weight_pointer, stream_gradient_pointer, first_gradient_pointer, second_gradient_pointer,
    gradient_pointer, normed_pointer, partial_pointer, rows, width, piece, epsilon,
    SECOND: tl.constexpr, AGAIN: tl.constexpr, ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a piece of the rows, ROWS of them at a time; the next are on their way meanwhile.

    inputs, the gradients, gradient and normed, which are written, the latter with AGAIN: (rows, width); weight
    (width,). partial (programs, width), fp32: the sum over the piece of the gradient of the normed times the quotient
    of inputs and root.
    """
    number = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    gain = tl.load(weight_pointer + column, mask=column < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        gain += 1.0
    of_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    begin = number * piece
    last = min(begin + piece, rows)
    inputs, stream, first, second = _tile(
        inputs_pointer, stream_gradient_pointer, first_gradient_pointer, second_gradient_pointer, begin, last, width,
        SECOND, ROWS, BLOCK,
    )  # fmt: skip
    for start in range(begin, last, ROWS):
        next_inputs, next_stream, next_first, next_second = _tile(
            inputs_pointer, stream_gradient_pointer, first_gradient_pointer, second_gradient_pointer, start + ROWS,
            last, width, SECOND, ROWS, BLOCK,
        )  # fmt: skip
        x = inputs.to(tl.float32)
        outer = first.to(tl.float32)
        if SECOND:
            outer += second.to(tl.float32)
        weighted = outer * gain
        root = tl.rsqrt(tl.sum(x * x, axis=1) / width + epsilon)
        mean = tl.sum(weighted * x, axis=1) * root / width
        quotient = x * root[:, None]
        of_weight += outer * quotient
        gradient = stream.to(tl.float32) + root[:, None] * (weighted - quotient * mean[:, None])
        row = (start + tl.arange(0, ROWS))[:, None]
        place = row.to(tl.int64) * width + column
        element = gradient_pointer.dtype.element_ty
        mask = (row < last) & (column < width)
        tl.store(gradient_pointer + place, rounded(gradient, element), mask=mask)
        if AGAIN:
            tl.store(normed_pointer + place, rounded(quotient * gain, element), mask=mask)
        inputs, stream, first, second = next_inputs, next_stream, next_first, next_second
    column = tl.arange(0, BLOCK)
    partial = partial_pointer + number.to(tl.int64) * width + column
    tl.store(partial, tl.sum(of_weight, axis=0), mask=column < width)


def tile_options(width: int) -> dict[str, int]:
    """Of a launch: a whole row, or several short ones, with 8 numbers for each thread."""
    block = next_power_of_2(width)
    return {"ROWS": max(1, 1024 // block), "BLOCK": block, "num_warps": max(4, block // 256), "enable_fp_fusion": True}


def _pieces(rows: int, width: int) -> tuple[int, int]:
    """Into how many pieces the rows are cut, and the rows of a piece: whole tiles."""
    tile = tile_options(width)["ROWS"]
    size = -(-rows // (PROGRAMS * tile)) * tile
    return -(-rows // size), size


def triton_backward(
    stream_gradient: Tensor,
    first_gradient: Tensor,
    second_gradient: Tensor | None,
    inputs: Tensor,
    weight: Tensor,
    epsilon: float,
    zero_centered: bool,
    *,
    again: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launch the kernel.

    Returns:
        The gradient of `inputs`; fp32 (pieces, width), whose sum is that of `weight`; `again`, the norm of `inputs`.
    """
    inputs, stream_gradient, first_gradient = (x.contiguous() for x in (inputs, stream_gradient, first_gradient))
    second_gradient = None if second_gradient is None else second_gradient.contiguous()
    width = inputs.shape[-1]
    rows = inputs.numel() // width
    pieces, size = _pieces(rows, width)
    gradient = torch.empty_like(inputs)
    normed = torch.empty_like(inputs) if again else None
    partial = inputs.new_empty(pieces, width, dtype=torch.float32)
    forked_norm_backward_kernel[(pieces,)](
        inputs, weight, stream_gradient, first_gradient, second_gradient, gradient, normed, partial, rows, width, size,
        epsilon, SECOND=second_gradient is not None, AGAIN=again, ZERO_CENTERED=zero_centered, **tile_options(width),
    )  # fmt: skip
    return gradient, partial, normed


# ---------------------------------------------------------------- custom operations and Functions


@torch.library.custom_op("stoker::forked_norm_backward", mutates_args=())
def _forked_norm_backward(
    stream_gradient: Tensor,
    first_gradient: Tensor,
    second_gradient: Tensor | None,
    inputs: Tensor,
    weight: Tensor,
    epsilon: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    given = stream_gradient, first_gradient, second_gradient, inputs, weight
    gradient, partial, _ = triton_backward(*given, epsilon, zero_centered)
    return gradient, partial


@_forked_norm_backward.register_fake
def _(
    stream_gradient: Tensor,
    first_gradient: Tensor,
    second_gradient: Tensor | None,
    inputs: Tensor,
    weight: Tensor,
    epsilon: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    return _like(inputs), _partial_like(inputs)


@torch.library.custom_op("stoker::forked_norm_backward_with_normed", mutates_args=())
def _backward_with_normed(
    stream_gradient: Tensor,
    normed_gradient: Tensor,
    inputs: Tensor,
    weight: Tensor,
    epsilon: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    given = stream_gradient, normed_gradient, None, inputs, weight
    gradient, partial, normed = triton_backward(*given, epsilon, zero_centered, again=True)
    assert normed is not None
    return gradient, partial, normed


@_backward_with_normed.register_fake
def _(
    stream_gradient: Tensor,
    normed_gradient: Tensor,
    inputs: Tensor,
    weight: Tensor,
    epsilon: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(inputs), _partial_like(inputs), _like(inputs)


def _like(inputs: Tensor) -> Tensor:
    return torch.empty_like(inputs, memory_format=torch.contiguous_format)


def _partial_like(inputs: Tensor) -> Tensor:
    width = inputs.shape[-1]
    pieces, _ = _pieces(inputs.numel() // width, width)
    return inputs.new_empty(pieces, width, dtype=torch.float32)


class _ForkedNorm(torch.autograd.Function):
    """What is computed comes in as `normed`: it gives nothing but views of what it is given.

    Compiled by torch 2.11, an output that a cast to its own dtype made in here would lose its gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, weight: Tensor, normed: Tensor, epsilon: float, zero_centered: bool, twice: bool
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(stream, weight)
        ctx.epsilon, ctx.zero_centered = epsilon, zero_centered
        return stream.view_as(stream), normed.view_as(normed), *((normed.view_as(normed),) if twice else ())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        stream, weight = ctx.saved_tensors
        on, first, *second = gradients
        gradient, partial = _forked_norm_backward(
            on, first, second[0] if second else None, stream, weight, ctx.epsilon, ctx.zero_centered
        )
        return gradient, partial.sum(dim=0).to(weight.dtype), None, None, None, None


class _ForkedNormProjection(torch.autograd.Function):
    """The norm comes in as `normed`, as above, and is not kept."""

    @staticmethod
    def forward(
        ctx: Any,
        stream: Tensor,
        gain: Tensor,
        normed: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        zero_centered: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(stream, gain, weight)
        ctx.epsilon, ctx.zero_centered = epsilon, zero_centered
        return stream.view_as(stream), F.linear(normed, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        stream, gain, weight = ctx.saved_tensors
        on, outer = gradients
        gradient, partial, normed = _backward_with_normed(
            on, outer @ weight, stream, gain, ctx.epsilon, ctx.zero_centered
        )
        rows = outer.flatten(0, -2)
        of_weight = rows.t() @ normed.flatten(0, -2) if ctx.needs_input_grad[3] else None
        of_bias = rows.sum(0) if ctx.needs_input_grad[4] else None
        return gradient, partial.sum(dim=0).to(gain.dtype), None, of_weight, of_bias, None, None


# ---------------------------------------------------------------- public functions


def forks(stream: Tensor, weight: Tensor) -> bool:
    """Whether `forked_rms_norm` serves: in a compiled layer, for a norm that learns, where Triton runs.

    What autograd keeps of a layer as written is what the memory plan counts, and the backward of a norm that does not
    learn is as fast as memory from the compiler.
    """
    learns = torch.is_grad_enabled() and weight.requires_grad
    return learns and torch.compiler.is_compiling() and stream.shape[-1] <= WIDEST and triton_runs_on(stream)


def forked_rms_norm(
    stream: Tensor, weight: Tensor, *, epsilon: float, zero_centered: bool, twice: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The stream, and its `norms.rms_norm` for one reader, or `twice` for two, whose gradients then come apart.

    Args:
        stream: (..., h).
        weight: (h,).
        epsilon: as in `rms_norm`.
        zero_centered: likewise.
        twice: see above.

    Returns:
        Stream, norm, and the norm `twice` or None, differentiable once; all must be used, for a gradient of zeros would
        be read too.
    """
    with torch.no_grad():  # plain torch, which a compiler fuses with what is before it
        normed = rms_norm(stream, weight, epsilon=epsilon, zero_centered=zero_centered)
    on, normed, *again = _ForkedNorm.apply(stream, weight, normed, epsilon, zero_centered, twice)  # type: ignore[misc]
    return on, normed, again[0] if again else None


def forked_norm_projection(
    stream: Tensor, gain: Tensor, weight: Tensor, bias: Tensor | None, *, epsilon: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """The stream, and `F.linear(rms_norm(stream), weight, bias)`, of which the stream is kept and not the norm.

    Args:
        stream: (..., h).
        gain: (h,), of the norm.
        weight: (n, h), in the dtype of the stream.
        bias: (n,), or None.
        epsilon: as in `rms_norm`.
        zero_centered: likewise.

    Returns:
        Stream, and (..., n), differentiable once; both must be used.
    """
    with torch.no_grad():
        normed = rms_norm(stream, gain, epsilon=epsilon, zero_centered=zero_centered)
    on, projected = _ForkedNormProjection.apply(stream, gain, normed, weight, bias, epsilon, zero_centered)  # type: ignore[misc]
    return on, projected
