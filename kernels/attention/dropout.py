"""Counter-based dropout mask of attention weights: a pure function of seed, offset and index, in Triton and in PyTorch.

Forward, backward and recomputation regenerate the mask, so it is never stored. Philox4x32 with seven rounds, which pass
BigCrush (Salmon et al., SC 2011).
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
    """Return the threshold of the 32-bit random words below which a weight is dropped."""
    return min(round(dropout_p * 2**32), _WORD)


@jit
def philox_keep_mask(seed, index, threshold):
    """Return the keep mask, bool, of the counters `index` (int64, any shape); `seed` is an int64 scalar."""
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
    """Return the keep mask of a call, in plain PyTorch.

    The counter of the weight of query i, key j, head h and sequence b is
    ((b * heads + h) * queries_bound + i) * keys_bound + j + offset.

    Args:
        rng: int64 (2,): seed and offset.
        dropout_p: probability of dropping a weight.
        batch: sequences of the mask.
        heads: query heads.
        queries: queries of the mask.
        keys: keys of the mask.
        queries_bound: query stride of the counter: `queries` for dense tensors, `max_seqlen_q` for packed ones.
        keys_bound: key stride of the counter, `keys` or `max_seqlen_k`.
        first_sequence: index in the call of the first sequence of the mask.

    Returns:
        bool (batch, heads, queries, keys), True for kept weights.
    """
    device = rng.device
    row = torch.arange(first_sequence, first_sequence + batch, device=device)[:, None] * heads
    row = (row + torch.arange(heads, device=device))[..., None] * queries_bound + torch.arange(queries, device=device)
    index = row[..., None] * keys_bound + torch.arange(keys, device=device) + rng[1]
    return _first_philox_word(rng[0], index) >= dropout_threshold(dropout_p)


def _first_philox_word(seed: Tensor, index: Tensor) -> Tensor:
    """Return the first word of Philox4x32 for the counter (low word, high word, 0, 0), as int64."""
    c0, c1 = index & _WORD, (index >> 32) & _WORD
    c2 = c3 = torch.zeros_like(index)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(ROUNDS):
        # products of two 32-bit words may wrap in int64, which keeps the bits of both result words
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = ((second >> 32) & _WORD) ^ c1 ^ k0, ((first >> 32) & _WORD) ^ c3 ^ k1
        c1, c3 = second & _WORD, first & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0
