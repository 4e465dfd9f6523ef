"""LSE-first attention: custom operations and public functions."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...custom_op import custom_op
from ...launch import INTERPRETED, triton_runs_on
from ..argument_checks import check_arguments, check_same_width
from ..inputs import AttentionInputs
from . import eager_stages, triton_stages
from .chunks import GradientWriter, prefetch_chunks, split_into_chunks

Shape = Sequence[int]


def _stages(q: Tensor) -> ModuleType:
    """Return the module that implements the stages for `q`: Triton on a GPU or in the interpreter, else plain torch."""
    return triton_stages if triton_runs_on(q) or (INTERPRETED and q.device.type == "cpu") else eager_stages


def _lengths(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.shape[1] for tensor in tensors]


def _shift(causal: bool, q: Tensor, total_keys: int, offset: int) -> int | None:
    """Return the shift of the causal mask, None without one: query i sees key j of the chunk if j <= i + shift.

    The chunk starts at key `offset` of the sequence.
    """
    return total_keys - q.shape[1] - offset if causal else None


def _wide_like(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


# ---------------------------------------------------------------- stages over all chunks


def chunked_lse(
    q: Tensor, k: Sequence[Tensor], causal: bool, scale: float, chunk_size: int, k_offset: int, total_keys: int
) -> Tensor:
    """Stage 1 over all chunks: (batch, heads, queries) fp32 or fp64, natural logarithm, -inf for no visible key."""
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=_wide_like(q), device=q.device)
    if not q.numel():
        return lse
    chunks = split_into_chunks(_lengths(k), chunk_size)
    on_device = prefetch_chunks([(chunk.slice(k),) for chunk in chunks], q.device)
    for index, (chunk, (keys,)) in enumerate(zip(chunks, on_device, strict=True)):
        shift = _shift(causal, q, total_keys, k_offset + chunk.offset)
        _stages(q).lse_of_chunk_(lse, q, keys, shift=shift, scale=scale, merge=index > 0)
    return lse


def _gradients(
    q: Tensor,
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    out_gradient: Tensor,
    lse: Tensor,
    delta: Tensor,
    causal: bool,
    scale: float,
    chunk_size: int,
    k_offset: int,
    total_keys: int,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Stage 3 over all chunks: gradients of `q`, and of each tensor of `k` and `v` on its device."""
    k_gradients, v_gradients = _empty_like(k), _empty_like(v)
    chunks = split_into_chunks(_lengths(k), chunk_size) if q.numel() else []
    if not chunks:
        for gradient in (*k_gradients, *v_gradients):
            gradient.zero_()
        return q.new_zeros(q.shape), k_gradients, v_gradients
    # several chunks are summed in the accumulation dtype
    dq = torch.empty(q.shape, dtype=_wide_like(q) if len(chunks) > 1 else q.dtype, device=q.device)
    on_device = prefetch_chunks([(chunk.slice(k), chunk.slice(v)) for chunk in chunks], q.device)
    targets = [(chunk.slice(k_gradients), chunk.slice(v_gradients)) for chunk in chunks]
    with GradientWriter(targets, q.device) as writer:
        for index, (chunk, (keys, values)) in enumerate(zip(chunks, on_device, strict=True)):
            dk, dv = buffers = writer.get_buffers(index)
            shift = _shift(causal, q, total_keys, k_offset + chunk.offset)
            _stages(q).gradients_of_chunk_(
                dq, dk, dv, q, keys, values, out_gradient, lse, delta, shift=shift, scale=scale, merge=index > 0
            )
            writer.copy_back(index, buffers)
    return dq.to(q.dtype), k_gradients, v_gradients


