"""Attention backend that calls this package's flash kernels."""

from __future__ import annotations

from torch import Tensor

from ..dropout import dropout_rng
from ..inputs import AttentionInputs


def triton_attention(inputs: AttentionInputs, *, atomic: bool = False) -> Tensor:
    """Compute attention, deterministic without `atomic` (see `attention_and_lse`), which has no packed documents.

    Raises:
        ValueError: an argument is not supported by `flash_attention`.
    """
    from ..flash.ops import attention_and_lse

    packed = inputs.packed
    if packed is not None and (inputs.bias is not None or inputs.key_padding_mask is not None):
        raise ValueError("`packed` must be None with a dense bias or a padding mask in `triton`; use `unfused`.")
    inputs = inputs._replace(rng=dropout_rng(inputs) if inputs.dropout_p else None)
    if packed is None:
        return attention_and_lse(inputs, atomic=atomic)[0]
    q, k, v = (tensor.flatten(0, 1) for tensor in inputs[:3])
    context, _ = attention_and_lse(
        inputs._replace(
            q=q,
            k=k,
            v=v,
            packed=None,
            cu_seqlens_q=packed.cu_seqlens(),
            cu_seqlens_k=packed.key_cu_seqlens(),
            max_seqlen_q=inputs.queries,
            max_seqlen_k=inputs.keys,
        )
    )
    return context.unflatten(0, inputs.q.shape[:2])
