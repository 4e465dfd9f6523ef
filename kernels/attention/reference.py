"""Reference attention in plain PyTorch, with the full score matrix; the ground truth of all tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .argument_checks import AttentionGeometry, check_arguments
from .dropout import call_keep_mask, dropout_keep_mask
from .inputs import AttentionInputs


def visibility_mask(
    queries: int, keys: int, *, causal: bool, window: Sequence[int] | None, device: torch.device, chunk: int = 0
) -> Tensor:
    """Return the attention mask, bool (queries, keys), True where visible; bottom-right aligned.

    With `chunk` a query sees keys of its own chunk of so many tokens, counted from the first key.
    """
    distance = relative_positions(queries, keys, device)
    visible = distance <= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        left, right = window
        if left >= 0:
            visible &= distance >= -left
        if right >= 0:
            visible &= distance <= right
    if chunk:
        visible &= same_chunk(
            torch.arange(keys - queries, keys, device=device), torch.arange(keys, device=device), chunk
        )
    return visible


def same_chunk(query_positions: Tensor, key_positions: Tensor, chunk: int) -> Tensor:
    """Return True for keys in the chunk of a query, (..., queries, keys), from their positions, (..., tokens) each."""
    return (query_positions // chunk)[..., None] == (key_positions // chunk)[..., None, :]


def document_chunks(inputs: AttentionInputs) -> Tensor:
    """Return True for keys in the chunk of a query of packed documents, counted from the first token of each document.

    bool (batch, 1, queries, keys).

    Raises:
        ValueError: queries and keys are of different tokens.
    """
    assert inputs.packed is not None
    if inputs.packed.key_document_ids is not None:
        raise ValueError(f"`attention_chunk` ({inputs.attention_chunk}) must be 0 for keys of other tokens.")
    documents = inputs.packed.document_ids
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    positions = index - torch.where(begins, index, 0).cummax(dim=1).values
    return same_chunk(positions, positions, inputs.attention_chunk)[:, None]


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
    """softmax(cap(scale * q k^T) + bias + distance_bias, over the visible keys) v, computed in fp32 or fp64.

    For any floating dtype, head width and device; differentiable in every tensor. Memory grows with queries * keys.
    Packed sequences are computed one at a time, after one device synchronization. Arguments as in `AttentionInputs`.

    Args:
        deterministic: ignored, accepted for the common signature.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        Output in the shape and dtype of `q`, with the head width of `v`. With `return_lse` also the natural
        log-sum-exp, fp32 (fp64 for fp64 inputs), (batch, heads, queries) or packed (heads, total queries),
        differentiable. A fully masked query has output 0, log-sum-exp -inf (with `sinks` the sink) and gradient 0; a
        key masked for all queries has no effect, even if it is NaN.

    Raises:
        ValueError: invalid arguments; see `check_arguments`.
    """
    inputs = AttentionInputs(
        q, k, v, causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap, bias=bias,
        distance_bias=distance_bias, alibi_slopes=alibi_slopes, sinks=sinks, key_padding_mask=key_padding_mask,
        dropout_p=dropout_p, rng=rng, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, attention_chunk=attention_chunk,
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
    outs.append(q.new_zeros(rest, geometry.heads, geometry.value_dim))
    lses.append(q.new_full((geometry.heads, rest), float("-inf"), dtype=torch.promote_types(q.dtype, torch.float32)))
    out, lse = torch.cat(outs), torch.cat(lses, dim=1)
    return (out, lse) if return_lse else out


def _attend(inputs: AttentionInputs, geometry: AttentionGeometry, *, first_sequence: int = 0) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of dense tensors; `first_sequence` is the index of the first one in the call."""
    q, k, v = inputs[:3]
    queries, keys = inputs.queries, inputs.keys
    window = (geometry.left, geometry.right)
    visible = visibility_mask(queries, keys, causal=False, window=window, device=q.device, chunk=geometry.chunk)[
        None, None
    ]
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
    values = torch.where(key_visible, v, 0)
    return _softmax_times_values(masked_scores, values, keep, inputs.dropout_p, q.dtype, inputs.sinks)


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
    scores: Tensor, v: Tensor, keep: Tensor | None, dropout_p: float, dtype: torch.dtype, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return output (batch, queries, heads, head_dim) and log-sum-exp (batch, heads, queries); -inf masks a score."""
    keys = scores.shape[-1]
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    empty = (scores == float("-inf")).all(dim=-1, keepdim=True)
    # a fully masked row is set to a finite value before the softmax, so that neither it nor its gradient is NaN
    scores = scores.masked_fill(empty, 0.0)
    lse = scores.logsumexp(dim=-1)
    probabilities = scores.softmax(dim=-1).masked_fill(empty, 0.0)[..., :keys]
    if keep is not None:
        probabilities = probabilities.masked_fill(~keep, 0.0) / (1 - dropout_p)
    wide_v = v.to(scores.dtype).repeat_interleave(scores.shape[1] // v.shape[2], dim=2)
    out = torch.einsum("bhqk,bkhd->bqhd", probabilities, wide_v).to(dtype)
    return out, lse.masked_fill(empty[..., 0], float("-inf"))


def visible_scores(inputs: AttentionInputs, scores: Tensor) -> Tensor:
    """Return scores (batch, heads, queries, keys) of a dense call with -inf where its masks hide a key."""
    chunk = inputs.attention_chunk if inputs.packed is None else 0
    visible = visibility_mask(
        inputs.queries,
        inputs.keys,
        causal=inputs.causal,
        window=inputs.window_size,
        device=inputs.q.device,
        chunk=chunk,
    )
    if inputs.packed is not None:
        documents = inputs.packed.document_ids
        key_documents = documents if inputs.packed.key_document_ids is None else inputs.packed.key_document_ids
        visible = visible & (documents[:, None, :, None] == key_documents[:, None, None, :])
        if inputs.attention_chunk:
            visible = visible & document_chunks(inputs)
    if inputs.key_padding_mask is not None:
        visible = visible & inputs.key_padding_mask[:, None, None, :]
    return scores.masked_fill(~visible, float("-inf"))


def dense_attention(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of a dense call, as a backend gets it."""
    scores = attention_scores(inputs, inputs.k, inputs.scale)
    dropout = inputs.dropout_p
    keep = call_keep_mask(inputs) if dropout else None
    scores = visible_scores(inputs, scores)
    return _softmax_times_values(scores, inputs.v, keep, dropout, inputs.q.dtype, inputs.sinks)


def reference_backend(inputs: AttentionInputs) -> Tensor:
    """Reference attention as a backend; selected by name only."""
    return dense_attention(inputs)[0]
