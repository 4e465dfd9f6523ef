"""Which attention weights dropout keeps: a pure function of seed, offset and place, the same in Triton and in torch.

The mask of forward, backward and recomputation is computed again each time, so none is ever stored. Philox4x32 with
seven rounds, which pass the tests of BigCrush (Salmon et al., SC 2011).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..launch import HAS_TRITON, jit, tl

ROUNDS = 7
_ROUNDS: Any = tl.constexpr(ROUNDS) if HAS_TRITON else ROUNDS
_WORD = 0xFFFFFFFF


def dropout_threshold(dropout_p: float) -> int:
    """Random words (32 bits) below this are dropped."""
    return min(round(dropout_p * 2**32), _WORD)


@jit
def kept_by_dropout(seed, index, threshold):
    """Whether the weights with the counters `index` (any shape, int64) are kept, bool; `seed` is an int64 scalar."""
    low = (index & 0xFFFFFFFF).to(tl.uint32)
    high = ((index >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low * 0
    word, _, _, _ = tl.philox(seed, low, high, zero, zero, _ROUNDS)
    return word >= tl.cast(threshold, tl.uint32)


def dropout_mask(
    rng: Tensor,
    dropout_p: float,
    *,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    queries_bound: int,
    keys_bound: int,
    first_sequence: int = 0,
) -> Tensor:
    """The mask of a call in plain torch.

    The weight of query i, key j, head h and sequence b has the counter
    ((b * heads + h) * queries_bound + i) * keys_bound + j + offset.

    Args:
        rng: int64 (2,): seed and offset.
        dropout_p: probability of dropping a weight.
        batch: sequences of the mask.
        heads: query heads.
        queries: queries of the mask.
        keys: keys of the mask.
        queries_bound: queries of a sequence in the call: `queries` when dense, `max_seqlen_q` when packed.
        keys_bound: keys of a sequence in the call; likewise.
        first_sequence: number of the first sequence of the mask in the call.

    Returns:
        bool (batch, heads, queries, keys), True for a weight that is kept.
    """
    device = rng.device
    row = torch.arange(first_sequence, first_sequence + batch, device=device)[:, None] * heads
    row = (row + torch.arange(heads, device=device))[..., None] * queries_bound + torch.arange(queries, device=device)
    index = row[..., None] * keys_bound + torch.arange(keys, device=device) + rng[1]
    return _first_philox_word(rng[0], index) >= dropout_threshold(dropout_p)


def _first_philox_word(seed: Tensor, index: Tensor) -> Tensor:
    """First word of Philox4x32 with the counter (low word, high word, 0, 0), as int64."""
    c0, c1 = index & _WORD, (index >> 32) & _WORD
    c2 = c3 = torch.zeros_like(index)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(ROUNDS):
        # products of two words wrap in int64, which leaves both of their words right
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = ((second >> 32) & _WORD) ^ c1 ^ k0, ((first >> 32) & _WORD) ^ c3 ^ k1
        c1, c3 = second & _WORD, first & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0
