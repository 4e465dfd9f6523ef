"""KV cache for incremental decoding.

The sequences of a batch differ in length; their lengths are tensors on the device, and shapes never change, so that a
decode step can be captured as a CUDA graph. Each sequence starts at slot 0 of its row (right-padded); slots behind its
end are overwritten before they are read. With a sliding window of w previous tokens, a query needs w + 1 keys: the
cache is then a ring buffer of w + 1 slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LayerKVCache(NamedTuple):
    """Cached keys and values of the self-attention of one layer.

    Slot s holds the newest token whose position modulo the number of slots is s.

    Attributes:
        key: (rows, groups, slots, head_dim), after the rotary embedding.
        value: (rows, groups, slots, head_dim).
        lengths: int64 (rows,), length of each sequence including the tokens of the current call.
        positions: int64 (rows,), position of the last token of each sequence.
    """

    key: Tensor
    value: Tensor
    lengths: Tensor
    positions: Tensor

    def prefill(self, key: Tensor, value: Tensor) -> None:
        """Fill the cache with the keys and values of a prefill.

        Args:
            key: (rows, tokens, groups, head_dim), of which the first `lengths` of each row are real.
            value: (rows, tokens, groups, head_dim).
        """
        tokens, slots = key.shape[1], self.key.shape[2]
        newest = None
        if tokens > slots:
            slot = torch.arange(slots, device=key.device)
            last = self.positions[:, None]
            newest = (last - (last - slot) % slots).clamp(min=0)[:, None, :, None]  # below 0: an empty slot
        for cached, new in ((self.key, key), (self.value, value)):
            new = new.transpose(1, 2).to(cached.dtype)
            if newest is None:
                cached[:, :, :tokens] = new
            else:
                cached.copy_(new.gather(2, newest.expand_as(cached)))


class CrossAttentionCache(NamedTuple):
    """Cached cross-attention keys and values of one layer, projected once from the encoder output.

    Attributes:
        key: (memories, groups, tokens, head_dim); each encoder output is read by rows / memories consecutive rows.
        value: (memories, groups, tokens, head_dim).
        memory_lengths: int64 (memories,), number of real tokens of each encoder output.
        positions: int64 (rows,), positions of the queries.
        distance_bias: (heads, 2 R + 1), score bias of key position minus query position; None for none.
    """

    key: Tensor
    value: Tensor
    memory_lengths: Tensor
    positions: Tensor
    distance_bias: Tensor | None


def num_slots(tokens: int, window: int) -> int:
    """Return the slots per row for sequences of up to `tokens` tokens and a window of previous tokens (-1: all)."""
    return tokens if window < 0 else min(tokens, window + 1)


class KVCache:
    """KV caches of all layers of a stack, reused from batch to batch.

    Args:
        groups: key and value heads.
        slots: maximal sequence length.
        window: previous tokens visible to a query; -1 for all.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        batch_size: int,
        groups: int,
        slots: int,
        head_dim: int,
        window: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slots = slots
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.positions = torch.zeros(batch_size, dtype=torch.int64, device=device)
        shape = (batch_size, groups, num_slots(slots, window), head_dim)
        self.layers = [
            LayerKVCache(
                torch.zeros(shape, dtype=dtype, device=device),
                torch.zeros(shape, dtype=dtype, device=device),
                self.lengths,
                self.positions,
            )
            for _ in range(num_layers)
        ]

    def reset(self, lengths: Tensor) -> None:
        """Start a new batch of sequences with the given lengths, int64 (rows,)."""
        self.lengths.copy_(lengths)
        torch.sub(self.lengths, 1, out=self.positions)

    def advance(self) -> Tensor:
        """Add one token to each sequence; return its position, int64 (rows, 1). A full sequence stays at its last."""
        torch.clamp(self.lengths, max=self.slots - 1, out=self.positions)
        torch.add(self.positions, 1, out=self.lengths)
        return self.positions[:, None]

    def reorder(self, rows: Tensor) -> None:
        """Replace row r by row `rows[r]`, int64 (rows,), as beam search does."""
        self.reset(self.lengths[rows])
        for layer in self.layers:
            layer.key.copy_(layer.key[rows])
            layer.value.copy_(layer.value[rows])
