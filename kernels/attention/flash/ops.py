"""Flash attention: custom operations, autograd and the public function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from ...custom_op import custom_op
from ...launch import HAS_TRITON, INTERPRETED
from ..argument_checks import check_arguments
from ..inputs import AttentionInputs
from .hopper.supported_calls import supports
from .kernel_arguments import FlashAttentionParams
from .portable.backward import launch_dkdv, launch_dq, prepare_backward
from .portable.bias_gradient import launch_bias_gradient, launch_distance_gradient
from .portable.forward import allocate_outputs, launch_forward

# ---------------------------------------------------------------- launches


def _results(q: Tensor, k: Tensor, v: Tensor, problem: FlashAttentionParams) -> tuple[Tensor, Tensor]:
    """Compute output and log-sum-exp with the Hopper or the portable kernels."""
    if supports(q, k, v, problem):
        from .hopper.launchers import launch_forward as launch_hopper_forward

        return launch_hopper_forward(q, k, v, problem)
    return launch_forward(q, k, v, problem)


class NeedsGradient(NamedTuple):
    """Which gradients are needed; those of k and v are computed together.

    The last `joined` of those of q, k and v, 0, 2 or 3, all needed, are one tensor (batch, tokens, all their heads,
    head_dim) in place of the first of them.
    """

    q: bool
    kv: bool
    bias: bool
    distance_bias: bool
    slopes: bool
    sinks: bool
    joined: int = 0

    @property
    def pass_over_queries(self) -> bool:
        """True if one of these needs the pass that computes dQ."""
        return self.q or self.bias or self.distance_bias or self.slopes


def _sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of `sinks` (heads,), fp32 or fp64: over the rows of a head, -delta times the sink's weight.

    `lse` is natural, (batch, heads, queries) or packed (heads, rows), and includes the sink; `delta` likewise, of which
    rows beyond those of `lse` are padding.
    """
    weight = (sinks[:, None] - lse).exp().masked_fill(lse == float("-inf"), 0.0)
    return -(weight * delta[..., : lse.shape[-1]]).sum((0, 2) if lse.ndim == 3 else 1)


