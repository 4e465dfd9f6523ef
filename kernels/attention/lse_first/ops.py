"""LSE-first attention: custom operations and public functions."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...launch import INTERPRETED, triton_runs_on
from ..argument_checks import check_arguments
from . import eager_stages, triton_stages
from .chunks import Returned, chunks_of, fetched

Shape = Sequence[int]


def _stages(q: Tensor) -> ModuleType:
    """The module whose stages serve `q`: Triton on a GPU and in the interpreter, plain torch elsewhere."""
    return triton_stages if triton_runs_on(q) or (INTERPRETED and q.device.type == "cpu") else eager_stages


def _lengths(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.shape[1] for tensor in tensors]


def _shift(causal: bool, q: Tensor, total_keys: int, offset: int) -> int | None:
    """Query i sees key j of the chunk that begins at key `offset` where j <= i + shift; None: all of them."""
    return total_keys - q.shape[1] - offset if causal else None


def _wide_like(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


# ---------------------------------------------------------------- the stages over all chunks


def log_sum_exps(
    q: Tensor, k: Sequence[Tensor], causal: bool, scale: float, chunk_size: int, k_offset: int, total_keys: int
) -> Tensor:
    """Stage 1 over all chunks."""
    lse = torch.full(
        (q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=_wide_like(q), device=q.device
    )  # also what no chunk reaches
    if not q.numel():
        return lse
    chunks = chunks_of(_lengths(k), chunk_size)
    held = fetched([(chunk.of(k),) for chunk in chunks], q.device)
    for number, (chunk, (keys,)) in enumerate(zip(chunks, held, strict=True)):
        shift = _shift(causal, q, total_keys, k_offset + chunk.offset)
        _stages(q).lse_of_chunk_(lse, q, keys, shift=shift, scale=scale, merge=number > 0)
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
    """Stage 3 over all chunks."""
    k_gradients, v_gradients = _rooms_like(k), _rooms_like(v)
    chunks = chunks_of(_lengths(k), chunk_size) if q.numel() else []
    if not chunks:
        for gradient in (*k_gradients, *v_gradients):
            gradient.zero_()
        return q.new_zeros(q.shape), k_gradients, v_gradients
    # parts of several chunks add up in the dtype of the arithmetic
    dq = torch.empty(q.shape, dtype=_wide_like(q) if len(chunks) > 1 else q.dtype, device=q.device)
    held = fetched([(chunk.of(k), chunk.of(v)) for chunk in chunks], q.device)
    targets = [(chunk.of(k_gradients), chunk.of(v_gradients)) for chunk in chunks]
    with Returned(targets, q.device) as returned:
        for number, (chunk, (keys, values)) in enumerate(zip(chunks, held, strict=True)):
            dk, dv = room = returned.room(number)
            shift = _shift(causal, q, total_keys, k_offset + chunk.offset)
            _stages(q).gradients_of_chunk_(
                dq, dk, dv, q, keys, values, out_gradient, lse, delta, shift=shift, scale=scale, merge=number > 0
            )
            returned.send(number, room)
    return dq.to(q.dtype), k_gradients, v_gradients


def _rooms_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Room for a gradient of each tensor, where it lies; pinned if it is."""
    return [
        torch.empty(
            tensor.shape, dtype=tensor.dtype, device=tensor.device, pin_memory=not tensor.is_cuda and tensor.is_pinned()
        )
        for tensor in tensors
    ]


# ---------------------------------------------------------------- custom operations: log-sum-exp


@torch.library.custom_op("stoker::attention_lse", mutates_args=())
def _attention_lse(
    q: Tensor, k: Sequence[Tensor], causal: bool, scale: float, chunk_size: int, k_offset: int, total_keys: int
) -> Tensor:
    return log_sum_exps(q, k, causal, scale, chunk_size, k_offset, total_keys)


@_attention_lse.register_fake
def _(
    q: Tensor, k: Sequence[Tensor], causal: bool, scale: float, chunk_size: int, k_offset: int, total_keys: int
) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=_wide_like(q))


@torch.library.custom_op("stoker::attention_lse_backward", mutates_args=())
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
    # attention whose output has no gradient: the keys stand in for values, which then count nothing
    nothing = torch.zeros_like(q)
    delta = lse_gradient.neg().contiguous()
    dq, dk, _ = _gradients(q, k, k, nothing, lse, delta, causal, scale, chunk_size, k_offset, total_keys)
    return dq, dk


