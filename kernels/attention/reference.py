"""Reference attention in plain PyTorch, with the full score matrix; the ground truth of all tests."""

from __future__ import annotations

import torch
from torch import Tensor

from .argument_checks import AttentionGeometry, check_arguments
from .dropout import dropout_mask
from .packed_sequences import PackedSequences


def visibility_mask(
    queries: int, keys: int, *, causal: bool, window: tuple[int, int] | None, device: torch.device
) -> Tensor:
    """Return the attention mask, bool (queries, keys), True where visible; bottom-right aligned."""
    distance = relative_positions(queries, keys, device)
    visible = distance <= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        left, right = window
        if left >= 0:
            visible &= distance >= -left
        if right >= 0:
            visible &= distance <= right
    return visible


def relative_positions(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the relative positions j - (i + keys - queries) of key j and query i, int64 (queries, keys)."""
    return torch.arange(keys, device=device) - torch.arange(keys - queries, keys, device=device)[:, None]


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
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
    """softmax(cap(scale * q k^T) + bias + distance_bias, over the visible keys) v, computed in fp32 or fp64.

    Same arguments and results as `flash_attention`, for any floating dtype, head width and device, differentiable in
    every tensor. Memory grows with queries * keys. Packed sequences are computed one at a time, after one device
    synchronization.

    Args:
        q: (batch, queries, heads, head_dim), or packed (total queries, heads, head_dim).
        k: (batch, keys, groups, head_dim), or packed; query head h uses group h // (heads / groups).
        v: like `k`.
        causal: mask later keys; both sequences end at the same token (bottom-right aligned).
        window_size: keys visible to the left and to the right of a query, inclusive; -1 for all.
        softmax_scale: factor of the scores; None is 1 / sqrt(head_dim).
        softcap: cap * tanh(score / cap) bounds the scaled scores, before a bias is added; 0 for none.
        bias: added to the scores, broadcastable to (batch, heads, queries, keys); -inf masks a key.
        distance_bias: (heads, 2 R + 1); entry [h, R + d] is added for a key at distance d = j - (i + keys - queries),
            clipped to [-R, R].
        alibi_slopes: (heads,); -slope * |d| is added for a key at distance d, in addition to the other biases.
        dropout_p: probability of dropping an attention weight; the others are scaled by 1 / (1 - dropout_p).
        rng: int64 [seed, offset] of the dropout mask.
        cu_seqlens_q: int32 (sequences + 1), cumulative sequence lengths of a packed `q`, starting with 0. Tokens after
            the last entry belong to no sequence.
        cu_seqlens_k: the same for `k` and `v`.
        max_seqlen_q: upper bound of the lengths in `cu_seqlens_q`.
        max_seqlen_k: upper bound of the lengths in `cu_seqlens_k`.
        key_padding_mask: bool (batch, keys), False for padding.
        deterministic: ignored, accepted for the common signature.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        Output in the shape and dtype of `q`. With `return_lse` also the natural log-sum-exp, fp32 (fp64 for fp64
        inputs), (batch, heads, queries) or packed (heads, total queries), differentiable. A fully masked query has
        output 0, log-sum-exp -inf and gradient 0; a key masked for all queries has no effect, even if it is NaN.

    Raises:
        ValueError: invalid arguments; see `check_arguments`.
    """
    geometry = check_arguments(
        q, k, v, causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap, bias=bias,
        distance_bias=distance_bias, alibi_slopes=alibi_slopes, dropout_p=dropout_p, rng=rng,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        key_padding_mask=key_padding_mask, for_kernel=False,
    )  # fmt: skip
    if cu_seqlens_q is None or cu_seqlens_k is None:
        out, lse = _attend(
            q, k, v, geometry, softcap, bias=bias, distance_bias=distance_bias, alibi_slopes=alibi_slopes,
            key_padding_mask=key_padding_mask, dropout_p=dropout_p, rng=rng, first_sequence=0,
        )  # fmt: skip
        return (out, lse) if return_lse else out

    outs, lses = [], []
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for sequence in range(geometry.batch):
        rows, columns = slice(*ends_q[sequence : sequence + 2]), slice(*ends_k[sequence : sequence + 2])
        out, lse = _attend(
            q[None, rows], k[None, columns], v[None, columns], geometry, softcap, distance_bias=distance_bias,
            alibi_slopes=alibi_slopes, dropout_p=dropout_p, rng=rng, first_sequence=sequence,
        )  # fmt: skip
        outs.append(out[0])
        lses.append(lse[0])
    rest = q.shape[0] - ends_q[-1]
    outs.append(q.new_zeros(rest, *q.shape[1:]))
    lses.append(q.new_full((geometry.heads, rest), float("-inf"), dtype=torch.promote_types(q.dtype, torch.float32)))
    out, lse = torch.cat(outs), torch.cat(lses, dim=1)
    return (out, lse) if return_lse else out


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    geometry: AttentionGeometry,
    softcap: float,
    *,
    bias: Tensor | None = None,
    distance_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_p: float,
    rng: Tensor | None,
    first_sequence: int,
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of dense tensors; `first_sequence` is the index of the first one in the call."""
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    window = (geometry.left, geometry.right)
    visible = visibility_mask(queries, keys, causal=False, window=window, device=q.device)[None, None]
    if key_padding_mask is not None:
        visible = visible & key_padding_mask[:, None, None, :]
    key_visible = visible.any(dim=2).transpose(1, 2)[..., None]  # (batch or 1, keys, 1, 1)
    # keys and values masked for all queries are zeroed: NaN times a weight of 0 would be NaN
    scores = _scores(q, torch.where(key_visible, k, 0), geometry.scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if distance_bias is not None:
        reach = distance_bias.shape[1] // 2
        index = relative_positions(queries, keys, q.device).clamp(-reach, reach) + reach
        scores = scores + distance_bias[:, index]
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * relative_positions(queries, keys, q.device).abs()
    keep = None
    if dropout_p and rng is not None:
        keep = dropout_mask(
            rng, dropout_p, batch=batch, heads=geometry.heads, queries=queries, keys=keys,
            queries_bound=geometry.queries, keys_bound=geometry.keys, first_sequence=first_sequence,
        )  # fmt: skip
    masked_scores = scores.masked_fill(~visible, float("-inf"))
    return _softmax_times_values(masked_scores, torch.where(key_visible, v, 0), keep, dropout_p, q.dtype)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scale * q k^T, (batch, heads, queries, keys), in fp32 or fp64."""
    accumulate = torch.promote_types(q.dtype, torch.float32)
    wide_k = k.to(accumulate).repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return torch.einsum("bqhd,bkhd->bhqk", q.to(accumulate), wide_k) * scale


def _softmax_times_values(
    scores: Tensor, v: Tensor, keep: Tensor | None, dropout_p: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return output (batch, queries, heads, head_dim) and log-sum-exp (batch, heads, queries); -inf masks a score."""
    empty = (scores == float("-inf")).all(dim=-1, keepdim=True)
    # a fully masked row is set to a finite value before the softmax, so that neither it nor its gradient is NaN
    scores = scores.masked_fill(empty, 0.0)
    lse = scores.logsumexp(dim=-1)
    probabilities = scores.softmax(dim=-1).masked_fill(empty, 0.0)
    if keep is not None:
        probabilities = probabilities.masked_fill(~keep, 0.0) / (1 - dropout_p)
    wide_v = v.to(scores.dtype).repeat_interleave(scores.shape[1] // v.shape[2], dim=2)
    out = torch.einsum("bhqk,bkhd->bqhd", probabilities, wide_v).to(dtype)
    return out, lse.masked_fill(empty[..., 0], float("-inf"))


def reference_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
) -> Tensor:
    """Reference attention with the signature of a backend; selected by name only.

    Args:
        query: (batch, queries, heads, head_dim).
        key: (batch, keys, groups, head_dim); query head h uses group h // (heads / groups).
        value: like `key`.
        scale: factor of the scores.
        causal: mask later keys, bottom-right aligned.
        dropout: probability of dropping an attention weight, sampled from PyTorch's default generator.
        bias: added to the scaled scores, broadcastable to (batch, heads, queries, keys).
        distance_bias: (heads, 2 R + 1), as in `reference_attention`.
        alibi_slopes: (heads,), as in `reference_attention`.
        window: keys visible to the left and right, inclusive; -1 for all.
        softcap: as in `reference_attention`.
        packed: documents of rows that hold several, which do not attend to each other; prepared with the same `causal`.
        key_padding_mask: bool (batch, keys), False for padding.

    Returns:
        (batch, queries, heads, head_dim) in the dtype of `query`. A fully masked query has output and gradients 0.
    """
    scores = _scores(query, key, scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if distance_bias is not None:
        reach = distance_bias.shape[1] // 2
        index = relative_positions(query.shape[1], key.shape[1], query.device).clamp(-reach, reach) + reach
        scores = scores + distance_bias[:, index]
    if alibi_slopes is not None:
        distance = relative_positions(query.shape[1], key.shape[1], query.device).abs()
        scores = scores - alibi_slopes[:, None, None] * distance
    visible = visibility_mask(query.shape[1], key.shape[1], causal=causal, window=window, device=query.device)
    if packed is not None:
        query_documents = packed.documents
        key_documents = query_documents if packed.key_document_ids is None else packed.key_document_ids
        visible = visible & (query_documents[:, None, :, None] == key_documents[:, None, None, :])
    if key_padding_mask is not None:
        visible = visible & key_padding_mask[:, None, None, :]
    keep = torch.rand_like(scores) >= dropout if dropout else None
    return _softmax_times_values(scores.masked_fill(~visible, float("-inf")), value, keep, dropout, query.dtype)[0]
