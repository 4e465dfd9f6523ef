"""Unfused attention with selective recompute: the backward pass recomputes scores and weights from the log-sum-exp.

Saved for the backward are queries, keys, values, output and log-sum-exp, not the (batch, heads, queries, keys)
intermediates. With the log-sum-exp, a weight depends on its own score only, so one kernel per pass computes everything
between the matrix products: the forward kernel computes scores and weights, the backward kernel scores, weights and
score gradients. Recomputing the three steps separately would write and read the scores and the weights once more.
Log-sum-exp: arXiv 2205.14135; selective recompute of attention: arXiv 2205.05198.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..autocast import autocast
from ..custom_op import custom_op
from ..launch import triton_runs_on
from .argument_checks import MAX_HEAD_DIM, MIN_HEAD_DIM, check_arguments, check_same_width
from .backends.unfused import UnfusedAttention, stack_heads_by_group
from .call_spec import AttentionCall
from .inputs import AttentionInputs
from .lse_first.ops import chunked_lse
from .lse_first.triton_stages import delta_of
from .recompute_scores_kernels import launch_score_gradient, launch_weights

Shape = Sequence[int]
_UNFUSED = UnfusedAttention()

# ---------------------------------------------------------------- custom operations


@custom_op("stoker::attention_weights")
def _attention_weights(q: Tensor, k: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention weights, (batch, heads, queries, keys) in the dtype of `q`, and the log-sum-exp."""
    lse = chunked_lse(q, [k], causal, scale, 0, 0, k.shape[1])
    if not (q.numel() and k.numel()):
        return q.new_empty((*lse.shape, k.shape[1])), lse
    return launch_weights(q, k, lse, causal, scale), lse


@torch.library.register_fake("stoker::attention_weights")
def _(q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _ = q.shape
    lse = q.new_empty((batch, heads, queries), dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((batch, heads, queries, k.shape[1])), lse


@custom_op("stoker::attention_score_gradient")
def _attention_score_gradient(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the same weights, and the gradient of q k^T, including the factor `scale`."""
    if not (q.numel() and k.numel()):
        empty = q.new_empty((*lse.shape, k.shape[1]))
        return empty, torch.empty_like(empty)
    delta = delta_of(out, out_gradient, lse, None)
    return launch_score_gradient(out_gradient, q, k, v, lse, delta, causal, scale)


@torch.library.register_fake("stoker::attention_score_gradient")
def _(out_gradient: Tensor, q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    return q.new_empty(shape), q.new_empty(shape)


def _two_products_flops(q: Shape, k: Shape) -> int:
    """Return the FLOPs of two products of queries and keys; causal masks are ignored, as in PyTorch's formulas."""
    batch, queries, heads, head_dim = q
    return 4 * batch * heads * queries * k[1] * head_dim


@register_flop_formula(torch.ops.stoker.attention_weights)
def _(q: Shape, k: Shape, *_: Any, **__: Any) -> int:
    return _two_products_flops(q, k)


@register_flop_formula(torch.ops.stoker.attention_score_gradient)
def _(out_gradient: Shape, q: Shape, k: Shape, *_: Any, **__: Any) -> int:
    return _two_products_flops(q, k)


# ---------------------------------------------------------------- autograd


class _RecomputeScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
        weights, lse = _attention_weights(query, key, causal, scale)
        # contiguous as the following projection needs and saves it, so that both save the same tensor
        context = _UNFUSED.weighted_sum(weights, value).contiguous()
        ctx.save_for_backward(query, key, value, context, lse)
        ctx.causal, ctx.scale = causal, scale
        return context

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (gradient,) = gradients
        query, key, value, context, lse = ctx.saved_tensors
        batch, queries, heads, head_dim = query.shape
        keys, groups = key.shape[1:3]
        by_group = (batch * groups, heads // groups * queries, keys)
        weights, score_gradient = _attention_score_gradient(
            gradient, query, key, value, context, lse, ctx.causal, ctx.scale
        )
        value_gradient = torch.bmm(weights.view(by_group).transpose(1, 2), stack_heads_by_group(gradient, groups))
        del weights  # as large as the scores: free it before the other products
        score_gradient = score_gradient.view(by_group)
        query_gradient = torch.bmm(score_gradient, stack_heads_by_group(key, groups))
        key_gradient = torch.bmm(score_gradient.transpose(1, 2), stack_heads_by_group(query, groups))
        return (
            query_gradient.view(batch, heads, queries, head_dim).transpose(1, 2),
            key_gradient.view(batch, groups, keys, head_dim).transpose(1, 2),
            value_gradient.view(batch, groups, keys, head_dim).transpose(1, 2),
            None,
            None,
        )


# ---------------------------------------------------------------- supported calls


def _supports_head_dim(head_dim: int) -> bool:
    return MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0


def supports(inputs: AttentionInputs) -> bool:
    """Return True if `attention_recompute_scores` supports a call."""
    if inputs.v.shape[-1] != inputs.q.shape[-1]:
        return False
    return not inputs.given_options() and triton_runs_on(inputs.q) and _supports_head_dim(inputs.q.shape[-1])


def supports_call(call: AttentionCall) -> bool:
    """Return the same for the specification of a call, assuming Triton is installed."""
    options = (
        call.window is not None, call.softcap, call.dropout, call.packed, call.padding, call.bias != "none", call.sinks,
        call.has_other_values, call.attention_chunk,
    )  # fmt: skip
    return call.device == "cuda" and call.dtype != "fp64" and _supports_head_dim(call.head_dim) and not any(options)


# ---------------------------------------------------------------- public function


def attention_recompute_scores(query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool) -> Tensor:
    """Compute softmax(scale * query key^T) value like `UnfusedAttention`, without saving (queries, keys) matrices.

    The weights are exp(score - lse), rounded once, while `UnfusedAttention` also rounds the scores: results differ by
    that rounding. Results are bitwise reproducible.

    Args:
        query: (batch, queries, heads, head_dim), bf16, fp16 or fp32; head_dim 16 to 256 in steps of 8. Under autocast,
            cast to its dtype.
        key: (batch, keys, groups, head_dim), query head h uses group h // (heads / groups).
        value: like `key`.
        scale: factor of the scores.
        causal: query i attends to keys 0 to i + keys - queries only (bottom-right aligned).

    Returns:
        Like `query`, contiguous, differentiable once; a fully masked query has output 0.

    Raises:
        ValueError: invalid shapes, dtypes, devices or scale.
    """
    query, key, value = autocast(query, key, value)
    inputs = AttentionInputs(query, key, value, causal=causal, softmax_scale=scale)
    check_arguments(inputs)
    check_same_width(inputs)
    context = _RecomputeScores.apply(query, key, value, causal, scale)
    assert isinstance(context, Tensor)
    return context