@_attention_lse_backward.register_fake
def _(
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
    return q.new_empty(q.shape), [tensor.new_empty(tensor.shape) for tensor in k]


def _save_for_lse(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, *ctx.settings = inputs
    ctx.save_for_backward(q, output, *k)


def _lse_gradients(ctx: Any, lse_gradient: Tensor) -> tuple[Any, ...]:
    q, lse, *k = ctx.saved_tensors
    dq, dk = _attention_lse_backward(lse_gradient, q, k, lse, *ctx.settings)
    return dq, dk, None, None, None, None, None


_attention_lse.register_autograd(_lse_gradients, setup_context=_save_for_lse)


# ---------------------------------------------------------------- custom operations: attention


@torch.library.custom_op("stoker::lse_first_attention", mutates_args=())
def _lse_first_attention(
    q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], causal: bool, scale: float, chunk_size: int
) -> tuple[Tensor, Tensor]:
    total_keys = sum(_lengths(k))
    lse = log_sum_exps(q, k, causal, scale, chunk_size, 0, total_keys)
    chunks = chunks_of(_lengths(k), chunk_size) if q.numel() else []
    if not chunks:
        return q.new_zeros(q.shape), lse
    # parts of several chunks add up in the dtype of the arithmetic
    out = torch.empty(q.shape, dtype=_wide_like(q) if len(chunks) > 1 else q.dtype, device=q.device)
    held = fetched([(chunk.of(k), chunk.of(v)) for chunk in chunks], q.device)
    for number, (chunk, (keys, values)) in enumerate(zip(chunks, held, strict=True)):
        shift = _shift(causal, q, total_keys, chunk.offset)
        _stages(q).output_of_chunk_(out, q, keys, values, lse, shift=shift, scale=scale, merge=number > 0)
    return out.to(q.dtype), lse


@_lse_first_attention.register_fake
def _(
    q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], causal: bool, scale: float, chunk_size: int
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=_wide_like(q))


@torch.library.custom_op("stoker::lse_first_attention_backward", mutates_args=())
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


