"""Attention of some queries to a block of their keys, and the merging of such partial results by log-sum-exp.

The gradients of a block follow from the output and the log-sum-exp over all keys (FlashAttention, arXiv 2205.14135;
ring attention, arXiv 2310.01889). With the flash kernels, or in plain torch with the full score matrix.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .argument_checks import check_arguments
from .dropout import call_keep_mask
from .inputs import AttentionInputs
from .reference import attention_scores, dense_attention, visible_scores

# ---------------------------------------------------------------- place


def place_block(
    inputs: AttentionInputs, first_query: int, first_key: int, whole: tuple[int, int]
) -> AttentionInputs | None:
    """Return the call for a run of queries and a run of keys of longer sequences.

    Masks and biases depend on distances from the end of the whole sequences, those of a call on distances from the end
    of its own.

    Args:
        inputs: queries, keys and the padding of these keys; mask and biases are those of the whole call.
        first_query: first query in the whole sequence.
        first_key: first key in the whole sequence.
        whole: (queries, keys) of the whole sequences.

    Returns:
        The call, in which keys at the end that no query sees and queries at the end that see no key are missing; None
        if all are.
    """
    queries, keys = inputs.queries, inputs.keys
    shift = first_key + keys - first_query - queries - (whole[1] - whole[0])
    left, right = (-1, -1) if inputs.window_size is None else inputs.window_size
    right = 0 if inputs.causal else right
    if right >= 0 and shift > right:
        keys -= shift - right
        shift = right
    if left >= 0 and shift < -left:
        queries -= -left - shift
        shift = -left
    if queries <= 0 or keys <= 0:
        return None
    left = -1 if left < 0 or left + shift >= keys - 1 else left + shift
    right = -1 if right < 0 or right - shift >= queries - 1 else right - shift
    q, k, v, padding = inputs.q[:, :queries], inputs.k[:, :keys], inputs.v[:, :keys], inputs.key_padding_mask
    distance_bias, slopes = _shift_biases(inputs, shift, max(1, queries - 1, keys - 1))
    return inputs._replace(
        q=q,
        k=k,
        v=v,
        distance_bias=distance_bias,
        alibi_slopes=slopes,
        key_padding_mask=None if padding is None else padding[:, :keys],
        causal=right == 0,
        window_size=None if left < 0 and right <= 0 else (left, right),
    )


def _shift_biases(inputs: AttentionInputs, shift: int, reach: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the biases of distances that are greater by `shift`: as a table, since slopes have a kink at 0."""
    table, slopes = inputs.distance_bias, inputs.alibi_slopes
    if shift == 0 or (table is None and slopes is None):
        return table, slopes
    some = table if table is not None else slopes
    assert some is not None
    distance = torch.arange(-reach, reach + 1, device=some.device) + shift
    terms = None if slopes is None else -slopes[:, None] * distance.abs()
    if table is not None:
        farthest = table.shape[1] // 2
        # embedding instead of indexing: its gradient sums equal indices in a fixed order, so it is deterministic
        found = F.embedding(distance.clamp(-farthest, farthest) + farthest, table.t()).t()
        terms = found if terms is None else terms + found
    return terms, None


# ---------------------------------------------------------------- forward and backward


def attend_to_block(inputs: AttentionInputs, *, flash: bool) -> tuple[Tensor, Tensor]:
    """Return the output like q, and the log-sum-exp (batch, heads, queries) in fp32 or fp64, of a block of keys.

    A query that sees no key of the block has output 0 and log-sum-exp -inf. Autograd sees nothing of it.

    Args:
        inputs: without dense bias.
        flash: use the flash kernels.
    """
    if not flash:
        return dense_attention(inputs)
    from .flash import ops  # noqa: F401 - registers the operation

    out, lse = torch.ops.stoker.flash_attention(*_flash_arguments(inputs))
    if inputs.packed is None:
        return out, lse
    batch = inputs.q.shape[0]
    return out.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1)


