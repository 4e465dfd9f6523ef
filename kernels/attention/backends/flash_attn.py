"""Attention backend that calls the flash-attn package (FlashAttention 2); imported at the first call."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from ..no_compile import disable_compile
from ..packed_sequences import PackedSequences, unpadded_cu_seqlens, unpadded_key_cu_seqlens


@dataclass(frozen=True, slots=True)
class FlashAttn:
    """Call `flash_attn_func`, or `flash_attn_varlen_func` for packed documents.

    Attributes:
        deterministic: use the bitwise reproducible backward pass.
    """

    deterministic: bool = False

    @disable_compile
    def __call__(
        self,
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
        """Compute attention; arguments as in `AttentionFunction`.

        Raises:
            ValueError: a bias, a padding mask, or slopes that require a gradient.
        """
        for name, tensor in (("bias", bias), ("distance_bias", distance_bias), ("key_padding_mask", key_padding_mask)):
            if tensor is not None:
                raise ValueError(f"`{name}` {tuple(tensor.shape)} must be None in flash_attn; use `triton`.")
        if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise ValueError("`alibi_slopes` must be None or without gradient in flash_attn; use `triton`.")
        package = import_module("flash_attn")
        options = {
            "dropout_p": dropout,
            "softmax_scale": scale,
            "causal": causal,
            "window_size": (-1, -1) if window is None else window,
            "softcap": softcap,
            "alibi_slopes": alibi_slopes,
            "deterministic": self.deterministic or torch.are_deterministic_algorithms_enabled(),
        }
        if packed is None:
            return package.flash_attn_func(query, key, value, **options)
        context = package.flash_attn_varlen_func(
            query.flatten(0, 1),
            key.flatten(0, 1),
            value.flatten(0, 1),
            unpadded_cu_seqlens(packed),
            unpadded_key_cu_seqlens(packed),
            query.shape[1],
            key.shape[1],
            **options,
        )
        return context.unflatten(0, query.shape[:2])
