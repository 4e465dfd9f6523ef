"""Drop-in replacements of the functions of flash-attn 2, with the same arguments in the same order.

`from stoker.kernels.compat import flash_attn_func` replaces `from flash_attn import flash_attn_func`. Additionally
supported: fp32 tensors, softcap together with dropout, gradients of log-sum-exps and ALiBi slopes. Not supported:
`block_table`.

Arguments that all functions share:

- `dropout_p`: the mask is seeded from torch's generator of the device, so it is reproducible by `torch.manual_seed`.
- `softmax_scale`: None is 1 / sqrt(head_dim).
- `causal`, `window_size`: bottom-right aligned; keys to the left and right of a query, inclusive, -1 for all.
- `softcap`: cap * tanh(score / cap), 0 for none.
- `alibi_slopes`: fp32 (heads,) or (batch, heads); -slope * |i + keys - queries - j| is added to the score of query i
  and key j. Differentiable where `requires_grad` is set.
- `deterministic`: gradients are deterministic with and without it.
- `return_attn_probs`: return (out, softmax_lse, None): the natural log-sum-exps, fp32 (batch, heads, queries) or packed
  (heads, total). The None stands for flash-attn's attention probabilities (for testing), which are never materialized.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention.flash.ops import flash_attention
from .dropout import draw_keys


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of dense tensors.

    Args:
        q: (batch, queries, heads, head_dim). For arguments not listed here see the module docstring.
        k: (batch, keys, groups, head_dim).
        v: like `k`.

    Returns:
        Output like `q`; with `return_attn_probs` (out, softmax_lse, None).

    Raises:
        ValueError: invalid arguments; see `flash_attention`.
    """
    options = _options(q, dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    if alibi_slopes is None:
        return _result(flash_attention(q, k, v, **options, return_lse=True), return_attn_probs)
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"`q` {tuple(q.shape)} must be (batch, queries, heads, head_dim), and `k` alike.")
    batch, _, heads, _ = q.shape
    _check_slopes(alibi_slopes, batch, heads, per_sequence=True)
    options["alibi_slopes"] = alibi_slopes.flatten()
    if alibi_slopes.dim() == 1:
        return _result(flash_attention(q, k, v, **options, return_lse=True), return_attn_probs)
    # slopes per sequence: fold the batch into the head dimension
    q, k, v = (tensor.transpose(0, 1).flatten(1, 2)[None] for tensor in (q, k, v))
    out, lse = flash_attention(q, k, v, **options, return_lse=True)
    out = out[0].unflatten(1, (batch, heads)).transpose(0, 1)
    return _result((out, lse[0].unflatten(0, (batch, heads))), return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention of packed sequences.

    Args:
        q: (total queries, heads, head_dim). For arguments not listed here see the module docstring.
        k: (total keys, groups, head_dim).
        v: like `k`.
        cu_seqlens_q: int32 (sequences + 1,), cumulative sequence lengths of `q`, starting with 0.
        cu_seqlens_k: likewise of `k` and `v`.
        max_seqlen_q: upper bound of the sequence lengths of `q`.
        max_seqlen_k: upper bound of the sequence lengths of `k`.
        alibi_slopes: (heads,) only.
        block_table: must be None.

    Returns:
        Output like `q`; with `return_attn_probs` (out, softmax_lse, None).

    Raises:
        ValueError: slopes per sequence, a `block_table`, or an argument that `flash_attention` rejects.
    """
    if block_table is not None:
        raise ValueError("`block_table` must be None: a paged KV cache is not supported; gather its pages first.")
    options = _options(q, dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, cu_seqlens_q.shape[0] - 1, q.shape[-2], per_sequence=False)
        options["alibi_slopes"] = alibi_slopes
    results = flash_attention(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        return_lse=True,
        **options,
    )
    return _result(results, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with queries, keys and values packed as (batch, tokens, 3, heads, head_dim)."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = _unpack(qkv, "qkv", 3, 5)
    return flash_attn_func(q, k, v, *options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with keys and values packed as (batch, keys, 2, groups, head_dim)."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    k, v = _unpack(kv, "kv", 2, 5)
    return flash_attn_func(q, k, v, *options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with queries, keys and values packed as (total, 3, heads, head_dim)."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    q, k, v = _unpack(qkv, "qkv", 3, 4)
    return flash_attn_varlen_func(q, k, v, *lengths, *options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with keys and values packed as (total keys, 2, groups, head_dim)."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    k, v = _unpack(kv, "kv", 2, 4)
    return flash_attn_varlen_func(q, k, v, *lengths, *options)


def _unpack(packed: Tensor, name: str, count: int, rank: int) -> tuple[Tensor, ...]:
    if packed.dim() != rank or packed.shape[-3] != count:
        leading = "batch, tokens" if rank == 5 else "total"
        raise ValueError(f"`{name}` {tuple(packed.shape)} must be ({leading}, {count}, heads, head_dim).")
    return packed.unbind(-3)


def _options(
    q: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    deterministic: bool,
) -> dict[str, Any]:
    """Return keyword arguments for `flash_attention`, with a fresh seed when dropout is active."""
    return {
        "dropout_p": dropout_p,
        "rng": draw_keys(device=q.device) if dropout_p else None,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "deterministic": deterministic,
    }


def _check_slopes(slopes: Tensor, batch: int, heads: int, *, per_sequence: bool) -> None:
    if slopes.dtype != torch.float32:
        raise ValueError(f"`alibi_slopes` ({slopes.dtype}) must be float32; convert them with `.float()`.")
    if slopes.shape == (heads,) or (per_sequence and slopes.shape == (batch, heads)):
        return
    expected = f"(heads,) = ({heads},)" + (f" or (batch, heads) = ({batch}, {heads})" if per_sequence else "")
    reason = "" if per_sequence else "; slopes per sequence are not supported for packed sequences"
    raise ValueError(f"`alibi_slopes` {tuple(slopes.shape)} must be {expected}{reason}.")


def _result(results: Any, return_attn_probs: bool) -> Any:
    """Convert (output, log-sum-exp) to flash-attn's return value."""
    return (*results, None) if return_attn_probs else results[0]
