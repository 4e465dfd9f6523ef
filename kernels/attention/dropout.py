"""Dropout mask of attention weights: a pure function of key, sequence, head, query and key, in Triton and in PyTorch.

Forward, backward and recomputation regenerate the mask, so it is never stored. The hash is that of `kernels.dropout`:
a row is the weights of a query, its place is (sequence * 2^16 + head) * 2^32 + query.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dropout import derived_key, draw_keys, dropout, keep_mask, random_word
from ..launch import jit, tl
from .inputs import AttentionInputs


@jit
def head_dropout_key(rng_pointer, sequence, head):
    """Return the key of a head's mask, and the first query (high word) and first key (low word), both int64."""
    low, high = tl.load(rng_pointer).to(tl.uint32), tl.load(rng_pointer + 1).to(tl.uint32)
    number = tl.cast(sequence, tl.int64) * 65536 + head + tl.load(rng_pointer + 3)
    low, high = derived_key(low, high, number.to(tl.uint32))
    first = (tl.load(rng_pointer + 4) << 32) | (tl.load(rng_pointer + 2) & 0xFFFFFFFF)
    return (high.to(tl.int64) << 32) | low.to(tl.int64), first


@jit
def tile_keep_mask(head_key, first, query, key, threshold):
    """Return the keep mask of a tile; `query` and `key` are broadcastable to it, the rest is of `head_dropout_key`."""
    number = (query + (first >> 32)).to(tl.uint32)
    low, high = derived_key(head_key.to(tl.uint32), (head_key >> 32).to(tl.uint32), number)
    return random_word(low, high, (key + (first & 0xFFFFFFFF)).to(tl.uint32)) >= threshold


def dropout_rng(inputs: AttentionInputs) -> Tensor:
    """Return the `rng` of a call with dropout, drawn from the default generator of the device if it is not given."""
    return draw_keys(device=inputs.q.device) if inputs.rng is None else inputs.rng


def weight_rows(rng: Tensor, *, batch: int, heads: int, queries: int, first_sequence: int = 0) -> tuple[Tensor, Tensor]:
    """Return key and places of the rows (batch * heads * queries,) of attention weights, as of `kernels.dropout`.

    Args:
        rng: int64 (2,) or (5,), see `AttentionInputs`.
        batch: sequences.
        heads: query heads.
        queries: queries.
        first_sequence: index in the call of the first sequence.
    """
    device = rng.device
    sequence = torch.arange(first_sequence, first_sequence + batch, device=device)[:, None, None] << 48
    place = sequence + (torch.arange(heads, device=device)[:, None] << 32) + torch.arange(queries, device=device)
    if len(rng) > 2:
        place = place + (rng[3] << 32) + rng[4]
    return rng[:3], place.flatten()


def dropout_keep_mask(
    rng: Tensor, dropout_p: float, *, batch: int, heads: int, queries: int, keys: int, first_sequence: int = 0
) -> Tensor:
    """Return the keep mask of a call, bool (batch, heads, queries, keys), in plain PyTorch; True for kept weights.

    Arguments as in `weight_rows`.
    """
    key, rows = weight_rows(rng, batch=batch, heads=heads, queries=queries, first_sequence=first_sequence)
    return keep_mask(key, rows, keys, dropout_p).view(batch, heads, queries, keys)


def call_keep_mask(inputs: AttentionInputs) -> Tensor:
    """Return the keep mask of a dense call with dropout, bool (batch, heads, queries, keys)."""
    batch, queries, heads, _ = inputs.q.shape
    return dropout_keep_mask(
        dropout_rng(inputs), inputs.dropout_p, batch=batch, heads=heads, queries=queries, keys=inputs.keys
    )


def move_rng(rng: Tensor, *, key: int = 0, head: int = 0, query: int = 0) -> Tensor:
    """Return the `rng` of a call that starts so many keys, heads and queries after that of `rng`."""
    firsts = F.pad(F.pad(F.pad(rng.new_zeros(2), (0, 1), value=key), (0, 1), value=head), (0, 1), value=query)
    return firsts + (rng if len(rng) == 5 else F.pad(rng, (0, 3)))


def dropout_weights(weights: Tensor, dropout_p: float, rng: Tensor) -> Tensor:
    """Return attention weights (batch, heads, queries, keys) after dropout."""
    batch, heads, queries, _ = weights.shape
    return dropout(weights, dropout_p, *weight_rows(rng, batch=batch, heads=heads, queries=queries))
