"""Unfused attention that keeps queries, keys, values, its output and log-sum-exps, and makes its scores again.

What lies between the products, (batch, heads, queries, keys), is written by one kernel in the forward and one in the
backward: with the log-sum-exps known, a weight needs its score alone. A second run of the three steps would write the
scores, read them and write the weights, and read these for the gradient; here the second product of queries and keys
comes with the writing of the weights, and both with the gradient of the scores. Log-sum-exps: arXiv 2205.14135; which
parts of attention are worth making again: arXiv 2205.05198.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..launch import triton_runs_on
from .argument_checks import LARGEST_HEAD_DIM, SMALLEST_HEAD_DIM, check_arguments
from .backends.unfused import UnfusedAttention, stacked_by_group
from .call_spec import AttentionCall
from .lse_first.ops import log_sum_exps
from .lse_first.triton_stages import delta_of
from .packed_sequences import PackedSequences
from .recompute_scores_kernels import launch_score_gradient, launch_weights

Shape = Sequence[int]
_UNFUSED = UnfusedAttention()

# ---------------------------------------------------------------- custom operations


@torch.library.custom_op("stoker::attention_weights", mutates_args=())
def _attention_weights(q: Tensor, k: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """How much each query takes of each key, (batch, heads, queries, keys) like `q`, and the log-sum-exps."""
    lse = log_sum_exps(q, [k], causal, scale, 0, 0, k.shape[1])
    if not (q.numel() and k.numel()):
        return q.new_empty((*lse.shape, k.shape[1])), lse
    return launch_weights(q, k, lse, causal, scale), lse


@_attention_weights.register_fake
def _(q: Tensor, k: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _ = q.shape
    lse = q.new_empty((batch, heads, queries), dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((batch, heads, queries, k.shape[1])), lse


@torch.library.custom_op("stoker::attention_score_gradient", mutates_args=())
def _attention_score_gradient(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The same weights, and the gradients of the products of queries and keys, `scale` counted in."""
    if not (q.numel() and k.numel()):
        nothing = q.new_empty((*lse.shape, k.shape[1]))
        return nothing, torch.empty_like(nothing)
    delta = delta_of(out, out_gradient, lse, None)
    return launch_score_gradient(out_gradient, q, k, v, lse, delta, causal, scale)


@_attention_score_gradient.register_fake
def _(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    return q.new_empty(shape), q.new_empty(shape)


def _products(q: Shape, k: Shape) -> int:
    """FLOPs of two products of all queries and keys; a causal mask is not counted, as in torch's own formulas."""
    batch, queries, heads, head_dim = q
    return 4 * batch * heads * queries * k[1] * head_dim


@register_flop_formula(torch.ops.stoker.attention_weights)
def _(q: Shape, k: Shape, *_: Any, **__: Any) -> int:
    return _products(q, k)


@register_flop_formula(torch.ops.stoker.attention_score_gradient)
def _(out_gradient: Shape, q: Shape, k: Shape, *_: Any, **__: Any) -> int:
    return _products(q, k)


# ---------------------------------------------------------------- autograd


class _ScoresAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
        weights, lse = _attention_weights(query, key, causal, scale)
        # in the order in which the projection behind it reads, and keeps, it: so it is kept once
        context = _UNFUSED.product(weights, value).contiguous()
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
        of_value = torch.bmm(weights.view(by_group).transpose(1, 2), stacked_by_group(gradient, groups))
        del weights  # as large as the scores: gone before the other products are made
        score_gradient = score_gradient.view(by_group)
        of_query = torch.bmm(score_gradient, stacked_by_group(key, groups))
        of_key = torch.bmm(score_gradient.transpose(1, 2), stacked_by_group(query, groups))
        return (
            of_query.view(batch, heads, queries, head_dim).transpose(1, 2),
            of_key.view(batch, groups, keys, head_dim).transpose(1, 2),
            of_value.view(batch, groups, keys, head_dim).transpose(1, 2),
            None,
            None,
        )


# ---------------------------------------------------------------- which calls


def _serves_width(head_dim: int) -> bool:
    return SMALLEST_HEAD_DIM <= head_dim <= LARGEST_HEAD_DIM and head_dim % 8 == 0


def serves(
    query: Tensor,
    *,
    scale: float,
    causal: bool,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    distance_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    packed: PackedSequences | None = None,
    key_padding_mask: Tensor | None = None,
) -> bool:
    """Whether `attention_with_scores_again` takes a call, whose arguments are those of `AttentionFunction`."""
    options = (bias, distance_bias, alibi_slopes, window, packed, key_padding_mask)
    if dropout or softcap or any(option is not None for option in options):
        return False
    return triton_runs_on(query) and _serves_width(query.shape[-1])


def serves_call(call: AttentionCall) -> bool:
    """The same of a call by its facts, on a machine with Triton."""
    options = (call.window is not None, call.softcap, call.dropout, call.packed, call.padding, call.bias != "none")
    return call.device == "cuda" and call.dtype != "fp64" and _serves_width(call.head_dim) and not any(options)


# ---------------------------------------------------------------- public function


def attention_with_scores_again(query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool) -> Tensor:
    """softmax(scale * query key^T) value as `UnfusedAttention` computes it, with no number for each query and key kept.

    The weights are exp(score - lse), rounded once, where `UnfusedAttention` rounds the scores too: results differ from
    its by that rounding. Equal calls give equal bits.

    Args:
        query: (batch, queries, heads, head_dim), bf16, fp16 or fp32; head_dim 16 to 256 in steps of 8. Under autocast,
            cast to its dtype.
        key: (batch, keys, groups, head_dim), query head h reads group h // (heads / groups).
        value: like `key`.
        scale: factor of the scores.
        causal: query i sees keys 0 to i + keys - queries only (bottom-right aligned).

    Returns:
        Like `query`, contiguous, differentiable once; a query that sees no key gives 0.

    Raises:
        ValueError: shapes, dtypes, devices or the scale do not fit.
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    check_arguments(query, key, value, causal=causal, softmax_scale=scale)
    context = _ScoresAgain.apply(query, key, value, causal, scale)
    assert isinstance(context, Tensor)
    return context
