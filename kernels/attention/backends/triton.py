"""Attention backend that calls this package's flash kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..packed_sequences import PackedSequences

_MAX_SEED = 2**62


def triton_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    distance_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    packed: PackedSequences | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Compute attention; arguments as in `AttentionFunction`. Always deterministic.

    The seed of a dropout mask is drawn from the device's default generator, so that recomputation under a restored RNG
    state gives the same mask.

    Raises:
        ValueError: an argument is not supported by `flash_attention`.
    """
    from ..flash.ops import flash_attention

    window_size = (-1, -1) if window is None else window
    rng = _draw_seed(query.device) if dropout else None
    if packed is None:
        context = flash_attention(
            query, key, value, causal=causal, window_size=window_size, softmax_scale=scale, softcap=softcap, bias=bias,
            distance_bias=distance_bias, alibi_slopes=alibi_slopes, dropout_p=dropout, rng=rng,
            key_padding_mask=key_padding_mask, deterministic=True,
        )  # fmt: skip
        assert isinstance(context, Tensor)
        return context
    if bias is not None or key_padding_mask is not None:
        raise ValueError("`packed` must be None with a dense bias or a padding mask in `triton`; use `unfused`.")
    context = flash_attention(
        query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), causal=causal, window_size=window_size,
        softmax_scale=scale, softcap=softcap, distance_bias=distance_bias, alibi_slopes=alibi_slopes,
        dropout_p=dropout, rng=rng, cu_seqlens_q=packed.cu_seqlens(), cu_seqlens_k=packed.key_cu_seqlens(),
        max_seqlen_q=query.shape[1], max_seqlen_k=key.shape[1], deterministic=True,
    )  # fmt: skip
    assert isinstance(context, Tensor)
    return context.unflatten(0, query.shape[:2])


def _draw_seed(device: torch.device) -> Tensor:
    """Draw [seed, offset 0] on the device, without synchronization."""
    return F.pad(torch.randint(_MAX_SEED, (1,), dtype=torch.int64, device=device), (0, 1))
