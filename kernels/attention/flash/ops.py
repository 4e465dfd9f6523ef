"""Flash attention: custom operations, autograd and the public function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from ...launch import HAS_TRITON, INTERPRETED
from ..argument_checks import check_arguments
from .hopper.supported_calls import serves
from .kernel_arguments import Problem
from .portable.backward import launch_dkdv, launch_dq, prepare_backward
from .portable.bias_gradient import launch_bias_gradient, launch_distance_gradient
from .portable.forward import allocate_outputs, launch_forward

# ---------------------------------------------------------------- launches


def _results(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Compute output and log-sum-exp with the Hopper or the portable kernels."""
    if serves(q, k, v, problem):
        from .hopper.launchers import launch_forward as launch_hopper_forward

        return launch_hopper_forward(q, k, v, problem)
    return launch_forward(q, k, v, problem)


def _gradients(
    out_gradient: Tensor, lse_gradient: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    problem: Problem, needs_grad: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Compute the gradients of q, k, v, bias, distance_bias and alibi_slopes, None where not needed.

    `needs_grad`: flags for q, for k and v together, and for the three biases.
    """
    needs_q, needs_kv, needs_bias, needs_distance_bias, needs_slopes = needs_grad
    bias, distance_bias, alibi_slopes = problem[:3]
    if serves(q, k, v, problem):
        return _hopper_backward(
            q, k, v, out, lse, out_gradient, lse_gradient, problem, needs_q, needs_kv, needs_distance_bias, needs_slopes
        )
    saved = prepare_backward(q, k, v, out, lse, out_gradient, lse_gradient)
    q_gradient = k_gradient = v_gradient = bias_gradient = distance_gradient = slopes_gradient = None
    if needs_kv:
        k_gradient, v_gradient = launch_dkdv(saved, problem)
    full_bias = needs_bias and bias is not None and bias.shape == (*q.shape[:1], q.shape[2], *problem[-2:])
    if needs_q or full_bias or needs_distance_bias or needs_slopes:
        scores_dtype = bias.dtype if bias is not None and full_bias else None
        dq, scores, far, slopes = launch_dq(
            saved, problem, scores_dtype=scores_dtype, far_sums=needs_distance_bias, slope_sums=needs_slopes
        )
        q_gradient = dq if needs_q else q_gradient
        if scores is not None:
            bias_gradient = scores
        if far is not None and distance_bias is not None:
            distance_gradient = launch_distance_gradient(saved, problem, far).to(distance_bias.dtype)
        if slopes is not None and alibi_slopes is not None:
            slopes_gradient = slopes.to(alibi_slopes.dtype)
    if needs_bias and bias is not None and not full_bias:
        bias_gradient = launch_bias_gradient(saved, problem).to(bias.dtype)
    return q_gradient, k_gradient, v_gradient, bias_gradient, distance_gradient, slopes_gradient


def _hopper_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, out_gradient: Tensor, lse_gradient: Tensor | None,
    problem: Problem, needs_q: bool, needs_kv: bool, needs_distance_bias: bool, needs_slopes: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Compute the result of `_gradients` with the Hopper kernels, which do not support a dense bias."""
    from .hopper import launchers
    from .hopper.distance_bias import distance_gradient as distance_sums

    saved = launchers.prepare_backward(q, k, v, out, lse, out_gradient, lse_gradient, problem)
    q_gradient = k_gradient = v_gradient = distance_gradient = slopes_gradient = row_sums = diagonals = None
    if needs_kv or needs_distance_bias:
        dk, dv, diagonals = launchers.launch_dkdv(saved, problem, diagonals=needs_distance_bias)
        if needs_kv:
            k_gradient, v_gradient = dk, dv
    if needs_q or needs_distance_bias or needs_slopes:
        far_sums = needs_distance_bias and problem.right < 0
        dq, row_sums = launchers.launch_dq(saved, problem, far_sums=far_sums, slope_sums=needs_slopes)
        q_gradient = dq if needs_q else q_gradient
    if diagonals is not None and problem.distance_bias is not None:
        reach, offset = problem.distance_bias.shape[1] // 2, problem.max_keys - problem.max_queries
        total = None
        if lse_gradient is not None:  # fully masked rows do not contribute
            total = lse_gradient.masked_fill(lse == float("-inf"), 0.0).sum((0, 2))
        distance_gradient = distance_sums(diagonals, row_sums, total, reach, offset).to(problem.distance_bias.dtype)
    if needs_slopes and row_sums is not None and problem.alibi_slopes is not None:
        slopes_gradient = row_sums.sum((0, 2)).to(problem.alibi_slopes.dtype)
    return q_gradient, k_gradient, v_gradient, None, distance_gradient, slopes_gradient


# ---------------------------------------------------------------- custom operations


@torch.library.custom_op("stoker::flash_attention", mutates_args=())
def _flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    distance_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    key_padding_mask: Tensor | None,
    rng: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    dropout_p: float,
    max_queries: int,
    max_keys: int,
) -> tuple[Tensor, Tensor]:
    """Compute output and log-sum-exp; the arguments after v are the fields of a `Problem`."""
    problem = Problem(
        bias, distance_bias, alibi_slopes, key_padding_mask, rng, cu_seqlens_q, cu_seqlens_k, left, right, scale,
        softcap, dropout_p, max_queries, max_keys,
    )  # fmt: skip
    return _results(q, k, v, problem)


