"""Attention functions of context parallelism: each exchanges tokens or heads around calls of an attention backend.

Inputs and output are those of the rank's tokens. `packed` and `key_padding_mask` are of whole sequences, gathered once
for all layers; biases are those of the call that one process would make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.attention.backends.registry import AttentionFunction
from ...kernels.attention.dropout import move_rng
from ...kernels.attention.inputs import AttentionInputs
from ...kernels.attention.key_blocks import place_block
from ...kernels.attention.packed_sequences import PackedSequences
from .context import ContextParallel, Run, SequenceShard, natural_order, rank_order, token_runs
from .ring_attention import RingAttention, call_tokens, check_packed_dropout

_ops: Any = torch.ops._c10d_functional


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return _exchange(gradient, ctx.group), None


def _exchange(parts: Tensor, group: str) -> Tensor:
    """Send part r of (ranks, ...) to rank r; return what they sent."""
    sizes = [1] * parts.shape[0]
    return _ops.wait_tensor(_ops.all_to_all_single(parts.contiguous(), sizes, sizes, group))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(tokens.contiguous().view(-1), size, group))
        return gathered.view(size, *tokens.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        flat = gradient.contiguous().view(-1)
        own = _ops.wait_tensor(_ops.reduce_scatter_tensor(flat, "sum", ctx.size, ctx.group))
        return own.view(gradient.shape[1:]), None, None


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """Attention to whole sequences with a share of the heads: an all-to-all before and after.

    Attributes:
        function: attention of the share.
        rank: rank in the group, which has heads from `rank * heads / ranks` on.
        size: ranks of the group.
        group: name of the process group.
        zigzag: whether queries are in zigzag order, and whether keys are.
    """

    function: AttentionFunction
    rank: int
    size: int
    group: str
    zigzag: tuple[bool, bool]

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """Compute attention."""
        of_queries, of_keys = self.zigzag
        if inputs.queries == inputs.keys and of_queries == of_keys:  # one message
            q, k, v = self._share_heads(inputs[:3], zigzag=of_queries)
        else:
            (q,) = self._share_heads((inputs.q,), zigzag=of_queries)
            k, v = self._share_heads((inputs.k, inputs.v), zigzag=of_keys)
        heads, first = q.shape[2], self.rank * q.shape[2]
        of_heads: dict[str, Any] = {name: getattr(inputs, name) for name in ("distance_bias", "alibi_slopes", "sinks")}
        of_heads = {name: None if each is None else each.narrow(0, first, heads) for name, each in of_heads.items()}
        rng = inputs.rng if inputs.rng is None or not first else move_rng(inputs.rng, head=first)
        out = self.function(inputs._replace(q=q, k=k, v=v, rng=rng, **of_heads))
        by_heads: Any = _AllToAll.apply(rank_order(out, self.size, zigzag=of_queries), self.group)
        return by_heads.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _share_heads(self, tensors: tuple[Tensor, ...], *, zigzag: bool) -> tuple[Tensor, ...]:
        """Return the rank's share of the heads (batch, whole tokens, heads / ranks, head_dim) of each tensor."""
        parts = [tensor.unflatten(2, (self.size, -1)).permute(2, 0, 1, 3, 4) for tensor in tensors]
        received: Any = _AllToAll.apply(torch.cat(parts, dim=3), self.group)
        return natural_order(received, zigzag=zigzag).split([part.shape[3] for part in parts], dim=2)


@dataclass(frozen=True, slots=True)
class KeyGather:
    """Attention of the rank's queries to the keys and values of all ranks.

    Attributes:
        function: attention of a run of queries.
        ranks: the context-parallel ranks.
        zigzag: whether queries are in zigzag order, and whether keys are.
    """

    function: AttentionFunction
    ranks: ContextParallel
    zigzag: tuple[bool, bool]

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """Compute attention.

        Raises:
            ValueError: packed documents with dropout.
        """
        size, group = self.ranks.size, self.ranks.group
        check_packed_dropout(inputs)
        gathered: Any = _Gather.apply(torch.cat((inputs.k, inputs.v), dim=2), size, group)
        k, v = natural_order(gathered, zigzag=self.zigzag[1]).chunk(2, dim=2)
        whole = inputs.queries * size, k.shape[1]
        has_distances = _has_distances(inputs)
        has_places = has_distances or inputs.dropout_p > 0
        runs = _query_runs(inputs.queries, self.ranks, self.zigzag[0] and (inputs.causal or has_places))
        outputs: list[Tensor] = []
        for number, run in enumerate(runs):
            call = inputs._replace(q=inputs.q[:, run.start : run.start + run.length], k=k, v=v)
            if inputs.rng is not None and run.first:
                call = call._replace(rng=move_rng(inputs.rng, query=run.first))
            if inputs.packed is not None:
                call = call._replace(packed=inputs.packed.calls[number])
            if inputs.causal or has_distances:
                placed = place_block(call, run.first, 0, whole)
                assert placed is not None
                call = placed
            outputs.append(self.function(call))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _has_distances(inputs: AttentionInputs) -> bool:
    """Return True if scores depend on distances, apart from a causal mask."""
    return any(option is not None for option in (inputs.window_size, inputs.distance_bias, inputs.alibi_slopes))


