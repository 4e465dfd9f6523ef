"""Argument checks of the attention functions; each error names the argument, its value and the rule.

Nothing here synchronizes: only shape, dtype and device of GPU tensors are checked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .inputs import AttentionInputs

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
_PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


class AttentionGeometry(NamedTuple):
    """Sizes and resolved options of a checked call.

    Attributes:
        batch: number of sequences.
        heads: query heads.
        groups: key and value heads; divides `heads`.
        head_dim: width of a query or key head.
        value_dim: width of a value head.
        queries: query length; `max_seqlen_q` when packed.
        keys: key length; `max_seqlen_k` when packed.
        packed: tensors are (total, heads, head_dim), with `cu_seqlens_q` and `cu_seqlens_k`.
        scale: factor of the scores.
        left: keys visible before a query, -1 for all.
        right: keys visible after a query, -1 for all; 0 when causal.
        chunk: tokens of a chunk of keys that a query sees, 0 for one chunk.
    """

    batch: int
    heads: int
    groups: int
    head_dim: int
    value_dim: int
    queries: int
    keys: int
    packed: bool
    scale: float
    left: int
    right: int
    chunk: int


def check_arguments(inputs: AttentionInputs, *, for_kernel: bool = True) -> AttentionGeometry:
    """Check the arguments of `flash_attention`, `reference_attention` and related functions.

    The values of `cu_seqlens_q` and `cu_seqlens_k` are checked on a CPU only: reading them from a GPU synchronizes.

    Args:
        inputs: without `packed`.
        for_kernel: also check the limits of the Triton kernels: dtype and head width.

    Returns:
        The sizes of the call, with `causal` folded into the window.

    Raises:
        ValueError: an argument is invalid; the message names it, its value, the rule and a fix.
    """
    q, k, v = inputs[:3]
    packed = _check_packed_is_whole(inputs)
    _check_tensors(q, k, v, packed)
    heads, head_dim = q.shape[-2:]
    groups, value_dim = v.shape[-2:]
    if for_kernel:
        _check_kernel_limits(q, v)
    if packed:
        cu_seqlens_q, cu_seqlens_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
        assert cu_seqlens_q is not None
        assert cu_seqlens_k is not None
        queries = _check_max_seqlen("max_seqlen_q", inputs.max_seqlen_q)
        keys = _check_max_seqlen("max_seqlen_k", inputs.max_seqlen_k)
        _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q, "q", "max_seqlen_q", queries)
        _check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, k, "k", "max_seqlen_k", keys)
        if cu_seqlens_q.shape != cu_seqlens_k.shape:
            raise ValueError(
                f"`cu_seqlens_k` ({cu_seqlens_k.shape[0]} entries) must have as many entries as `cu_seqlens_q` "
                f"({cu_seqlens_q.shape[0]}); both count the same sequences."
            )
        batch = cu_seqlens_q.shape[0] - 1
    else:
        batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    _check_masks_and_biases(inputs, (batch, heads, queries, keys), packed)
    scale = _check_numbers(inputs)
    _check_dropout(q, inputs.dropout_p, inputs.rng)
    left, right = (-1, -1) if inputs.window_size is None else _check_window(inputs.window_size)
    # a window that covers the whole sequences is dropped, so that the same kernel runs with bitwise equal results
    left = -1 if left >= keys - 1 else left
    right = 0 if inputs.causal else (-1 if right >= queries - 1 else right)
    chunk = _check_chunk(inputs)
    chunk = 0 if chunk >= keys else chunk
    return AttentionGeometry(
        batch, heads, groups, head_dim, value_dim, queries, keys, packed, scale, left, right, chunk
    )


def check_same_width(inputs: AttentionInputs) -> None:
    """Check that value heads are as wide as keys, for functions that need it.

    Raises:
        ValueError: they are not.
    """
    k, v = inputs.k, inputs.v
    if v.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"`v` {_shape(v)} must have the head width of `k`, {k.shape[-1]}, not {v.shape[-1]}; use `triton` or "
            "`unfused`."
        )


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _check_packed_is_whole(inputs: AttentionInputs) -> bool:
    present = [name for name in _PACKED if getattr(inputs, name) is not None]
    if present and len(present) < len(_PACKED):
        missing = next(name for name in _PACKED if name not in present)
        raise ValueError(
            f"`{missing}` (None) must be given with `{present[0]}`; packed sequences need all of "
            f"{', '.join(_PACKED)}, and dense tensors none."
        )
    return bool(present)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    layout = "(total, heads, head_dim)" if packed else "(batch, tokens, heads, head_dim)"
    rank = 3 if packed else 4
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != rank:
            hint = "with" if packed else "without"
            raise ValueError(
                f"`{name}` {_shape(tensor)} must have {rank} dimensions, {layout}, {hint} `cu_seqlens_q`; reshape it."
            )
        if tensor.dtype != q.dtype:
            raise ValueError(f"`{name}` ({tensor.dtype}) must have the dtype of `q` ({q.dtype}); convert one of them.")
        if tensor.device != q.device:
            raise ValueError(f"`{name}` ({tensor.device}) must be on the device of `q` ({q.device}); move one of them.")
    if q.dtype not in DTYPES:
        raise ValueError(f"`q` ({q.dtype}) must be bfloat16, float16, float32 or float64; convert q, k and v.")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"`v` {_shape(v)} must have the shape of `k` {_shape(k)}, apart from the head width.")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"`k` {_shape(k)} must have the head width of `q`, {q.shape[-1]}, not {k.shape[-1]}.")
    if not packed and k.shape[0] != q.shape[0]:
        raise ValueError(f"`k` {_shape(k)} must have the batch of `q`, {q.shape[0]}, not {k.shape[0]}.")
    heads, groups = q.shape[-2], k.shape[-2]
    if heads < 1 or groups < 1 or heads % groups:
        raise ValueError(
            f"`q` ({heads} heads) must have a multiple of the heads of `k` and `v` ({groups}), one at least; repeat or "
            "drop heads."
        )
    for name, tensor in (("q", q), ("v", v)):
        if tensor.shape[-1] < 1:
            raise ValueError(f"`{name}` {_shape(tensor)} must have heads at least 1 wide.")


def _check_kernel_limits(q: Tensor, v: Tensor) -> None:
    if q.dtype == torch.float64 and q.device.type != "cpu":  # Triton's interpreter, on a CPU, supports fp64
        raise ValueError(
            f"`q` ({q.dtype}) must be bfloat16, float16 or float32 on {q.device}; convert q, k and v, or use "
            "`reference_attention`."
        )
    for name, tensor in (("q", q), ("v", v)):
        width = tensor.shape[-1]
        if not MIN_HEAD_DIM <= width <= MAX_HEAD_DIM or width % 8:
            raise ValueError(
                f"`{name}` {_shape(tensor)} must have heads {MIN_HEAD_DIM} to {MAX_HEAD_DIM} wide, in steps of 8, not "
                f"{width}; pad q, k and v with zeros and give `softmax_scale`."
            )


def _check_max_seqlen(name: str, value: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise ValueError(
            f"`{name}` ({type(value).__name__}) must be an int, not a tensor on the device; an upper bound is enough."
        )
    if value < 0:
        raise ValueError(f"`{name}` ({value}) must not be negative; give the length of the longest sequence.")
    return int(value)


def _check_cu_seqlens(
    name: str, cu_seqlens: Tensor, tensor: Tensor, tensor_name: str, max_seqlen_name: str, max_seqlen: int
) -> None:
    if cu_seqlens.dtype != torch.int32:
        raise ValueError(f"`{name}` ({cu_seqlens.dtype}) must be int32; convert it with `.int()`.")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(
            f"`{name}` {_shape(cu_seqlens)} must have one dimension of (sequences + 1) entries: 0, then the end of "
            "each sequence."
        )
    if cu_seqlens.device != tensor.device:
        raise ValueError(
            f"`{name}` ({cu_seqlens.device}) must be on the device of `{tensor_name}` ({tensor.device}); move it."
        )
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling() or type(cu_seqlens) is not Tensor:
        return
    ends: list[int] = cu_seqlens.tolist()
    if ends[0] != 0:
        raise ValueError(f"`{name}` must begin with 0, not {ends[0]}.")
    for sequence, (start, end) in enumerate(pairwise(ends)):
        if end < start:
            raise ValueError(f"`{name}` must not decrease, but entry {sequence + 1} is {end} after {start}.")
        if end - start > max_seqlen:
            raise ValueError(
                f"`{max_seqlen_name}` ({max_seqlen}) must not be less than any sequence's length, but sequence "
                f"{sequence} has {end - start} tokens."
            )
    if ends[-1] > tensor.shape[0]:
        raise ValueError(
            f"`{name}` must end within `{tensor_name}` ({tensor.shape[0]} tokens), but ends at {ends[-1]}."
        )


def _check_masks_and_biases(inputs: AttentionInputs, full: tuple[int, int, int, int], packed: bool) -> None:
    """Check the biases and the padding mask; `full` is the shape of the scores, (batch, heads, queries, keys)."""
    q, _, _, bias, distance_bias, alibi_slopes, sinks, key_padding_mask = inputs[:8]
    if all(tensor is None for tensor in inputs[3:8]):
        return
    batch, heads, _, keys = full
    accumulate = torch.promote_types(q.dtype, torch.float32)
    for name in ("bias", "distance_bias", "alibi_slopes", "sinks", "key_padding_mask"):
        tensor = getattr(inputs, name)
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"`{name}` ({tensor.device}) must be on the device of `q` ({q.device}); move it.")
    if bias is not None:
        if packed:
            raise ValueError(
                f"`bias` {_shape(bias)} must be None with `cu_seqlens_q`: packed sequences do not support a dense "
                "bias; use `distance_bias` or dense tensors."
            )
        if bias.dtype not in (q.dtype, accumulate):
            raise ValueError(f"`bias` ({bias.dtype}) must be {q.dtype}, as `q`, or {accumulate}; convert it.")
        fits = bias.dim() <= 4 and all(
            size == 1 or size == full_size  # not `in`, which compares symbolic sizes by identity
            for size, full_size in zip(reversed(bias.shape), reversed(full), strict=False)
        )
        if not fits:
            raise ValueError(
                f"`bias` {_shape(bias)} must broadcast to (batch, heads, queries, keys) = {full}: each dimension, from "
                "the last, 1 or that size."
            )
    if distance_bias is not None:
        if distance_bias.dtype not in (torch.float32, accumulate):
            raise ValueError(f"`distance_bias` ({distance_bias.dtype}) must be float32; convert it with `.float()`.")
        shape = distance_bias.shape
        if len(shape) != 2 or shape[0] != heads or shape[1] < 3 or shape[1] % 2 == 0:
            raise ValueError(
                f"`distance_bias` {_shape(distance_bias)} must be (heads, 2 R + 1) with {heads} heads and R >= 1: one "
                "value for each distance from -R to R."
            )
    for name, per_head in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if per_head is None:
            continue
        if per_head.dtype not in (torch.float32, accumulate):
            raise ValueError(f"`{name}` ({per_head.dtype}) must be float32; convert them with `.float()`.")
        if per_head.shape != (heads,):
            raise ValueError(f"`{name}` {_shape(per_head)} must be (heads,) = ({heads},): one per query head.")
    if key_padding_mask is not None:
        if packed:
            raise ValueError("`key_padding_mask` must be None with `cu_seqlens_k`: packed sequences have no padding.")
        if key_padding_mask.dtype != torch.bool:
            raise ValueError(
                f"`key_padding_mask` ({key_padding_mask.dtype}) must be bool, False for padding; convert it with "
                "`.bool()`."
            )
        if key_padding_mask.shape != (batch, keys):
            raise ValueError(
                f"`key_padding_mask` {_shape(key_padding_mask)} must be (batch, keys) = ({batch}, {keys})."
            )


def _check_numbers(inputs: AttentionInputs) -> float:
    scale = inputs.scale if inputs.softmax_scale is None else float(inputs.softmax_scale)
    softcap = inputs.softcap
    # comparisons instead of math.isfinite: torch.compile can trace them with symbolic numbers, and NaN fails them
    if not -math.inf < scale < math.inf:
        raise ValueError(f"`softmax_scale` ({inputs.softmax_scale}) must be finite; None is 1 / sqrt(head_dim).")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"`softcap` ({softcap}) must be 0, for none, or a positive number.")
    return scale


def _check_dropout(q: Tensor, dropout_p: float, rng: Tensor | None) -> None:
    if not 0 <= dropout_p < 1:
        raise ValueError(f"`dropout_p` ({dropout_p}) must be at least 0 and less than 1.")
    if rng is None:
        if dropout_p:
            raise ValueError(
                f"`rng` (None) must be given with `dropout_p` ({dropout_p}): an int64 tensor (2,) on {q.device}."
            )
        return
    if rng.dtype != torch.int64 or rng.shape not in ((2,), (5,)):
        raise ValueError(f"`rng` ({rng.dtype} {_shape(rng)}) must be an int64 tensor of shape (2,) or (5,).")
    if rng.device != q.device:
        raise ValueError(f"`rng` ({rng.device}) must be on the device of `q` ({q.device}); move it.")


def _check_chunk(inputs: AttentionInputs) -> int:
    chunk = inputs.attention_chunk
    if isinstance(chunk, bool) or not isinstance(chunk, (int, torch.SymInt)) or chunk < 0:
        raise ValueError(f"`attention_chunk` ({chunk}) must be a number of tokens, or 0 for one chunk.")
    if chunk and not inputs.causal:
        raise ValueError(f"`attention_chunk` ({chunk}) must be 0 without `causal`.")
    return int(chunk)


def _check_window(window_size: Sequence[int]) -> tuple[int, int]:
    is_pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not is_pair or any(isinstance(side, bool) or not isinstance(side, int) or side < -1 for side in window_size):
        raise ValueError(
            f"`window_size` ({window_size}) must be two whole numbers, keys to the left and to the right of a query, "
            "-1 for all."
        )
    return window_size[0], window_size[1]
