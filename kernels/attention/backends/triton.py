"""Our flash kernels as a backend of the dispatcher."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..packed_sequences import PackedSequences

_SEEDS = 2**62


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
    """Attend, with the arguments of `AttentionFunction`.

    Deterministic always. The seed of a dropout mask is drawn from torch's generator of the device, so that
    recomputation under a restored state gives the same mask.

    Raises:
        ValueError: an argument that `flash_attention` refuses.
    """
    from ..flash.ops import flash_attention

    window_size = (-1, -1) if window is None else window
    rng = _draw(query.device) if dropout else None
    if packed is None:
        context = flash_attention(
            query, key, value, causal=causal, window_size=window_size, softmax_scale=scale, softcap=softcap, bias=bias,
            distance_bias=distance_bias, alibi_slopes=alibi_slopes, dropout_p=dropout, rng=rng,
            key_padding_mask=key_padding_mask, deterministic=True,
        )  # fmt: skip
        assert isinstance(context, Tensor)
        return context
    if bias is not None or key_padding_mask is not None:
        raise ValueError("`packed` must not meet a dense bias or a padding mask in `triton`; use `unfused`.")
    context = flash_attention(
        query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), causal=causal, window_size=window_size,
        softmax_scale=scale, softcap=softcap, distance_bias=distance_bias, alibi_slopes=alibi_slopes,
        dropout_p=dropout, rng=rng, cu_seqlens_q=packed.cu_seqlens(), cu_seqlens_k=packed.key_cu_seqlens(),
        max_seqlen_q=query.shape[1], max_seqlen_k=key.shape[1], deterministic=True,
    )  # fmt: skip
    assert isinstance(context, Tensor)
    return context.unflatten(0, query.shape[:2])


def _draw(device: torch.device) -> Tensor:
    """A new [seed, 0], without a wait for the device."""
    return F.pad(torch.randint(_SEEDS, (1,), dtype=torch.int64, device=device), (0, 1))
