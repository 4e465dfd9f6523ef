"""Attention that recomputes its scores in the backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.attention.backends.registry import AttentionFunction
from ...kernels.attention.backends.unfused import UnfusedAttention
from ...kernels.attention.recompute_scores import attention_recompute_scores, supports
from ..memory.recompute import run_with_recompute


class RecomputedAttention:
    """Attention function that saves only queries, keys and values, and recomputes the scores in the backward.

    The matmul with the values is not recomputed, except in compiled layers with a backend other than `unfused`. For
    calls of `unfused` that its kernels support, the log-sum-exps are saved too and the scores recomputed from them.

    Args:
        function: attention function to wrap.
    """

    def __init__(self, function: AttentionFunction) -> None:
        self.function = function

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, dropout: float = 0.0, **options: Any) -> Tensor:
        """Compute attention, with the arguments of `AttentionFunction`."""
        uses_rng, function = dropout > 0, self.function
        if not torch.is_grad_enabled():
            return function(query, key, value, dropout=dropout, **options)
        fused_softmax = isinstance(function, UnfusedAttention) and function.masked_softmax_fusion
        if fused_softmax and supports(query, dropout=dropout, **options):
            return attention_recompute_scores(query, key, value, scale=options["scale"], causal=options["causal"])
        if torch.compiler.is_compiling() and isinstance(function, UnfusedAttention):
            weights = run_with_recompute(function.weights, uses_rng, query, key, dropout=dropout, **options)
            return function.weighted_sum(weights, value)
        # Early stop: the recomputation ends once the last matmul has saved its arguments.
        return run_with_recompute(function, uses_rng, query, key, value, dropout=dropout, **options)