@_flash_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *problem: Any) -> tuple[Tensor, Tensor]:
    return allocate_outputs(q, Problem(*problem))


@torch.library.custom_op("stoker::flash_attention_backward", mutates_args=())
def _flash_attention_backward(
    out_gradient: Tensor,
    lse_gradient: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    distance_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    key_padding_mask: Tensor | None,
    rng: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    dropout_p: float,
    max_queries: int,
    max_keys: int,
    needs_q: bool,
    needs_kv: bool,
    needs_bias: bool,
    needs_distance_bias: bool,
    needs_slopes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v, bias, distance_bias and alibi_slopes, empty tensors where not needed."""
    problem = Problem(
        bias, distance_bias, alibi_slopes, key_padding_mask, rng, cu_seqlens_q, cu_seqlens_k, left, right, scale,
        softcap, dropout_p, max_queries, max_keys,
    )  # fmt: skip
    needs_grad = (needs_q, needs_kv, needs_bias, needs_distance_bias, needs_slopes)
    gradients = _gradients(out_gradient, lse_gradient, q, k, v, out, lse, problem, needs_grad)
    dq, dk, dv, *biases = (q.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return dq, dk, dv, biases[0], biases[1], biases[2]


@_flash_attention_backward.register_fake
def _(
    out_gradient: Tensor, lse_gradient: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    *fields, needs_q, needs_kv, needs_bias, needs_distance_bias, needs_slopes = rest
    problem = Problem(*fields)

    def like(tensor: Tensor | None, needed: bool) -> Tensor:
        return tensor.new_empty(tensor.shape) if needed and tensor is not None else q.new_empty(0)

    return (
        like(q, needs_q),
        like(k, needs_kv),
        like(v, needs_kv),
        like(problem.bias, needs_bias),
        like(problem.distance_bias, needs_distance_bias),
        like(problem.alibi_slopes, needs_slopes),
    )


# ---------------------------------------------------------------- autograd


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *fields = inputs
    problem = Problem(*fields)
    ctx.save_for_backward(q, k, v, *output, *problem[:7])
    ctx.scalars = problem[7:]
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, out_gradient: Tensor | None, lse_gradient: Tensor | None, *, direct: bool
) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    if out_gradient is None:
        if lse_gradient is None:
            return (None,) * 17
        out_gradient = torch.zeros_like(out)
    needs = ctx.needs_input_grad
    needs_grad = (needs[0], needs[1] or needs[2], *needs[3:6])
    problem = Problem(*tensors, *ctx.scalars)
    if direct:
        gradients = _gradients(out_gradient, lse_gradient, q, k, v, out, lse, problem, needs_grad)
    else:
        gradients = _flash_attention_backward(out_gradient, lse_gradient, q, k, v, out, lse, *problem, *needs_grad)
    used = [gradient if needed else None for gradient, needed in zip(gradients, needs[:6], strict=True)]
    return (*used, *(None,) * 11)


def _backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    return _differentiate(ctx, *gradients, direct=False)


class FlashAttention(torch.autograd.Function):
    """The operation without PyTorch's dispatcher, whose host overhead exceeds the GPU time of short calls."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Compute output and log-sum-exp; `inputs` as in `_flash_attention`."""
        q, k, v, *fields = inputs
        results = _results(q, k, v, Problem(*fields))
        _save(ctx, inputs, results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the inputs.

        With create_graph the custom operation is used, which raises an error if differentiated again.
        """
        return _differentiate(ctx, *gradients, direct=not torch.is_grad_enabled())


def _needs_dispatcher(*tensors: Tensor) -> bool:
    """Return True if the operation must be visible to torch.compile, a dispatch mode, torch.func or a subclass."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or torch._C._are_functorch_transforms_active():
        return True
    return any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors)


def _no_second_derivative(ctx: Any, *gradients: Any) -> None:
    raise RuntimeError("flash_attention has no second derivative; use reference_attention where one is needed.")


_flash_attention.register_autograd(_backward, setup_context=_save)
_flash_attention_backward.register_autograd(_no_second_derivative)


# ---------------------------------------------------------------- FLOPs


def _visible_pairs(queries: int, keys: int, left: int, right: int) -> int:
    """Return the number of visible (query, key) pairs of a window; bottom-right aligned."""

    def up_to(limit: int) -> int:
        """Count the pairs with key - query - (keys - queries) <= limit: a sum of clipped row lengths."""
        first = min(max(keys - queries + limit + 1, 0), keys)
        # each row has one key more than the one before, from `grow_from` on, until rows have all keys
        grow_from = max(0, -(keys - queries + limit + 1))
        grown = min(max(queries - grow_from, 0), keys - first + 1)
        full = max(queries - grow_from - grown, 0)
        return grown * first + grown * (grown - 1) // 2 + full * keys

    below = up_to(right) if right >= 0 else queries * keys
    return below - (up_to(-left - 1) if left >= 0 else 0)


def _multiplications(q: Any, problem: Problem) -> int:
    """Return the multiply-adds of one product over the visible pairs; packed, as if all had the maximum length."""
    heads, head_dim = q.shape[-2:]
    pairs = _visible_pairs(problem.max_queries, problem.max_keys, problem.left, problem.right)
    if problem.packed:
        sequences = problem.batch(q)
        rows = min(q.shape[0], sequences * problem.max_queries)
        return heads * head_dim * pairs * rows // max(problem.max_queries, 1)
    return q.shape[0] * heads * head_dim * pairs


@register_flop_formula(torch.ops.stoker.flash_attention, get_raw=True)
def _forward_flops(q: Tensor, k: Tensor, v: Tensor, *problem: Any, out_val: Any = None, **_: Any) -> int:
    return 4 * _multiplications(q, Problem(*problem))


@register_flop_formula(torch.ops.stoker.flash_attention_backward, get_raw=True)
def _backward_flops(*arguments: Any, out_val: Any = None, **_: Any) -> int:
    return 10 * _multiplications(arguments[2], Problem(*arguments[7:21]))


# ---------------------------------------------------------------- public function


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    distance_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    key_padding_mask: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(cap(softmax_scale * q k^T) + bias + distance_bias) v without storing the scores.

    Differentiable once in q, k, v, `bias`, `distance_bias`, `alibi_slopes`, and through the log-sum-exp. The backward
    pass has no atomics: all gradients are bitwise reproducible.

    Args:
        q: (batch, queries, heads, head_dim), or packed (total queries, heads, head_dim); bf16, fp16 or fp32, under the
            interpreter fp64 too; head_dim a multiple of 8 from 16 to 256. Under autocast, cast to its dtype.
        k: (batch, keys, groups, head_dim), or packed; query head h uses group h // (heads / groups).
        v: like `k`.
        causal: mask later keys; both sequences end at the same token (bottom-right aligned).
        window_size: keys visible to the left and to the right of a query, inclusive; -1 for all.
        softmax_scale: factor of the scores; None is 1 / sqrt(head_dim).
        softcap: cap * tanh(score / cap) bounds the scaled scores, before a bias is added; 0 for none.
        bias: added to the scores, dtype of q or fp32, broadcastable to (batch, heads, queries, keys); dense only.
        distance_bias: fp32 (heads, 2 R + 1); entry [h, R + d] is added for a key at distance d = j - (i + keys -
            queries), clipped to [-R, R]. Its gradient takes O(queries + keys) memory.
        alibi_slopes: fp32 (heads,); -slope * |d| is added for a key at distance d, in addition to the other biases.
            Computed without lookup and clipping, unlike the equivalent `distance_bias`.
        dropout_p: probability of dropping an attention weight; the others are scaled by 1 / (1 - dropout_p).
        rng: int64 [seed, offset] of the dropout mask, on the device of q; see `dropout.py`.
        cu_seqlens_q: int32 (sequences + 1), cumulative sequence lengths of a packed `q`, starting with 0. Entries may
            repeat; tokens after the last entry belong to no sequence.
        cu_seqlens_k: the same for `k` and `v`.
        max_seqlen_q: upper bound of the lengths in `cu_seqlens_q`.
        max_seqlen_k: upper bound of the lengths in `cu_seqlens_k`.
        key_padding_mask: bool (batch, keys), False for padding; dense only.
        deterministic: ignored, accepted for the common signature; the kernels always are.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        Output in the shape and dtype of `q`. With `return_lse` also the natural log-sum-exp, fp32 (fp64 for fp64
        inputs), (batch, heads, queries) or packed (heads, total queries). A fully masked query has output 0,
        log-sum-exp -inf and gradient 0; NaN in a key that is masked for all queries does not propagate.

    Raises:
        ValueError: invalid arguments, see `check_arguments`; or Triton does not support the device of the tensors.
    """
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
        if bias is not None and bias.dtype not in (q.dtype, torch.float32):
            bias = bias.to(q.dtype)
    sizes = check_arguments(
        q, k, v, causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap, bias=bias,
        distance_bias=distance_bias, alibi_slopes=alibi_slopes, dropout_p=dropout_p, rng=rng,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        key_padding_mask=key_padding_mask,
    )  # fmt: skip
    _check_triton_serves(q)
    operation = _flash_attention if _needs_dispatcher(q, k, v) else FlashAttention.apply
    out, lse = operation(
        q, k, v, bias, distance_bias, alibi_slopes, key_padding_mask, rng, cu_seqlens_q, cu_seqlens_k, sizes.left,
        sizes.right, sizes.scale, float(softcap), float(dropout_p), sizes.queries, sizes.keys,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _check_triton_serves(q: Tensor) -> None:
    if not HAS_TRITON:
        raise ValueError("flash_attention needs Triton, which is not available; use reference_attention.")
    if not (q.is_cuda or INTERPRETED):
        raise ValueError(
            f"`q` ({q.device}) must be on a CUDA device: flash_attention needs CUDA or, for tests, TRITON_INTERPRET=1."
        )