def _empty_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Allocate the gradient of each tensor on the same device, pinned if the tensor is."""
    return [
        torch.empty(
            tensor.shape, dtype=tensor.dtype, device=tensor.device, pin_memory=not tensor.is_cuda and tensor.is_pinned()
        )
        for tensor in tensors
    ]


# ---------------------------------------------------------------- custom operations: log-sum-exp


@custom_op("stoker::attention_lse")
def _attention_lse(
    q: Tensor, k: Sequence[Tensor], causal: bool, scale: float, chunk_size: int, k_offset: int, total_keys: int
) -> Tensor:
    return chunked_lse(q, k, causal, scale, chunk_size, k_offset, total_keys)


@torch.library.register_fake("stoker::attention_lse")
def _(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=_wide_like(q))


@custom_op("stoker::attention_lse_backward")
def _attention_lse_backward(
    lse_gradient: Tensor,
    q: Tensor,
    k: Sequence[Tensor],
    lse: Tensor,
    causal: bool,
    scale: float,
    chunk_size: int,
    k_offset: int,
    total_keys: int,
) -> tuple[Tensor, list[Tensor]]:
    # the backward of attention with an output gradient of 0, with which the values (here the keys) have no effect
    out_gradient = torch.zeros_like(q)
    delta = lse_gradient.neg().contiguous()
    dq, dk, _ = _gradients(q, k, k, out_gradient, lse, delta, causal, scale, chunk_size, k_offset, total_keys)
    return dq, dk


@torch.library.register_fake("stoker::attention_lse_backward")
def _(lse_gradient: Tensor, q: Tensor, k: Sequence[Tensor], *_: Any) -> tuple[Tensor, list[Tensor]]:
    return q.new_empty(q.shape), [tensor.new_empty(tensor.shape) for tensor in k]


def _save_for_lse(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, *ctx.settings = inputs
    ctx.save_for_backward(q, output, *k)


def _lse_gradients(ctx: Any, lse_gradient: Tensor) -> tuple[Any, ...]:
    q, lse, *k = ctx.saved_tensors
    dq, dk = _attention_lse_backward(lse_gradient, q, k, lse, *ctx.settings)
    return dq, dk, None, None, None, None, None


torch.library.register_autograd("stoker::attention_lse", _lse_gradients, setup_context=_save_for_lse)


# ---------------------------------------------------------------- custom operations: attention


@custom_op("stoker::lse_first_attention")
def _lse_first_attention(
    q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], causal: bool, scale: float, chunk_size: int
) -> tuple[Tensor, Tensor]:
    total_keys = sum(_lengths(k))
    lse = chunked_lse(q, k, causal, scale, chunk_size, 0, total_keys)
    chunks = split_into_chunks(_lengths(k), chunk_size) if q.numel() else []
    if not chunks:
        return q.new_zeros(q.shape), lse
    # several chunks are summed in the accumulation dtype
    out = torch.empty(q.shape, dtype=_wide_like(q) if len(chunks) > 1 else q.dtype, device=q.device)
    on_device = prefetch_chunks([(chunk.slice(k), chunk.slice(v)) for chunk in chunks], q.device)
    for index, (chunk, (keys, values)) in enumerate(zip(chunks, on_device, strict=True)):
        shift = _shift(causal, q, total_keys, chunk.offset)
        _stages(q).output_of_chunk_(out, q, keys, values, lse, shift=shift, scale=scale, merge=index > 0)
    return out.to(q.dtype), lse


@torch.library.register_fake("stoker::lse_first_attention")
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=_wide_like(q))


@custom_op("stoker::lse_first_attention_backward")
def _lse_first_attention_backward(
    out_gradient: Tensor,
    lse_gradient: Tensor | None,
    q: Tensor,
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    delta = _stages(q).delta_of(out, out_gradient, lse, lse_gradient) if q.numel() else lse
    return _gradients(q, k, v, out_gradient, lse, delta, causal, scale, chunk_size, 0, sum(_lengths(k)))


@torch.library.register_fake("stoker::lse_first_attention_backward")
def _(
    out_gradient: Tensor, lse_gradient: Tensor | None, q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], *_: Any
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    def like(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.new_empty(tensor.shape) for tensor in tensors]

    return q.new_empty(q.shape), like(k), like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.settings = inputs
    ctx.tensors = len(k)
    ctx.save_for_backward(q, *output, *k, *v)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, out_gradient: Tensor | None, lse_gradient: Tensor | None) -> tuple[Any, ...]:
    q, out, lse, *kv = ctx.saved_tensors
    k, v = kv[: ctx.tensors], kv[ctx.tensors :]
    if out_gradient is None:
        out_gradient = torch.zeros_like(out)
    gradients = _lse_first_attention_backward(out_gradient, lse_gradient, q, k, v, out, lse, *ctx.settings)
    return *gradients, None, None, None


torch.library.register_autograd("stoker::lse_first_attention", _backward, setup_context=_save)


# ---------------------------------------------------------------- FLOPs


def _product_flops(q: Shape, k: Sequence[Shape]) -> int:
    """Return the FLOPs of one product of queries and all keys; causal masks are ignored, as in PyTorch's formulas."""
    batch, queries, heads, head_dim = q
    return 2 * batch * heads * queries * sum(shape[1] for shape in k) * head_dim


