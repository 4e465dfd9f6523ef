"""All ranks of a ring in one process: the calls of each rank with the keys and values that it would have received."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.attention.inputs import AttentionInputs
from stoker.kernels.attention.key_blocks import attend_to_block, block_gradients, merge_block
from stoker.models.dispatch.context_calls import ContextSplit
from stoker.models.parallel.context import ContextParallel, SequenceShard, natural_order, rank_order
from stoker.models.parallel.context_attention import pack_documents
from stoker.models.parallel.ring_attention import RingOptions, ring_blocks


class RingInOneProcess:
    """Attention of whole sequences, computed as a ring of `size` ranks does.

    Args:
        inputs: of whole sequences, without `packed`.
        size: number of ranks.
        flash: use the flash kernels.
        documents: document ids of the tokens, or None.
    """

    def __init__(self, inputs: AttentionInputs, size: int, *, flash: bool, documents: Tensor | None = None) -> None:
        self.size, self.flash, zigzag = size, flash, inputs.causal
        self.zigzag = zigzag
        self.q = [*rank_order(inputs.q, size, zigzag=zigzag).contiguous()]
        key_value = torch.stack([rank_order(each, size, zigzag=zigzag) for each in inputs[1:3]], dim=1)
        self.key_value = [*key_value.contiguous()]
        self.options = [
            RingOptions(
                inputs.causal,
                inputs.window_size,
                inputs.scale,
                inputs.softcap,
                rank,
                size,
                "",
                (zigzag, zigzag),
                flash,
                0.0,
            )
            for rank in range(size)
        ]
        self.others: list[list[Tensor | None]] = []
        for rank in range(size):
            others = [inputs.distance_bias, inputs.alibi_slopes, inputs.key_padding_mask, inputs.rng]
            if documents is not None:
                shard = SequenceShard(ContextParallel(rank, ContextSplit(size, "p2p"), ""), zigzag)
                packed = pack_documents(documents, shard, dtype=inputs.q.dtype, causal=inputs.causal, with_mask=False)
                for call in packed.calls:
                    others += [call.document_ids, call.padded_cu_seqlens]
                    others += [call.key_document_ids, call.padded_key_cu_seqlens]
            self.others.append(others)

    def forward(self) -> Tensor:
        """Return the output of whole sequences."""
        self.results = [self.forward_of(rank) for rank in range(self.size)]
        return natural_order(torch.stack([out for out, _ in self.results]), zigzag=self.zigzag)

    def forward_of(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp of a rank's queries."""
        q = self.q[rank]
        batch, queries, heads, _ = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_zeros(q.shape, dtype=wide), q.new_full((batch, heads, queries), float("-inf"), dtype=wide)
        for step in range(self.size):
            key_value = self.key_value[(rank - step) % self.size]
            for block in ring_blocks(self.options[rank], step, q, key_value, self.others[rank]):
                rows = slice(block.query, block.query + block.inputs.queries)
                found = attend_to_block(block.inputs, flash=self.flash)
                out[:, rows], lse[:, :, rows] = merge_block(out[:, rows], lse[:, :, rows], *found)
        return out.to(q.dtype), lse

    def backward(self, out_gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v of whole sequences; after `forward`."""
        gradients = rank_order(out_gradient, self.size, zigzag=self.zigzag).contiguous()
        wide = self.results[0][1].dtype
        totals = [torch.zeros_like(each, dtype=wide) for each in self.key_value]
        of_queries = [self.backward_of(rank, gradients[rank], totals) for rank in range(self.size)]
        of_keys = torch.stack(totals).to(out_gradient.dtype)
        stacked = torch.stack(of_queries).to(out_gradient.dtype), of_keys[:, 0], of_keys[:, 1]
        q, k, v = (natural_order(each, zigzag=self.zigzag) for each in stacked)
        return q, k, v

    def backward_of(self, rank: int, out_gradient: Tensor, totals: list[Tensor]) -> Tensor:
        """Return the gradient of a rank's queries; add those of keys and values to `totals`."""
        out, lse = self.results[rank]
        q_gradient = torch.zeros_like(out, dtype=lse.dtype)
        for step in range(self.size):
            source = (rank - step) % self.size
            for block in ring_blocks(self.options[rank], step, self.q[rank], self.key_value[source], self.others[rank]):
                rows = slice(block.query, block.query + block.inputs.queries)
                columns = slice(block.key, block.key + block.inputs.keys)
                dq, dk, dv = block_gradients(
                    out_gradient[:, rows], out[:, rows], lse[:, :, rows], block.inputs, flash=self.flash
                )
                q_gradient[:, rows] += dq
                totals[source][0, :, columns] += dk
                totals[source][1, :, columns] += dv
        return q_gradient
