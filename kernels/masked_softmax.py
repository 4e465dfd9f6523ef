"""Fused softmax(scale * x + mask) over the last dimension, for rows of any length.

Forward and backward read and write each element once up to 32768 columns; longer rows are read twice, the second time
from cache. A causal mask is never materialized, and beyond its edge at most a few elements are read. Only the
probabilities are saved for the backward pass.

Masks follow Megatron's FusedScaleMaskSoftmax: True masks out a position. Unlike there, a fully masked row gives zeros
and a zero gradient, and every length, alignment and dtype is supported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .custom_op import custom_op
from .launch import triton_runs_on
from .masked_softmax_kernels import triton_backward, triton_forward

# ---------------------------------------------------------------- reference


def reference_scaled_masked_softmax(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False, sinks: Tensor | None = None
) -> Tensor:
    """Reference in plain PyTorch, any device and dtype; arguments as in `scaled_masked_softmax`."""
    if x.numel() == 0:
        return torch.empty_like(x)
    return _wide_probabilities(x, mask, scale, causal, sinks)[..., : x.shape[-1]].to(x.dtype)


def _wide_probabilities(x: Tensor, mask: Tensor | None, scale: float, causal: bool, sinks: Tensor | None) -> Tensor:
    """Return the probabilities in fp32 or fp64, with `sinks` also those of the sinks, as the last column."""
    scores = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    if causal:
        queries, keys = x.shape[-2:]
        later = torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(keys - queries + 1)
        scores = scores.masked_fill(later, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    empty = scores.amax(dim=-1, keepdim=True) == float("-inf")
    # fully masked rows are made finite before the softmax, so that neither they nor their gradients are NaN
    return scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)


def reference_backward(output_gradient: Tensor, probabilities: Tensor, scale: float) -> Tensor:
    """Return the gradient of `x`; it is 0 where the probability is 0, whatever the output gradient holds there."""
    accumulate = torch.promote_types(probabilities.dtype, torch.float32)
    wide = probabilities.to(accumulate)
    visible_gradient = output_gradient.to(accumulate).masked_fill(probabilities == 0, 0.0)
    weighted = wide * visible_gradient
    return ((weighted - wide * weighted.sum(dim=-1, keepdim=True)) * scale).to(probabilities.dtype)


# ---------------------------------------------------------------- custom operations


@custom_op("stoker::scaled_masked_softmax")
def _scaled_masked_softmax(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    if triton_runs_on(x) and x.numel():
        return triton_forward(x.contiguous(), mask, scale, causal)
    return reference_scaled_masked_softmax(x, mask, scale, causal).contiguous()


@torch.library.register_fake("stoker::scaled_masked_softmax")
def _(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@custom_op("stoker::scaled_masked_softmax_backward")
def _scaled_masked_softmax_backward(
    output_gradient: Tensor, probabilities: Tensor, scale: float, causal: bool
) -> Tensor:
    if triton_runs_on(probabilities) and probabilities.numel():
        return triton_backward(output_gradient.contiguous(), probabilities.contiguous(), scale, causal)
    return reference_backward(output_gradient, probabilities, scale).contiguous()


@torch.library.register_fake("stoker::scaled_masked_softmax_backward")
def _(output_gradient: Tensor, probabilities: Tensor, scale: float, causal: bool) -> Tensor:
    return torch.empty_like(probabilities, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    _, _, ctx.scale, ctx.causal = inputs


def _backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor, None, None, None]:
    gradient = _scaled_masked_softmax_backward(output_gradient, ctx.saved_tensors[0], ctx.scale, ctx.causal)
    return gradient, None, None, None


torch.library.register_autograd("stoker::scaled_masked_softmax", _backward, setup_context=_save)


@custom_op("stoker::scaled_masked_softmax_sinks")
def _softmax_with_sinks(
    x: Tensor, mask: Tensor | None, scale: float, causal: bool, sinks: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the probabilities, and those of the sinks, (batch, heads, queries) in fp32 or fp64."""
    weights = x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32))
    if triton_runs_on(x) and x.numel():
        return triton_forward(x.contiguous(), mask, scale, causal, sinks.contiguous(), weights), weights
    wide = _wide_probabilities(x, mask, scale, causal, sinks)
    return wide[..., :-1].to(x.dtype).contiguous(), wide[..., -1].contiguous()


@torch.library.register_fake("stoker::scaled_masked_softmax_sinks")
def _(x: Tensor, mask: Tensor | None, scale: float, causal: bool, sinks: Tensor) -> tuple[Tensor, Tensor]:
    weights = x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.empty_like(x, memory_format=torch.contiguous_format), weights