@register_flop_formula(torch.ops.stoker.attention_lse)
def _(q: Shape, k: Sequence[Shape], *_: Any, **__: Any) -> int:
    return _product_flops(q, k)


@register_flop_formula(torch.ops.stoker.attention_lse_backward)
def _(lse_gradient: Shape, q: Shape, k: Sequence[Shape], *_: Any, **__: Any) -> int:
    return 7 * _product_flops(q, k)


@register_flop_formula(torch.ops.stoker.lse_first_attention)
def _(q: Shape, k: Sequence[Shape], *_: Any, **__: Any) -> int:
    return 3 * _product_flops(q, k)


@register_flop_formula(torch.ops.stoker.lse_first_attention_backward)
def _(out_gradient: Shape, lse_gradient: Shape | None, q: Shape, k: Sequence[Shape], *_: Any, **__: Any) -> int:
    return 7 * _product_flops(q, k)


# ---------------------------------------------------------------- public functions


def _checked(
    q: Tensor,
    k: Tensor | Sequence[Tensor],
    v: Tensor | Sequence[Tensor],
    causal: bool,
    softmax_scale: float | None,
    chunk_size: int | None,
) -> tuple[list[Tensor], list[Tensor], float]:
    """Check the arguments; return keys and values as lists, and the scale."""
    keys, values = ([t] if isinstance(t, Tensor) else list(t) for t in (k, v))
    if not keys or len(keys) != len(values):
        raise ValueError(f"`v` ({len(values)} tensors) must have as many chunks as `k` ({len(keys)}), one at least.")
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"`chunk_size` ({chunk_size}) must be a number of keys from 1 on, or None for whole tensors.")
    device = keys[0].device
    if device != q.device and (device.type, q.device.type) != ("cpu", "cuda"):
        raise ValueError(
            f"`k` ({device}) must be on the device of `q` ({q.device}), or on the CPU when `q` is on a GPU."
        )
    scale = 0.0
    for key, value in zip(keys, values, strict=True):
        for name, tensor in (("k", key), ("v", value)):
            if tensor.device != device:
                raise ValueError(
                    f"every chunk of `k` and `v` must be on {device}, but one of `{name}` is on {tensor.device}."
                )
        # placeholders on the device of the queries, since only shapes and dtypes are checked
        placeholders = [q.new_empty(1, dtype=tensor.dtype).expand(tensor.shape) for tensor in (key, value)]
        inputs = AttentionInputs(q, *placeholders, causal=causal, softmax_scale=softmax_scale)
        geometry = check_arguments(inputs)
        check_same_width(inputs)
        scale = geometry.scale
        if key.shape[2] != keys[0].shape[2]:
            raise ValueError(
                f"every chunk of `k` must have the same heads ({keys[0].shape[2]}), but one has {key.shape[2]}."
            )
    return keys, values, scale


