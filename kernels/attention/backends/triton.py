"""Attention backend that calls this package's flash kernels."""

from __future__ import annotations

from torch import Tensor

from ..dropout import dropout_rng
from ..inputs import AttentionInputs


def triton_attention(inputs: AttentionInputs) -> Tensor:
    """Compute attention. Always deterministic.

    Raises:
        ValueError: an argument is not supported by `flash_attention`.
    """
    from ..flash.ops import attention_and_lse

    packed = inputs.packed
    if packed is not None and (inputs.bias is not None or inputs.key_padding_mask is not None):
        raise ValueError("`packed` must be None with a dense bias or a padding mask in `triton`; use `unfused`.")
    q, k, v = inputs[:3] if packed is None else (tensor.flatten(0, 1) for tensor in inputs[:3])
    context, _ = attention_and_lse(
        AttentionInputs(
            q,
            k,
            v,
            causal=inputs.causal,
            window_size=inputs.window_size,
            softmax_scale=inputs.softmax_scale,
            softcap=inputs.softcap,
            attention_chunk=inputs.attention_chunk,
            bias=inputs.bias,
            distance_bias=inputs.distance_bias,
            alibi_slopes=inputs.alibi_slopes,
            sinks=inputs.sinks,
            key_padding_mask=inputs.key_padding_mask,
            dropout_p=inputs.dropout_p,
            rng=dropout_rng(inputs) if inputs.dropout_p else None,
            cu_seqlens_q=None if packed is None else packed.cu_seqlens(),
            cu_seqlens_k=None if packed is None else packed.key_cu_seqlens(),
            max_seqlen_q=None if packed is None else inputs.queries,
            max_seqlen_k=None if packed is None else inputs.keys,
        )
    )
    return context if packed is None else context.unflatten(0, inputs.q.shape[:2])