@custom_op("stoker::scaled_masked_softmax_sinks_backward")
def _softmax_with_sinks_backward(
    output_gradient: Tensor, probabilities: Tensor, sink_weights: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and, in fp32 or fp64, of the sinks."""
    if triton_runs_on(probabilities) and probabilities.numel():
        row_sums = torch.empty_like(sink_weights)
        gradient = triton_backward(output_gradient.contiguous(), probabilities.contiguous(), scale, causal, row_sums)
    else:
        gradient = reference_backward(output_gradient, probabilities, scale).contiguous()
        visible_gradient = output_gradient.to(sink_weights.dtype).masked_fill(probabilities == 0, 0.0)
        row_sums = (probabilities.to(sink_weights.dtype) * visible_gradient).sum(dim=-1)
    return gradient, -(sink_weights * row_sums).sum((0, 2))


@torch.library.register_fake("stoker::scaled_masked_softmax_sinks_backward")
def _(
    output_gradient: Tensor, probabilities: Tensor, sink_weights: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    like = torch.empty_like(probabilities, memory_format=torch.contiguous_format)
    return like, sink_weights.new_empty(sink_weights.shape[1])


def _save_with_sinks(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output)
    ctx.sinks_dtype = inputs[4].dtype
    _, _, ctx.scale, ctx.causal, _ = inputs


def _backward_with_sinks(ctx: Any, output_gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, Tensor]:
    probabilities, sink_weights = ctx.saved_tensors
    gradient, of_sinks = _softmax_with_sinks_backward(
        output_gradient, probabilities, sink_weights, ctx.scale, ctx.causal
    )
    return gradient, None, None, None, of_sinks.to(ctx.sinks_dtype)


torch.library.register_autograd(
    "stoker::scaled_masked_softmax_sinks", _backward_with_sinks, setup_context=_save_with_sinks
)


# ---------------------------------------------------------------- public function


def scaled_masked_softmax(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False, sinks: Tensor | None = None
) -> Tensor:
    """Return softmax(scale * x) over the positions that are not masked out.

    Args:
        x: (..., queries, keys), bf16, fp16, fp32 or fp64; computed in fp32 (fp64 for fp64).
        mask: bool, broadcastable to `x`; True masks out a position, as in Megatron. (The masks of SDPA and the
            `key_padding_mask` of `flash_attention` have the opposite meaning.) None for no mask.
        scale: factor of `x`, any sign.
        causal: query i attends to keys 0 to i + keys - queries only (bottom-right aligned).
        sinks: fp32 (or fp64) (heads,), for `x` (batch, heads, queries, keys): each adds exp(sink) to the denominator
            of its head's rows (Megatron's learnable softmax; zeros are its off-by-one softmax). None for none.

    Returns:
        Probabilities, same shape and dtype as `x`, differentiable once with respect to `x` and `sinks`. Masked
        positions are 0 and get gradient 0, whatever `x` and the output gradient hold there. Rows that are fully masked
        or all -inf are 0, and so are their gradients.

    Raises:
        ValueError: `x` is not floating point or has fewer than two dimensions with `causal`; `mask` is not bool, does
            not broadcast to `x` or is on another device; `sinks` does not fit `x`.
    """
    if not x.is_floating_point() or x.ndim < (2 if causal else 1):
        raise ValueError(
            f"`x` must be floating point, (..., queries, keys), but is {x.dtype} {tuple(x.shape)} (causal={causal})."
        )
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"`mask` must be bool (True masks out), but is {mask.dtype}.")
        if mask.device != x.device:
            raise ValueError(f"`mask` must be on the device of `x` ({x.device}), but is on {mask.device}.")
        sizes = zip(mask.shape[::-1], x.shape[::-1], strict=False)
        if mask.ndim > x.ndim or any(size not in (1, target) for size, target in sizes):
            raise ValueError(f"`mask` {tuple(mask.shape)} must broadcast to `x` {tuple(x.shape)}.")
    if sinks is None:
        return _scaled_masked_softmax(x, mask, float(scale), causal)
    if x.ndim != 4 or sinks.shape != (x.shape[1],) or sinks.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"`sinks` {tuple(sinks.shape)} of {sinks.dtype} must be (heads,), fp32, for `x` (batch, heads, queries, "
            f"keys), but `x` is {tuple(x.shape)}."
        )
    return _softmax_with_sinks(x, mask, float(scale), causal, sinks)[0]