def _query_runs(tokens: int, ranks: ContextParallel, zigzag: bool) -> list[Run]:
    return token_runs(tokens, ranks.rank, ranks.size, zigzag=zigzag)


def context_attention(
    function: AttentionFunction, ranks: ContextParallel, *, zigzag: tuple[bool, bool], flash: bool
) -> AttentionFunction:
    """Return the attention function of a rank's tokens.

    Args:
        function: attention backend of the rank's calls.
        ranks: the context-parallel ranks.
        zigzag: whether queries are in zigzag order, and whether keys are.
        flash: a ring uses the flash kernels; else plain torch.
    """
    split = ranks.split
    if split.exchange == "all_gather":
        return KeyGather(function, ranks, zigzag)
    if split.ring_ranks > 1:
        group = ranks.ring_group or ranks.group
        function = RingAttention(ranks.ring_rank, split.ring_ranks, group, zigzag, flash)
    if split.head_ranks == 1:
        return function
    return HeadExchange(function, ranks.head_rank, split.head_ranks, ranks.head_group or ranks.group, zigzag)


# ---------------------------------------------------------------- packed documents


def pack_documents(
    documents: Tensor, shard: SequenceShard | None, *, dtype: torch.dtype, causal: bool, with_mask: bool
) -> PackedSequences:
    """Build document boundaries for self-attention; on context-parallel ranks those of each call of the rank.

    Args:
        documents: document ids of whole sequences; see `PackedSequences`.
        shard: the rank's tokens; None for one rank.
        dtype: of the queries.
        causal: also mask later keys of the same document.
        with_mask: build the mask, for backends without support for `cu_seqlens`.
    """
    if shard is None or shard.ranks.split.exchange == "a2a":
        return PackedSequences.from_documents(documents, dtype=dtype, causal=causal, with_mask=with_mask)
    whole = PackedSequences.from_documents(documents, dtype=dtype, causal=causal, with_mask=False)
    calls: list[PackedSequences] = []
    if shard.ranks.split.exchange == "all_gather":
        tokens = documents.shape[1] // shard.ranks.size
        for run in token_runs(tokens, shard.ranks.rank, shard.ranks.size, zigzag=causal):
            stop = run.first + run.length
            calls.append(
                PackedSequences.from_query_and_key_documents(
                    documents[:, run.first : stop],
                    documents[:, : stop if causal else None],
                    dtype=dtype,
                    causal=causal,
                    with_mask=with_mask,
                )
            )
        return whole._replace(calls=tuple(calls))
    return whole._replace(calls=_ring_calls(documents, documents, (shard, shard), causal=causal))


def pack_cross_documents(
    documents: Tensor,
    key_documents: Tensor,
    shards: tuple[SequenceShard, SequenceShard] | None,
    *,
    dtype: torch.dtype,
    with_mask: bool,
) -> PackedSequences:
    """Build document boundaries for cross-attention, likewise.

    Args:
        documents: document ids of whole sequences of queries; see `PackedSequences`.
        key_documents: of the keys.
        shards: the rank's queries and keys; None for one rank.
        dtype: of the queries.
        with_mask: build the mask, for backends without support for `cu_seqlens`.
    """
    pack = PackedSequences.from_query_and_key_documents
    if shards is None or shards[0].ranks.split.exchange == "a2a":
        return pack(documents, key_documents, dtype=dtype, with_mask=with_mask)
    whole = pack(documents, key_documents, dtype=dtype, with_mask=False)
    if shards[0].ranks.split.exchange == "all_gather":
        local = shards[0].local(documents)
        return whole._replace(calls=(pack(local, key_documents, dtype=dtype, with_mask=with_mask),))
    return whole._replace(calls=_ring_calls(documents, key_documents, shards, causal=False))


def _ring_calls(
    documents: Tensor, key_documents: Tensor, shards: tuple[SequenceShard, SequenceShard], *, causal: bool
) -> tuple[PackedSequences, ...]:
    """Return the document boundaries of each step of a ring, whose kernels need no mask."""
    ranks = shards[0].ranks
    size = ranks.split.ring_ranks
    by_rank = rank_order(documents, size, zigzag=shards[0].zigzag)
    keys_by_rank = rank_order(key_documents, size, zigzag=shards[1].zigzag)
    own, calls = by_rank[ranks.ring_rank], list[PackedSequences]()
    for step in range(size):
        source = (ranks.ring_rank - step) % size
        queries, keys = call_tokens(ranks.ring_rank, source, (own.shape[1], keys_by_rank.shape[2]), causal=causal)
        if causal and step == 0:
            calls.append(PackedSequences.from_documents(own, dtype=torch.float32, causal=True, with_mask=False))
        else:
            pack = PackedSequences.from_query_and_key_documents
            key_part = keys_by_rank[source][:, keys]
            calls.append(pack(own[:, queries], key_part, dtype=torch.float32, with_mask=False))
    return tuple(calls)