def attention_lse(
    q: Tensor,
    k: Tensor | Sequence[Tensor],
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    chunk_size: int | None = None,
    k_offset: int = 0,
    total_keys: int | None = None,
) -> Tensor:
    """Compute log(sum(exp(scale * q k^T))) over the keys, chunk by chunk: stage 1 of LSE-first attention.

    Costs one product of queries and keys, half of an attention forward. Log-sum-exps over parts of the keys, located in
    the sequence by `k_offset` and `total_keys`, can be merged with `torch.logaddexp`.

    Args:
        q: (batch, queries, heads, head_dim), bf16, fp16 or fp32 (fp64 on a CPU); head_dim 16 to 256 in steps of 8.
        k: (batch, keys, groups, head_dim), query head h uses group h // (heads / groups); on the device of `q` or, for
            `q` on a GPU, on the host, pinned for speed; or a list of such tensors, concatenated along the keys.
        causal: query i attends to keys 0 to i + total_keys - queries only (bottom-right aligned).
        softmax_scale: factor of the scores; None is 1 / sqrt(head_dim).
        chunk_size: keys per chunk; None uses each tensor as one chunk. Results differ in rounding only.
        k_offset: number of keys of the sequence before those of `k`.
        total_keys: keys of the whole sequence; None for `k_offset` plus the keys of `k`.

    Returns:
        (batch, heads, queries) fp32 (fp64 for fp64), natural logarithm, -inf for fully masked queries. Differentiable
        once in `q` and `k`; gradients of host tensors are host tensors.

    Raises:
        ValueError: invalid shapes, dtypes, devices or numbers.
    """
    keys, _, scale = _checked(q, k, k, causal, softmax_scale, chunk_size)
    given = k_offset + sum(_lengths(keys))
    if k_offset < 0 or (total_keys is not None and total_keys < given):
        raise ValueError(
            f"`total_keys` ({total_keys}) must be at least `k_offset` ({k_offset}, not negative) plus the keys of "
            f"`k` ({given - k_offset})."
        )
    return _attention_lse(
        q, keys, causal, scale, chunk_size or 0, k_offset, given if total_keys is None else total_keys
    )


def lse_first_attention(
    q: Tensor,
    k: Tensor | Sequence[Tensor],
    v: Tensor | Sequence[Tensor],
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    chunk_size: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention in three stages: log-sum-exp of the scores, then the output, then gradients that reuse it.

    With the log-sum-exp known, each chunk of keys contributes exp(score - lse) v to the output without rescaling, so
    contributions can be summed in any order. The forward costs a third product (6 instead of 4 units of FLOPs; q k^T is
    computed in both stages); the backward is that of flash attention. Useful if keys come in chunks: keys and values
    that exceed device memory and are streamed from the host while the kernels run, or that other ranks hold; and if a
    log-sum-exp was saved, so that the output is recomputed without stage 1. If the keys fit on the device,
    `flash_attention` is faster.

    Args:
        q: (batch, queries, heads, head_dim), bf16, fp16 or fp32 (fp64 on a CPU); head_dim 16 to 256 in steps of 8.
        k: (batch, keys, groups, head_dim), query head h uses group h // (heads / groups); on the device of `q` or, for
            `q` on a GPU, on the host, pinned for speed; or a list of such tensors, concatenated along the keys.
        v: like `k`, split at the same keys.
        causal: query i attends to keys 0 to i + keys - queries only (bottom-right aligned).
        softmax_scale: factor of the scores; None is 1 / sqrt(head_dim).
        chunk_size: keys per chunk; None uses each tensor as one chunk. With host tensors, twice that many keys and
            values (and gradients) are on the device. Results differ in rounding only.
        return_lse: also return the log-sum-exp.

    Returns:
        Output like `q`, 0 for fully masked queries. With `return_lse` also the log-sum-exp, (batch, heads, queries)
        fp32 (fp64 for fp64), natural logarithm, -inf for fully masked queries. Both are differentiable once; gradients
        of host tensors are host tensors, for which the backward synchronizes. Results are bitwise reproducible.

    Raises:
        ValueError: invalid shapes, dtypes, devices or numbers.
    """
    keys, values, scale = _checked(q, k, v, causal, softmax_scale, chunk_size)
    out, lse = _lse_first_attention(q, keys, values, causal, scale, chunk_size or 0)
    return (out, lse) if return_lse else out
