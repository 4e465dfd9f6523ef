"""Keys and values that a text which grows token by token does not compute again.

Texts of a batch differ in length, and their lengths stand on the device: shapes never change, so that a CUDA graph of a
step stays right. A text starts at the left of its row, and what follows it there is not read before it is overwritten.
With a window of w tokens before its own a query needs w + 1 keys: the cache is a ring of as many slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LayerCache(NamedTuple):
    """Keys and values of the self-attention of one layer.

    Slot s holds the newest token whose position leaves the remainder s by the number of slots.

    Attributes:
        key: (rows, groups, slots, head_dim), turned by their positions.
        value: likewise.
        lengths: int64 (rows,), the tokens of each text with those of the call at hand.
        positions: int64 (rows,), of the last token of each text.
    """

    key: Tensor
    value: Tensor
    lengths: Tensor
    positions: Tensor

    def begin(self, key: Tensor, value: Tensor) -> None:
        """Take in the beginnings of texts.

        Args:
            key: (rows, tokens, groups, head_dim), of which the first `lengths` of each row are real.
            value: likewise.
        """
        tokens, slots = key.shape[1], self.key.shape[2]
        newest = None
        if tokens > slots:
            slot = torch.arange(slots, device=key.device)
            last = self.positions[:, None]
            newest = (last - (last - slot) % slots).clamp(min=0)[:, None, :, None]  # below 0: a slot without a token
        for cached, given in ((self.key, key), (self.value, value)):
            given = given.transpose(1, 2).to(cached.dtype)
            if newest is None:
                cached[:, :, :tokens] = given
            else:
                cached.copy_(given.gather(2, newest.expand_as(cached)))


class CachedMemory(NamedTuple):
    """What the cross-attention of one layer reads of texts that were encoded once.

    Attributes:
        key: (memories, groups, tokens, head_dim); a multiple of as many rows reads them.
        value: likewise.
        memory_lengths: int64 (memories,), tokens of each memory.
        positions: int64 (rows,), of the queries.
        distance_bias: (heads, 2 R + 1), what is added to the scores of a key d places after its query, both texts
            counted from their beginnings; None for nothing.
    """

    key: Tensor
    value: Tensor
    memory_lengths: Tensor
    positions: Tensor
    distance_bias: Tensor | None


def slots_of(tokens: int, window: int) -> int:
    """Slots of a row for texts of so many tokens, of which a query sees `window` before its own, -1 for all."""
    return tokens if window < 0 else min(tokens, window + 1)


class KVCache:
    """The caches of all layers of a stack, for one batch of texts after the other.

    Args:
        layers: number of them.
        rows: texts at once.
        groups: key and value heads.
        slots: tokens of the longest text.
        head_dim: width of a head.
        window: tokens that a query sees before its own; -1 for all.
        dtype: of keys and values.
        device: where they are.
    """

    def __init__(
        self,
        layers: int,
        *,
        rows: int,
        groups: int,
        slots: int,
        head_dim: int,
        window: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slots = slots
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        shape = (rows, groups, slots_of(slots, window), head_dim)
        self.layers = [
            LayerCache(
                torch.zeros(shape, dtype=dtype, device=device),
                torch.zeros(shape, dtype=dtype, device=device),
                self.lengths,
                self.positions,
            )
            for _ in range(layers)
        ]

    def begin(self, lengths: Tensor) -> None:
        """Forget the texts before; the next ones have so many tokens, int64 (rows,)."""
        self.lengths.copy_(lengths)
        torch.sub(self.lengths, 1, out=self.positions)

    def advance(self) -> Tensor:
        """Count one more token of each text; its position, int64 (rows, 1). A full one stays at its last."""
        self.lengths.add_(1).clamp_(max=self.slots)
        return torch.sub(self.lengths, 1, out=self.positions)[:, None]

    def reorder(self, rows: Tensor) -> None:
        """Let row r go on as row `rows[r]`; int64 (rows,)."""
        self.begin(self.lengths[rows])
        for layer in self.layers:
            layer.key.copy_(layer.key[rows])
            layer.value.copy_(layer.value[rows])
