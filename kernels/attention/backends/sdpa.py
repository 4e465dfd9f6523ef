"""PyTorch's scaled_dot_product_attention restricted to one backend each, without fallback."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..dense_bias import build_mask, combine_biases, fully_masked_rows
from ..inputs import AttentionInputs
from ..reference import visibility_mask


@dataclass(frozen=True, slots=True)
class SDPAAttention:
    """SDPA restricted to one backend.

    Attributes:
        backend: the only backend PyTorch may use.
        repeat_groups: repeat grouped keys and values, for a backend without grouped-query attention.
    """

    backend: SDPBackend
    repeat_groups: bool = False

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """Compute attention.

        Raises:
            ValueError: a window, chunks, a softcap, sinks, or a causal mask over unequal lengths, which SDPA aligns
                top-left.
            RuntimeError: from PyTorch, if the backend does not support these inputs.
        """
        if inputs.window_size is not None:
            raise ValueError(
                f"`window_size` ({inputs.window_size}) must be None, not supported by SDPA; use `unfused`."
            )
        if inputs.attention_chunk:
            raise ValueError(f"`attention_chunk` ({inputs.attention_chunk}) must be 0 in SDPA; use `unfused`.")
        if inputs.softcap:
            raise ValueError(f"`softcap` ({inputs.softcap}) must be 0, not supported by SDPA; use `unfused`.")
        if inputs.sinks is not None:
            raise ValueError(f"`sinks` {tuple(inputs.sinks.shape)} must be None, not supported by SDPA; use `unfused`.")
        query, key, value = inputs[:3]
        queries, keys, causal, packed = inputs.queries, inputs.keys, inputs.causal, inputs.packed
        if causal and queries != keys:
            raise ValueError(f"`causal` must be False for {queries} queries and {keys} keys in SDPA; use `unfused`.")
        bias = combine_biases(inputs)
        if bias is not None:
            bias = bias.to(query.dtype)
        empty = None
        across = packed is not None and packed.key_document_ids is not None
        if inputs.key_padding_mask is not None or across:
            hidden = build_mask(inputs, causal=causal)
            assert hidden is not None
            empty = fully_masked_rows(hidden)
            # fully masked rows are unmasked here and set to 0 below, so that neither they nor their gradients are NaN
            start = query.new_zeros(()) if bias is None else bias
            bias, causal = start.masked_fill(hidden & ~empty, float("-inf")), False
        elif packed is not None:  # the document mask is causal already
            mask = packed.require_mask()
            bias, causal = mask if bias is None else bias + mask, False
        elif bias is not None and causal:  # SDPA accepts either attn_mask or is_causal
            visible = visibility_mask(queries, keys, causal=True, window=None, device=query.device)
            bias, causal = bias.masked_fill(~visible, float("-inf")), False
        per_group = query.shape[2] // key.shape[2]
        if self.repeat_groups and per_group > 1:
            key, value = key.repeat_interleave(per_group, dim=2), value.repeat_interleave(per_group, dim=2)
        with sdpa_kernel([self.backend]):
            context = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                key.transpose(1, 2),
                value.transpose(1, 2),
                attn_mask=bias,
                dropout_p=inputs.dropout_p,
                is_causal=causal,
                scale=inputs.scale,
                enable_gqa=per_group > 1 and not self.repeat_groups,
            )
        if empty is not None:
            context = context.masked_fill(empty, 0.0)
        return context.transpose(1, 2)


sdpa_flash = SDPAAttention(SDPBackend.FLASH_ATTENTION)  # FlashAttention 2 on CUDA, a blocked kernel on CPU
sdpa_efficient = SDPAAttention(SDPBackend.EFFICIENT_ATTENTION, repeat_groups=True)  # no enable_gqa in older versions
sdpa_cudnn = SDPAAttention(SDPBackend.CUDNN_ATTENTION)
sdpa_math = SDPAAttention(SDPBackend.MATH)
