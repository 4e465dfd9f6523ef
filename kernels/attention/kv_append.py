"""Rotary embedding of queries and keys, and append to the KV cache, for one decoded token per sequence.

Plain PyTorch, which torch.compile fuses; in eager mode on a GPU the attention kernel does both (`decode.Append`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rope import apply_rotary

RotaryTables = tuple[Tensor, Tensor, Tensor, Tensor]
"""Cosine and sine for queries, then for keys, each (rows, rotary_dim / 2), fp32 (fp64 with fp64)."""


def apply_rotary_and_append_kv(
    projected: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    cos_sin: RotaryTables | None = None,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Apply rotary embedding to one new token per sequence and append its keys and values to the cache; no gradient.

    Args:
        projected: (rows, heads + 2 groups, head_dim), all query heads, then all key groups, then all value groups.
        key_cache: (rows, groups, slots, head_dim), contiguous, dtype of `projected`; updated in place.
        value_cache: like `key_cache`.
        lengths: int64 (rows,), sequence lengths including this token, which is written to slot (length - 1) % slots.
        cos_sin: cos/sin tables for the first channels of queries and keys, see `kernels.rope.apply_rotary`; None
            without rotary embedding.
        interleaved: rotate the pairs (2i, 2i + 1); otherwise channel i with channel i + rotary_dim / 2.

    Returns:
        The queries, (rows, heads, head_dim).

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    _check(projected, key_cache, value_cache, lengths, cos_sin)
    groups, slots = key_cache.shape[1:3]
    query, key, value = projected.split((projected.shape[1] - 2 * groups, groups, groups), dim=1)
    if cos_sin is not None:
        query_cosine, query_sine, key_cosine, key_sine = (angle[:, None] for angle in cos_sin)
        query = apply_rotary(query[:, None], query_cosine, query_sine, interleaved=interleaved)[:, 0]
        key = apply_rotary(key[:, None], key_cosine, key_sine, interleaved=interleaved)[:, 0]
    row = torch.arange(len(projected), device=projected.device)
    slot = (lengths - 1) % slots
    key_cache[row, :, slot] = key
    value_cache[row, :, slot] = value
    return query


def _check(
    projected: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, cos_sin: RotaryTables | None
) -> None:
    rows, heads, head_dim = projected.shape
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        fits = cache.ndim == 4 and (cache.shape[0], cache.shape[3]) == (rows, head_dim) and heads > 2 * cache.shape[1]
        if not fits or cache.shape != key_cache.shape or cache.dtype != projected.dtype or not cache.is_contiguous():
            raise ValueError(
                f"`{name}` {tuple(cache.shape)} of {cache.dtype} must be ({rows}, groups, slots, {head_dim}) of "
                f"{projected.dtype}, contiguous, for `projected` {tuple(projected.shape)}."
            )
    if lengths.shape != (rows,) or lengths.dtype != torch.int64:
        raise ValueError(f"`lengths` {tuple(lengths.shape)} of {lengths.dtype} must be ({rows},) of torch.int64.")
    for angle in cos_sin or ():
        if angle.ndim != 2 or len(angle) != rows or not 0 < 2 * angle.shape[1] <= head_dim:
            raise ValueError(f"`cos_sin` {tuple(angle.shape)} must be ({rows}, up to {head_dim // 2}).")