@_lse_first_attention_backward.register_fake
def _(
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


_lse_first_attention.register_autograd(_backward, setup_context=_save)


# ---------------------------------------------------------------- matrix products, for the FLOP counter


def _products(q: Shape, k: Sequence[Shape]) -> int:
    """FLOPs of one product of queries and all keys; a causal mask is not counted, as in torch's own formulas."""
    batch, queries, heads, head_dim = q
    return 2 * batch * heads * queries * sum(shape[1] for shape in k) * head_dim


@register_flop_formula(torch.ops.stoker.attention_lse)
def _(q: Shape, k: Sequence[Shape], *_: Any, **__: Any) -> int:
    return _products(q, k)


@register_flop_formula(torch.ops.stoker.attention_lse_backward)
def _(lse_gradient: Shape, q: Shape, k: Sequence[Shape], *_: Any, **__: Any) -> int:
    return 7 * _products(q, k)


@register_flop_formula(torch.ops.stoker.lse_first_attention)
def _(q: Shape, k: Sequence[Shape], *_: Any, **__: Any) -> int:
    return 3 * _products(q, k)


@register_flop_formula(torch.ops.stoker.lse_first_attention_backward)
def _(out_gradient: Shape, lse_gradient: Shape | None, q: Shape, k: Sequence[Shape], *_: Any, **__: Any) -> int:
    return 7 * _products(q, k)


# ---------------------------------------------------------------- public functions


def _checked(
    q: Tensor,
    k: Tensor | Sequence[Tensor],
    v: Tensor | Sequence[Tensor],
    causal: bool,
    softmax_scale: float | None,
    chunk_size: int | None,
) -> tuple[list[Tensor], list[Tensor], float]:
    """Keys and values as lists and the scale, or ValueError."""
    keys, values = ([t] if isinstance(t, Tensor) else list(t) for t in (k, v))
    if not keys or len(keys) != len(values):
        raise ValueError(f"`v` ({len(values)} tensors) must have as many chunks as `k` ({len(keys)}), one at least.")
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"`chunk_size` ({chunk_size}) must be a number of keys from 1 on, or None for whole tensors.")
    home = keys[0].device
    if home != q.device and (home.type, q.device.type) != ("cpu", "cuda"):
        raise ValueError(f"`k` ({home}) must be on the device of `q` ({q.device}), or on the CPU when `q` is on a GPU.")
    scale = 0.0
    for key, value in zip(keys, values, strict=True):
        for name, tensor in (("k", key), ("v", value)):
            if tensor.device != home:
                raise ValueError(
                    f"every chunk of `k` and `v` must be on {home}, but one of `{name}` is on {tensor.device}."
                )
        # stand-ins on the device of the queries: shapes and dtypes are what is checked
        here = [q.new_empty(1, dtype=tensor.dtype).expand(tensor.shape) for tensor in (key, value)]
        geometry = check_arguments(q, *here, causal=causal, softmax_scale=softmax_scale)
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
    """Stage 1 of LSE-first attention: log(sum(exp(scale * q k))) over the keys, chunk by chunk.

    It costs one product of queries and keys, half of an attention forward. Log-sum-exps over parts of the keys, which
    `k_offset` and `total_keys` place in the sequence, merge by `torch.logaddexp`.

    Args:
        q: (batch, queries, heads, head_dim), bf16, fp16 or fp32 (fp64 on a CPU); head_dim 16 to 256 in steps of 8.
        k: (batch, keys, groups, head_dim), query head h reads group h // (heads / groups); on the device of `q` or, for
            `q` on a GPU, on the host, pinned for speed; or a list of such tensors, which follow each other.
        causal: query i sees keys 0 to i + total_keys - queries only (bottom-right aligned).
        softmax_scale: factor of the scores; None is 1 / sqrt(head_dim).
        chunk_size: keys taken at once; None takes each tensor whole. Results differ in rounding only.
        k_offset: keys of the sequence that come before those of `k`.
        total_keys: keys of the whole sequence; None: `k_offset` and those of `k`.

    Returns:
        (batch, heads, queries) fp32 (fp64 for fp64), natural logarithm, -inf where a query sees none of the keys.
        Differentiable once in `q` and `k`; gradients of host tensors are host tensors.

    Raises:
        ValueError: shapes, dtypes, devices or numbers do not fit.
    """
    keys, _, scale = _checked(q, k, k, causal, softmax_scale, chunk_size)
    given = k_offset + sum(_lengths(keys))
    if k_offset < 0 or (total_keys is not None and total_keys < given):
        raise ValueError(
            f"`total_keys` ({total_keys}) must hold `k_offset` ({k_offset}, from 0 on) and the keys of `k` "
            f"({given - k_offset})."
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
    """Attention in three stages: log-sum-exps of the scores, then the output, then gradients that reuse them.

    With the log-sum-exp known, each chunk of keys gives exp(score - lse) v to the output and nothing is ever rescaled:
    parts add up in any order. The price is a third product in the forward (6 instead of 4 units of FLOPs; `q k` is
    computed in both stages), the backward is that of flash attention. It wins where keys come in chunks: keys and
    values beyond the memory of the device, which stream from the host while the kernels work, or that other ranks
    hold; and where a log-sum-exp was kept, so that the output is recomputed in one pass without stage 1. For keys that
    fit on the device `flash_attention` is faster.

    Args:
        q: (batch, queries, heads, head_dim), bf16, fp16 or fp32 (fp64 on a CPU); head_dim 16 to 256 in steps of 8.
        k: (batch, keys, groups, head_dim), query head h reads group h // (heads / groups); on the device of `q` or, for
            `q` on a GPU, on the host, pinned for speed; or a list of such tensors, which follow each other.
        v: like `k`, cut in the same places.
        causal: query i sees keys 0 to i + keys - queries only (bottom-right aligned).
        softmax_scale: factor of the scores; None is 1 / sqrt(head_dim).
        chunk_size: keys taken at once; None takes each tensor whole. From the host, twice that many keys and values
            (and gradients) lie on the device. Results differ in rounding only.
        return_lse: return the log-sum-exp too.

    Returns:
        Output like `q`; a query that sees no key gives 0. With `return_lse` also the log-sum-exp, (batch, heads,
        queries) fp32 (fp64 for fp64), natural logarithm, -inf there. Both are differentiable once; gradients of host
        tensors are host tensors, and the backward waits for them. Equal calls give equal bits.

    Raises:
        ValueError: shapes, dtypes, devices or numbers do not fit.
    """
    keys, values, scale = _checked(q, k, v, causal, softmax_scale, chunk_size)
    out, lse = _lse_first_attention(q, keys, values, causal, scale, chunk_size or 0)
    return (out, lse) if return_lse else out
