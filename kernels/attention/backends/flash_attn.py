"""Attention backend that calls the flash-attn package (FlashAttention 2); imported at the first call."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from ...launch import disable_compile
from ..argument_checks import check_same_width
from ..inputs import AttentionInputs
from ..packed_sequences import unpadded_cu_seqlens, unpadded_key_cu_seqlens


@dataclass(frozen=True, slots=True)
class FlashAttn:
    """Call `flash_attn_func`, or `flash_attn_varlen_func` for packed documents.

    Attributes:
        deterministic: use the bitwise reproducible backward pass.
    """

    deterministic: bool = False

    @disable_compile
    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """Compute attention.

        Raises:
            ValueError: a bias, chunks, sinks, a padding mask, or slopes that require a gradient.
        """
        for name in ("bias", "distance_bias", "sinks", "key_padding_mask"):
            tensor = getattr(inputs, name)
            if tensor is not None:
                raise ValueError(f"`{name}` {tuple(tensor.shape)} must be None in flash_attn; use `triton`.")
        slopes = inputs.alibi_slopes
        if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
            raise ValueError("`alibi_slopes` must be None or without gradient in flash_attn; use `triton`.")
        check_same_width(inputs)
        if inputs.attention_chunk:
            raise ValueError(f"`attention_chunk` ({inputs.attention_chunk}) must be 0 in flash_attn; use `triton`.")
        package = import_module("flash_attn")
        options = {
            "dropout_p": inputs.dropout_p,
            "softmax_scale": inputs.scale,
            "causal": inputs.causal,
            "window_size": (-1, -1) if inputs.window_size is None else inputs.window_size,
            "softcap": inputs.softcap,
            "alibi_slopes": slopes,
            "deterministic": self.deterministic or torch.are_deterministic_algorithms_enabled(),
        }
        q, k, v = inputs[:3]
        if inputs.packed is None:
            return package.flash_attn_func(q, k, v, **options)
        context = package.flash_attn_varlen_func(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            unpadded_cu_seqlens(inputs.packed),
            unpadded_key_cu_seqlens(inputs.packed),
            inputs.queries,
            inputs.keys,
            **options,
        )
        return context.unflatten(0, q.shape[:2])
