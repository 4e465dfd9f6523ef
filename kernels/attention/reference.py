"""Reference attention in plain PyTorch, with the full score matrix; the ground truth of all tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .argument_checks import AttentionGeometry, check_arguments
from .dropout import call_keep_mask, dropout_keep_mask
from .inputs import AttentionInputs


def visibility_mask(
    queries: int, keys: int, *, causal: bool, window: Sequence[int] | None, device: torch.device
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

    For any floating dtype, head width and device; differentiable in every tensor. Memory grows with queries * keys.
    Packed sequences are computed one at a time, after one device synchronization. Arguments as in `AttentionInputs`.

    Args:
        deterministic: ignored, accepted for the common signature.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        Output in the shape and dtype of `q`. With `return_lse` also the natural log-sum-exp, fp32 (fp64 for fp64
        inputs), (batch, heads, queries) or packed (heads, total queries), differentiable. A fully masked query has
        output 0, log-sum-exp -inf and gradient 0; a key masked for all queries has no effect, even if it is NaN.

    Raises:
        ValueError: invalid arguments; see `check_arguments`.
    """
    inputs = AttentionInputs(
        q, k, v, causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap, bias=bias,
        distance_bias=distance_bias, alibi_slopes=alibi_slopes, key_padding_mask=key_padding_mask, dropout_p=dropout_p,
        rng=rng, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    geometry = check_arguments(inputs, for_kernel=False)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        out, lse = _attend(inputs, geometry)
        return (out, lse) if return_lse else out

    outs, lses = [], []
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for sequence in range(geometry.batch):
        rows, columns = slice(*ends_q[sequence : sequence + 2]), slice(*ends_k[sequence : sequence + 2])
        alone = inputs._replace(q=q[None, rows], k=k[None, columns], v=v[None, columns])
        out, lse = _attend(alone, geometry, first_sequence=sequence)
        outs.append(out[0])
        lses.append(lse[0])
    rest = q.shape[0] - ends_q[-1]
    outs.append(q.new_zeros(rest, *q.shape[1:]))
    lses.append(q.new_full((geometry.heads, rest), float("-inf"), dtype=torch.promote_types(q.dtype, torch.float32)))
    out, lse = torch.cat(outs), torch.cat(lses, dim=1)
    return (out, lse) if return_lse else out


def _attend(inputs: AttentionInputs, geometry: AttentionGeometry, *, first_sequence: int = 0) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of dense tensors; `first_sequence` is the index of the first one in the call."""
    q, k, v = inputs[:3]
    queries, keys = inputs.queries, inputs.keys
    window = (geometry.left, geometry.right)
    visible = visibility_mask(queries, keys, causal=False, window=window, device=q.device)[None, None]
    if inputs.key_padding_mask is not None:
        visible = visible & inputs.key_padding_mask[:, None, None, :]
    key_visible = visible.any(dim=2).transpose(1, 2)[..., None]  # (batch or 1, keys, 1, 1)
    # keys and values masked for all queries are zeroed: NaN times a weight of 0 would be NaN
    scores = attention_scores(inputs, torch.where(key_visible, k, 0), geometry.scale)
    keep = None
    if inputs.dropout_p and inputs.rng is not None:
        keep = dropout_keep_mask(
            inputs.rng, inputs.dropout_p, batch=q.shape[0], heads=geometry.heads, queries=queries, keys=keys,
            first_sequence=first_sequence,
        )  # fmt: skip
    masked_scores = scores.masked_fill(~visible, float("-inf"))
    return _softmax_times_values(masked_scores, torch.where(key_visible, v, 0), keep, inputs.dropout_p, q.dtype)


def attention_scores(inputs: AttentionInputs, k: Tensor, scale: float) -> Tensor:
    """Return cap(scale * q k^T) + biases, (batch, heads, queries, keys), in fp32 or fp64."""
    q = inputs.q
    accumulate = torch.promote_types(q.dtype, torch.float32)
    wide_k = k.to(accumulate).repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(accumulate), wide_k) * scale
    if inputs.softcap:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    if inputs.bias is not None:
        scores = scores + inputs.bias.to(scores.dtype)
    if inputs.distance_bias is not None:
        reach = inputs.distance_bias.shape[1] // 2
        index = relative_positions(inputs.queries, inputs.keys, q.device).clamp(-reach, reach) + reach
        scores = scores + inputs.distance_bias[:, index]
    if inputs.alibi_slopes is not None:
        distance = relative_positions(inputs.queries, inputs.keys, q.device).abs()
        scores = scores - inputs.alibi_slopes[:, None, None] * distance
    return scores


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


def visible_scores(inputs: AttentionInputs, scores: Tensor) -> Tensor:
    """Return scores (batch, heads, queries, keys) of a dense call with -inf where its masks hide a key."""
    visible = visibility_mask(
        inputs.queries, inputs.keys, causal=inputs.causal, window=inputs.window_size, device=inputs.q.device
    )
    if inputs.packed is not None:
        documents = inputs.packed.document_ids
        key_documents = documents if inputs.packed.key_document_ids is None else inputs.packed.key_document_ids
        visible = visible & (documents[:, None, :, None] == key_documents[:, None, None, :])
    if inputs.key_padding_mask is not None:
        visible = visible & inputs.key_padding_mask[:, None, None, :]
    return scores.masked_fill(~visible, float("-inf"))


def dense_attention(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of a dense call, as a backend gets it."""
    scores = attention_scores(inputs, inputs.k, inputs.scale)
    dropout, keep = inputs.dropout_p, None
    if dropout:
        keep = call_keep_mask(inputs)
    return _softmax_times_values(visible_scores(inputs, scores), inputs.v, keep, dropout, inputs.q.dtype)


def reference_backend(inputs: AttentionInputs) -> Tensor:
    """Reference attention as a backend; selected by name only."""
    return dense_attention(inputs)[0]