def block_gradients(
    out_gradient: Tensor, out: Tensor, lse: Tensor, inputs: AttentionInputs, *, flash: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a block of keys adds to the gradient of q, and the gradients of k and v.

    Args:
        out_gradient: gradient of `out`.
        out: output over all keys, like q.
        lse: log-sum-exp over all keys, (batch, heads, queries).
        inputs: the block, as in `attend_to_block`.
        flash: use the flash kernels.
    """
    if not flash:
        return _dense_gradients(out_gradient, out, lse, inputs)
    from .flash import ops  # noqa: F401 - registers the operation

    q, k, v, *problem = _flash_arguments(inputs)
    if inputs.packed is not None:
        out_gradient, out = out_gradient.flatten(0, 1), out.flatten(0, 1)
        lse = lse.transpose(0, 1).flatten(1)
    gradients = torch.ops.stoker.flash_attention_backward(
        out_gradient, None, q, k, v, out, lse.contiguous(), *problem, True, True, *[False] * 5
    )
    found = zip(gradients, inputs[:3], strict=False)
    q_gradient, k_gradient, v_gradient = (gradient.view(like.shape) for gradient, like in found)
    return q_gradient, k_gradient, v_gradient


def _flash_arguments(inputs: AttentionInputs) -> list[Any]:
    from .flash.kernel_arguments import FlashAttentionParams

    packed = inputs.packed
    if packed is not None:
        q, k, v = (tensor.flatten(0, 1) for tensor in inputs[:3])
        inputs = inputs._replace(
            q=q,
            k=k,
            v=v,
            packed=None,
            cu_seqlens_q=packed.cu_seqlens(),
            cu_seqlens_k=packed.key_cu_seqlens(),
            max_seqlen_q=inputs.queries,
            max_seqlen_k=inputs.keys,
        )
    return [*inputs[:3], *FlashAttentionParams.from_checked(inputs, check_arguments(inputs))]


def _dense_gradients(
    out_gradient: Tensor, out: Tensor, lse: Tensor, inputs: AttentionInputs
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (tensor.to(lse.dtype) for tensor in inputs[:3])
    groups, per_group = k.shape[2], q.shape[2] // k.shape[2]
    scores = visible_scores(inputs, attention_scores(inputs, inputs.k, inputs.scale))
    empty = lse == float("-inf")
    weights = (scores - lse.masked_fill(empty, float("inf"))[..., None]).exp()
    out_gradient = out_gradient.to(lse.dtype)
    delta = (out_gradient * out.to(lse.dtype)).sum(-1).transpose(1, 2)[..., None]
    wide_k, wide_v = (tensor.repeat_interleave(per_group, dim=2) for tensor in (k, v))
    weight_gradient, dropped = torch.einsum("bqhd,bkhd->bhqk", out_gradient, wide_v), weights
    if inputs.dropout_p:
        factors = call_keep_mask(inputs).to(weights.dtype) / (1 - inputs.dropout_p)
        weight_gradient, dropped = weight_gradient * factors, weights * factors
    score_gradient = weights * (weight_gradient - delta)
    if inputs.softcap:
        capped = torch.einsum("bqhd,bkhd->bhqk", q, wide_k) * (inputs.scale / inputs.softcap)
        score_gradient = score_gradient * (1 - torch.tanh(capped).square())
    score_gradient = score_gradient * inputs.scale

    def of_keys(per_score: Tensor, rows: Tensor) -> Tensor:
        by_head = torch.einsum("bhqk,bqhd->bkhd", per_score, rows)
        return by_head.unflatten(2, (groups, per_group)).sum(3)

    q_gradient = torch.einsum("bhqk,bkhd->bqhd", score_gradient, wide_k)
    return q_gradient, of_keys(score_gradient, q), of_keys(dropped, out_gradient)


# ---------------------------------------------------------------- merge


def merge_block(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp over the keys of both, in fp32 or fp64.

    Args:
        out: (batch, queries, heads, head_dim) in the dtype of `lse`.
        lse: (batch, heads, queries); -inf with output 0 where no key was seen.
        block_out: like `out`, of any dtype.
        block_lse: like `lse`.
    """
    total = torch.logaddexp(lse, block_lse)
    finite = total.masked_fill(total == float("-inf"), 0.0)
    old, new = ((each - finite).exp().transpose(1, 2)[..., None] for each in (lse, block_lse))
    return out * old + block_out.to(lse.dtype) * new, total