def _slices_of_one(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Return 3 if q, k and v have the strides of slices of one projection (batch, tokens, all heads, head_dim).

    Returns:
        2 if only k and v have, else 0.
    """
    if q.ndim != 4 or k.shape != v.shape:
        return 0

    def are_slices(heads: int, *tensors: Tensor) -> bool:
        tokens, width = k.shape[1], k.shape[3]
        pitch = heads * width
        return all(each.stride()[2::-1] == (width, pitch, tokens * pitch) for each in tensors)

    heads, groups = q.shape[2], k.shape[2]
    if q.shape[1] == k.shape[1] and are_slices(heads + 2 * groups, q, k, v):
        return 3
    return 2 if are_slices(2 * groups, k, v) else 0


def _gradients(
    out_gradient: Tensor, lse_gradient: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    problem: FlashAttentionParams, needs: NeedsGradient,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Compute the gradients of q, k, v, bias, distance_bias, alibi_slopes and sinks, None where not needed."""
    compute = _hopper_gradients if supports(q, k, v, problem) else _portable_gradients
    if not needs.joined:
        return compute(out_gradient, lse_gradient, q, k, v, out, lse, problem, needs)
    first = 3 - needs.joined
    heads = [each.shape[2] for each in (q, k, v)[first:]]
    joined = k.new_empty(*k.shape[:2], sum(heads), k.shape[3])
    apart = (q.new_empty(q.shape if needs.pass_over_queries else 0),) if first else ()
    parts = (*apart, *joined.split(heads, dim=2))
    found = list(compute(out_gradient, lse_gradient, q, k, v, out, lse, problem, needs, parts))
    found[first:3] = [joined, *[None] * (needs.joined - 1)]
    return tuple(found)


def _portable_gradients(
    out_gradient: Tensor, lse_gradient: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    problem: FlashAttentionParams, needs: NeedsGradient, parts: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Compute the gradients with the portable kernels, those of q, k and v in `parts` if given."""
    bias, distance_bias, alibi_slopes, sinks = problem[:4]
    saved = prepare_backward(q, k, v, out, lse, out_gradient, lse_gradient)
    q_gradient = k_gradient = v_gradient = bias_gradient = distance_gradient = slopes_gradient = sinks_gradient = None
    if needs.kv:
        k_gradient, v_gradient = launch_dkdv(saved, problem, out=None if parts is None else (parts[1], parts[2]))
    far = None
    scores_shape = (q.shape[0], q.shape[2], problem.max_queries, problem.max_keys)
    full_bias = needs.bias and bias is not None and bias.shape == scores_shape
    summed_bias = needs.bias and bias is not None and not full_bias
    if needs.pass_over_queries:
        scores_dtype = bias.dtype if bias is not None and full_bias else None
        dq, scores, far, slopes = launch_dq(
            saved, problem, scores_dtype=scores_dtype, correct_delta=summed_bias or needs.distance_bias,
            far_sums=needs.distance_bias and problem.right != 0, slope_sums=needs.slopes,
            out=None if parts is None else parts[0],
        )  # fmt: skip
        q_gradient = dq if needs.q else q_gradient
        if scores is not None:
            bias_gradient = scores
        if slopes is not None and alibi_slopes is not None:
            slopes_gradient = slopes.to(alibi_slopes.dtype)
    if sinks is not None and (needs.sinks or needs.distance_bias):
        sinks_gradient = _sinks_gradient(sinks, lse, saved.delta)
    if needs.distance_bias and distance_bias is not None:
        distance_gradient = launch_distance_gradient(saved, problem, far, sinks_gradient).to(distance_bias.dtype)
    if summed_bias and bias is not None:
        bias_gradient = launch_bias_gradient(saved, problem).to(bias.dtype)
    return (
        q_gradient, k_gradient, v_gradient, bias_gradient, distance_gradient, slopes_gradient,
        None if sinks_gradient is None or sinks is None else sinks_gradient.to(sinks.dtype),
    )  # fmt: skip


def _hopper_gradients(
    out_gradient: Tensor, lse_gradient: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    problem: FlashAttentionParams, needs: NeedsGradient, parts: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Compute the result of `_portable_gradients` with the Hopper kernels, which do not support a dense bias."""
    from .hopper import launchers
    from .hopper.distance_bias import distance_gradient as distance_sums

    q, k, v, out_gradient = launchers.as_one_batch(problem, q, k, v, out_gradient)
    if problem.packed:
        out, lse, lse_gradient = out[None], lse[None], None if lse_gradient is None else lse_gradient[None]
    distance_gradient = slopes_gradient = row_sums = diagonals = sinks_gradient = None
    writes_q, writes_kv = needs.pass_over_queries, needs.kv or needs.distance_bias
    if parts is None:
        written = zip((q, k, v), (writes_q, writes_kv, writes_kv), strict=True)
        parts = tuple(each.new_empty(each.shape if writes else 0) for each, writes in written)
    dq, dk, dv = parts
    needs_all = needs.q and needs.kv and not problem.packed
    order = launchers.fused_order(q, k, problem) if needs_all else None
    is_short = needs_all and order is None and launchers.uses_short_backward(q, k, problem)
    saved = launchers.prepare_backward(
        q, k, v, out, lse, out_gradient, lse_gradient, problem,
        begins_with_dq=writes_q and order is None and not is_short,
    )  # fmt: skip
    if order is not None:
        launchers.launch_fused_backward(saved, problem, order, dq, dk, dv)
    elif is_short:
        launchers.launch_short_backward(saved, problem, dq, dk, dv)
    else:
        if writes_q:
            far_sums = needs.distance_bias and problem.right < 0
            row_sums = launchers.launch_dq(
                saved, problem, dq, correct_delta=needs.distance_bias, far_sums=far_sums, slope_sums=needs.slopes
            )
        if writes_kv:  # after dq, which computes delta
            diagonals = launchers.launch_dkdv(saved, problem, dk, dv, diagonals=needs.distance_bias)
    if diagonals is not None and problem.distance_bias is not None:
        reach, offset = problem.distance_bias.shape[1] // 2, problem.max_keys - problem.max_queries
        total = None
        if lse_gradient is not None:  # fully masked rows do not contribute
            total = lse_gradient.masked_fill(lse == float("-inf"), 0.0).sum((0, 2))
        distance_gradient = distance_sums(diagonals, row_sums, total, reach, offset).to(problem.distance_bias.dtype)
    if needs.slopes and row_sums is not None and problem.alibi_slopes is not None:
        slopes_gradient = row_sums.sum((0, 2)).to(problem.alibi_slopes.dtype)
    if needs.sinks and problem.sinks is not None:
        sinks_gradient = _sinks_gradient(problem.sinks, lse, saved.delta).to(problem.sinks.dtype)
    if problem.packed:
        dq, dk, dv = (gradient.squeeze(0) for gradient in (dq, dk, dv))
    return (
        dq if needs.q else None, dk if needs.kv else None, dv if needs.kv else None,
        None, distance_gradient, slopes_gradient, sinks_gradient,
    )  # fmt: skip


# ---------------------------------------------------------------- custom operations


_Field = Tensor | float | None  # of a `FlashAttentionParams`
_FIELDS = (  # the types of all its fields, in order: an operation takes no record
    "Tensor? bias, Tensor? distance_bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? key_padding_mask, "
    "Tensor? rng, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt left, SymInt right, float scale, float softcap, "
    "float dropout_p, SymInt max_queries, SymInt max_keys, SymInt attention_chunk, bool atomic"
)


@custom_op(
    "stoker::flash_attention",
    schema=f"(Tensor q, Tensor k, Tensor v, {_FIELDS}) -> (Tensor, Tensor)",
)
def _flash_attention(q: Tensor, k: Tensor, v: Tensor, *problem: _Field) -> tuple[Tensor, Tensor]:
    """Compute output and log-sum-exp."""
    return _results(q, k, v, FlashAttentionParams._make(problem))


@torch.library.register_fake("stoker::flash_attention")
def _(q: Tensor, k: Tensor, v: Tensor, *problem: _Field) -> tuple[Tensor, Tensor]:
    return allocate_outputs(q, v, FlashAttentionParams._make(problem))


@custom_op(
    "stoker::flash_attention_backward",
    schema=(
        "(Tensor out_gradient, Tensor? lse_gradient, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        f"{_FIELDS}, bool needs_q, bool needs_kv, bool needs_bias, bool needs_distance_bias, bool needs_slopes, "
        "bool needs_sinks, SymInt joined) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _flash_attention_backward(
    out_gradient: Tensor, lse_gradient: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *problem_and_needs: _Field,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the gradients of `_gradients`, empty tensors where not needed."""
    problem, needs = _split(problem_and_needs)
    gradients = _gradients(out_gradient, lse_gradient, q, k, v, out, lse, problem, needs)
    return tuple(q.new_empty(0) if gradient is None else gradient for gradient in gradients)


@torch.library.register_fake("stoker::flash_attention_backward")
def _(
    out_gradient: Tensor, lse_gradient: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *problem_and_needs: _Field,
) -> tuple[Tensor, ...]:  # fmt: skip
    problem, needs = _split(problem_and_needs)

    def like(tensor: Tensor | None, needed: bool) -> Tensor:
        return tensor.new_empty(tensor.shape) if needed and tensor is not None else q.new_empty(0)

    parts = [like(q, needs.q), like(k, needs.kv), like(v, needs.kv)]
    if needs.joined:
        first = 3 - needs.joined
        heads = sum(each.shape[-2] for each in (q, k, v)[first:])
        joined = k.new_empty(*k.shape[:-2], heads, k.shape[-1])
        parts[first:] = [joined, *(q.new_empty(0) for _ in range(needs.joined - 1))]
    return (
        *parts,
        like(problem.bias, needs.bias),
        like(problem.distance_bias, needs.distance_bias),
        like(problem.alibi_slopes, needs.slopes),
        like(problem.sinks, needs.sinks),
    )


def _split(fields: Sequence[_Field]) -> tuple[FlashAttentionParams, NeedsGradient]:
    count = len(FlashAttentionParams._fields)
    return FlashAttentionParams._make(fields[:count]), NeedsGradient._make(fields[count:])


# ---------------------------------------------------------------- autograd


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    # 3 tensors, then the 8 tensors and the numbers of a `FlashAttentionParams`
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:11])
    ctx.scalars = inputs[11:]
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, out_gradient: Tensor | None, lse_gradient: Tensor | None, *, direct: bool
) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    if out_gradient is None:
        if lse_gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        out_gradient = torch.zeros_like(out)
    needs_each = ctx.needs_input_grad
    needs = NeedsGradient(needs_each[0], needs_each[1] or needs_each[2], *needs_each[3:7])
    problem = FlashAttentionParams(*tensors, *ctx.scalars)
    if direct:
        gradients = _gradients(out_gradient, lse_gradient, q, k, v, out, lse, problem, needs)
    else:
        # wider heads: not measured to gain; a call of 2 x 384 tokens, 128 wide, which the host bounds, took longer
        joined = _slices_of_one(q, k, v) if needs.kv and q.shape[-1] <= 64 else 0
        needs = needs._replace(joined=joined if needs.q or joined == 2 else 0)
        gradients = _flash_attention_backward(out_gradient, lse_gradient, q, k, v, out, lse, *problem, *needs)
        if needs.joined:  # the compiler removes this split and the concatenation in the backward of the projection's
            first = 3 - needs.joined
            parts = gradients[first].split([each.shape[2] for each in (q, k, v)[first:]], dim=2)
            gradients = (*gradients[:first], *parts, *gradients[3:])
    used = [gradient if needed else None for gradient, needed in zip(gradients, needs_each[:7], strict=True)]
    return (*used, *(None,) * (len(needs_each) - 7))


def _backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    return _differentiate(ctx, *gradients, direct=False)


class FlashAttention(torch.autograd.Function):
    """The operation without PyTorch's dispatcher, whose host overhead exceeds the GPU time of short calls."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Compute output and log-sum-exp; `inputs` as in `_flash_attention`."""
        q, k, v, *fields = inputs
        results = _results(q, k, v, FlashAttentionParams._make(fields))
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


torch.library.register_autograd("stoker::flash_attention", _backward, setup_context=_save)
torch.library.register_autograd("stoker::flash_attention_backward", _no_second_derivative)


# ---------------------------------------------------------------- FLOPs


def _visible_pairs_of_chunks(queries: int, keys: int, left: int, chunk: int) -> int:
    """Return the number of visible (query, key) pairs of causal chunks; bottom-right aligned."""
    width = chunk if left < 0 else min(left + 1, chunk)

    def rows(count: int) -> int:
        """Sum of min(i, width) over the first `count` rows of a chunk."""
        grown = min(count, width)
        return grown * (grown + 1) // 2 + (count - grown) * width

    def up_to(position: int) -> int:
        return position // chunk * rows(chunk) + rows(position % chunk)

    return up_to(keys) - up_to(max(keys - queries, 0))


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


def _pairs(q: Any, problem: FlashAttentionParams) -> int:
    """Return the visible (query, key) pairs of all heads; packed, as if all sequences had the maximum length."""
    heads = q.shape[-2]
    if problem.attention_chunk:
        pairs = _visible_pairs_of_chunks(problem.max_queries, problem.max_keys, problem.left, problem.attention_chunk)
    else:
        pairs = _visible_pairs(problem.max_queries, problem.max_keys, problem.left, problem.right)
    if problem.packed:
        sequences = problem.batch_size(q)
        rows = min(q.shape[0], sequences * problem.max_queries)
        return heads * pairs * rows // max(problem.max_queries, 1)
    return q.shape[0] * heads * pairs


@register_flop_formula(torch.ops.stoker.flash_attention, get_raw=True)
def _forward_flops(q: Tensor, k: Tensor, v: Tensor, *problem: Any, out_val: Any = None, **_: Any) -> int:
    return 2 * (q.shape[-1] + v.shape[-1]) * _pairs(q, FlashAttentionParams(*problem))


@register_flop_formula(torch.ops.stoker.flash_attention_backward, get_raw=True)
def _backward_flops(*arguments: Any, out_val: Any = None, **_: Any) -> int:
    q, _, v = arguments[2:5]
    return (6 * q.shape[-1] + 4 * v.shape[-1]) * _pairs(q, FlashAttentionParams(*arguments[7:24]))


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
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    rng: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    attention_chunk: int = 0,
    key_padding_mask: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(cap(softmax_scale * q k^T) + bias + distance_bias) v without storing the scores.

    Arguments as in `AttentionInputs`. Differentiable once in q, k, v, `bias`, `distance_bias`, `alibi_slopes`, `sinks`
    and through the log-sum-exp. The backward pass has no atomics: all gradients are bitwise reproducible.

    Args:
        q: bf16, fp16 or fp32, under the interpreter fp64 too; head_dim a multiple of 8 from 16 to 256. Under autocast,
            q, k and v are cast to its dtype.
        distance_bias: its gradient takes O(queries + keys) memory.
        alibi_slopes: computed without lookup and clipping, unlike the equivalent `distance_bias`.
        deterministic: ignored, accepted for the common signature; the kernels always are.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        Output in the shape and dtype of `q`, with the head width of `v`. With `return_lse` also the natural
        log-sum-exp, fp32 (fp64 for fp64 inputs), (batch, heads, queries) or packed (heads, total queries). A fully
        masked query has output 0, log-sum-exp -inf (with `sinks` the sink) and gradient 0; NaN in a key that is masked
        for all queries does not propagate.

    Raises:
        ValueError: invalid arguments, see `check_arguments`; or Triton does not support the device of the tensors.
    """
    out, lse = attention_and_lse(
        AttentionInputs(
            q, k, v, causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap, bias=bias,
            distance_bias=distance_bias, alibi_slopes=alibi_slopes, sinks=sinks, key_padding_mask=key_padding_mask,
            dropout_p=dropout_p, rng=rng, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, attention_chunk=attention_chunk,
        )
    )  # fmt: skip
    return (out, lse) if return_lse else out


def attention_and_lse(inputs: AttentionInputs, *, atomic: bool = False) -> tuple[Tensor, Tensor]:
    """Compute output and log-sum-exp as `flash_attention`.

    With `atomic` the gradient of the queries may be added up in the order of arrival, which is not deterministic.
    """
    device_type = inputs.q.device.type
    if torch.is_autocast_enabled(device_type):
        inputs = _cast(inputs, torch.get_autocast_dtype(device_type))
    sizes = check_arguments(inputs)
    q, k, v = inputs[:3]
    _check_triton_serves(q)
    operation = _flash_attention if _needs_dispatcher(q, k, v) else FlashAttention.apply
    return operation(q, k, v, *FlashAttentionParams.from_checked(inputs, sizes, atomic=atomic))


def _cast(inputs: AttentionInputs, dtype: torch.dtype) -> AttentionInputs:
    q, k, v, bias = inputs[:4]
    if bias is not None and bias.dtype not in (dtype, torch.float32):
        bias = bias.to(dtype)
    return AttentionInputs(q.to(dtype), k.to(dtype), v.to(dtype), bias, *inputs[4:])


def _check_triton_serves(q: Tensor) -> None:
    if not HAS_TRITON:
        raise ValueError("flash_attention needs Triton, which is not available; use reference_attention.")
    if not (q.is_cuda or INTERPRETED):
        raise ValueError(
            f"`q` ({q.device}) must be on a CUDA device: flash_attention needs CUDA or, for tests, TRITON_INTERPRET=1."
        )
