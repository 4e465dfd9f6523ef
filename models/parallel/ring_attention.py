"""Ring attention (arXiv 2310.01889): keys and values travel from rank to rank, partial outputs are merged.

In each pass the block of the next step is sent while this step's is computed. The backward pass sends the gradients of
keys and values along with them, in the dtype of the log-sum-exp, until they are back at their owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.attention.dropout import move_rng
from ...kernels.attention.inputs import AttentionInputs
from ...kernels.attention.key_blocks import attend_to_block, block_gradients, merge_block, place_block
from ...kernels.attention.packed_sequences import PackedSequences
from ...kernels.autocast import autocast
from .context import token_runs

_ops: Any = torch.ops._c10d_functional


def check_packed_dropout(inputs: AttentionInputs) -> None:
    """Check that places in whole sequences, of which dropout is a function, are those that the kernels see.

    Raises:
        ValueError: packed documents with dropout.
    """
    if inputs.dropout_p and inputs.packed is not None:
        raise ValueError(
            f"`dropout_p` ({inputs.dropout_p}) must be 0 for packed documents unless whole sequences are exchanged; "
            "use cp_comm_type=a2a."
        )


def call_tokens(rank: int, source: int, tokens: tuple[int, int], *, causal: bool) -> tuple[slice, slice]:
    """Return the queries and keys of a step that compute one call, if no score depends on a distance.

    In causal attention the first half of a rank's keys is before all queries of a later rank, whose other keys these do
    not see, and all keys are before the second half of the queries of an earlier rank.

    Args:
        rank: the rank of the queries.
        source: the rank of the keys.
        tokens: queries and keys of a rank.
        causal: the mask is causal; both are in zigzag order.
    """
    if not causal or source == rank:
        return slice(None), slice(None)
    half = tokens[0] // 2
    return (slice(None), slice(half)) if source < rank else (slice(half, None), slice(None))


@dataclass(frozen=True, slots=True)
class RingAttention:
    """Attention of the rank's queries to the keys of all ranks of a ring, one rank's after the other.

    Attributes:
        rank: rank in the group.
        size: ranks of the group.
        group: name of the process group.
        zigzag: whether queries are in zigzag order, and whether keys are.
        flash: use the flash kernels; else plain torch.
    """

    rank: int
    size: int
    group: str
    zigzag: tuple[bool, bool]
    flash: bool

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """Compute attention.

        Raises:
            ValueError: sinks, chunks, a dense bias, a bias that requires a gradient, or packed documents with dropout.
        """
        for name in ("bias", "distance_bias", "alibi_slopes"):
            bias = getattr(inputs, name)
            if bias is not None and (name == "bias" or (bias.requires_grad and torch.is_grad_enabled())):
                raise ValueError(
                    f"`{name}` {tuple(bias.shape)} must be None or, by distance, without gradient in a ring; use "
                    "cp_comm_type=a2a."
                )
        if inputs.sinks is not None:
            raise ValueError(f"`sinks` {tuple(inputs.sinks.shape)} must be None in a ring; use cp_comm_type=a2a.")
        if inputs.attention_chunk:
            raise ValueError(f"`attention_chunk` ({inputs.attention_chunk}) must be 0 in a ring; use cp_comm_type=a2a.")
        check_packed_dropout(inputs)
        q, k, v = autocast(*inputs[:3])
        inputs = inputs._replace(q=q, k=k, v=v)
        packed = inputs.packed
        documents: list[Tensor | None] = []
        for call in () if packed is None else packed.calls:
            documents += [call.document_ids, call.padded_cu_seqlens, call.key_document_ids, call.padded_key_cu_seqlens]
        options = RingOptions(
            inputs.causal, inputs.window_size, inputs.scale, inputs.softcap, self.rank, self.size, self.group,
            self.zigzag, self.flash, inputs.dropout_p,
        )  # fmt: skip
        biases = inputs.distance_bias, inputs.alibi_slopes, inputs.key_padding_mask, inputs.rng
        return _Ring.apply(options, *inputs[:3], *biases, *documents)


class RingOptions(NamedTuple):
    """Options that are not tensors; see `AttentionInputs` and `RingAttention`."""

    causal: bool
    window_size: Sequence[int] | None
    scale: float
    softcap: float
    rank: int
    size: int
    group: str
    zigzag: tuple[bool, bool]
    flash: bool
    dropout_p: float


class RingBlock(NamedTuple):
    """A call of a step: its inputs, its first query among the rank's, and its first key among the source's."""

    inputs: AttentionInputs
    query: int
    key: int


def ring_blocks(
    options: RingOptions, step: int, q: Tensor, key_value: Tensor, others: Sequence[Tensor | None]
) -> Iterator[RingBlock]:
    """Yield the calls of a step; `key_value` is (2, batch, keys, groups, head_dim)."""
    distance_bias, slopes, padding, rng, *documents = others
    source = (options.rank - step) % options.size
    tokens = q.shape[1], key_value.shape[2]
    call = AttentionInputs(
        q, *key_value.unbind(), distance_bias=distance_bias, alibi_slopes=slopes, causal=options.causal,
        window_size=options.window_size, softmax_scale=options.scale, softcap=options.softcap,
        dropout_p=options.dropout_p,
    )  # fmt: skip
    if options.window_size is None and distance_bias is None and slopes is None and rng is None:
        queries, keys = call_tokens(options.rank, source, tokens, causal=options.causal)
        if padding is not None:  # keys are in their order
            call = call._replace(key_padding_mask=padding[:, source * tokens[1] : (source + 1) * tokens[1]])
        if documents:
            ids, ends, key_ids, key_ends = documents[4 * step : 4 * step + 4]
            assert ids is not None
            assert ends is not None
            call = call._replace(packed=PackedSequences(ids, ends, None, key_ids, key_ends))
        yield RingBlock(
            call._replace(q=q[:, queries], k=call.k[:, keys], v=call.v[:, keys], causal=options.causal and step == 0),
            queries.start or 0,
            keys.start or 0,
        )
        return
    whole = tokens[0] * options.size, tokens[1] * options.size
    for queries in token_runs(tokens[0], options.rank, options.size, zigzag=options.zigzag[0]):
        for keys in token_runs(tokens[1], source, options.size, zigzag=options.zigzag[1]):
            query_slice = slice(queries.start, queries.start + queries.length)
            key_slice = slice(keys.start, keys.start + keys.length)
            pair = call._replace(q=q[:, query_slice], k=call.k[:, key_slice], v=call.v[:, key_slice])
            if padding is not None:
                pair = pair._replace(key_padding_mask=padding[:, keys.first : keys.first + keys.length])
            if rng is not None:
                pair = pair._replace(rng=move_rng(rng, query=queries.first, key=keys.first))
            placed = place_block(pair, queries.first, keys.first, whole)
            if placed is not None:
                yield RingBlock(placed, queries.start, keys.start)


def _send_on(tensor: Tensor, options: RingOptions) -> Tensor:
    """Start sending a tensor to the next rank and receiving that of the previous one, flat."""
    count, size = tensor.numel(), options.size
    to = [count if rank == (options.rank + 1) % size else 0 for rank in range(size)]
    source = [count if rank == (options.rank - 1) % size else 0 for rank in range(size)]
    return _ops.all_to_all_single(tensor.contiguous().view(-1), source, to, options.group)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: RingOptions, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> Tensor:
        batch, queries, heads, _ = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(q.shape, dtype=wide)
        lse = q.new_full((batch, heads, queries), float("-inf"), dtype=wide)
        key_value = torch.stack((k, v))
        for step in range(options.size):
            coming = _send_on(key_value, options) if step < options.size - 1 else None
            for block in ring_blocks(options, step, q, key_value, others):
                rows = slice(block.query, block.query + block.inputs.queries)
                found = attend_to_block(block.inputs, flash=options.flash)
                out[:, rows], lse[:, :, rows] = merge_block(out[:, rows], lse[:, :, rows], *found)
            if coming is not None:
                key_value = _ops.wait_tensor(coming).view(key_value.shape)
        out = out.to(q.dtype)
        ctx.options = options
        ctx.save_for_backward(q, k, v, out, lse, *others)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (out_gradient,) = gradients
        options: RingOptions = ctx.options
        q, k, v, out, lse, *others = ctx.saved_tensors
        q_gradient = torch.zeros_like(q, dtype=lse.dtype)
        key_value = torch.stack((k, v))
        returning: Tensor | None = None
        for step in range(options.size):
            coming = _send_on(key_value, options) if step < options.size - 1 else None
            gradient = torch.zeros_like(key_value, dtype=lse.dtype)
            for block in ring_blocks(options, step, q, key_value, others):
                rows = slice(block.query, block.query + block.inputs.queries)
                columns = slice(block.key, block.key + block.inputs.keys)
                dq, dk, dv = block_gradients(
                    out_gradient[:, rows], out[:, rows], lse[:, :, rows], block.inputs, flash=options.flash
                )
                q_gradient[:, rows] += dq
                gradient[0, :, columns] += dk
                gradient[1, :, columns] += dv
            if returning is not None:
                gradient = gradient + _ops.wait_tensor(returning).view(gradient.shape)
            returning = _send_on(gradient, options)
            if coming is not None:
                key_value = _ops.wait_tensor(coming).view(key_value.shape)
        assert returning is not None
        k_gradient, v_gradient = _ops.wait_tensor(returning).view(key_value.shape).to(k.dtype).unbind()
        return None, q_gradient.to(q.dtype), k_gradient, v_gradient, *(None,) * len(others)
