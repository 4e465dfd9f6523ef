"""Attention that recomputes its scores in the backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.attention.backends.registry import AttentionFunction
from ...kernels.attention.backends.unfused import UnfusedAttention
from ...kernels.attention.inputs import AttentionInputs
from ...kernels.attention.recompute_scores import attention_recompute_scores, supports
from ..memory.recompute import run_with_recompute


class RecomputedAttention:
    """Attention function that saves only queries, keys and values, and recomputes the scores in the backward.

    The matmul with the values is not recomputed, except in compiled layers with a backend other than `unfused`. For
    calls of `unfused` that its kernels support, the log-sum-exps are saved too and the scores recomputed from them.

    Args:
        function: attention function to wrap.
        uses_rng: its dropout draws from PyTorch's generator, whose state is restored for the recomputation.
    """

    def __init__(self, function: AttentionFunction, uses_rng: bool) -> None:
        self.function = function
        self.uses_rng = uses_rng

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """Compute attention."""
        uses_rng, function = self.uses_rng, self.function
        if not torch.is_grad_enabled():
            return function(inputs)
        query, key, value = inputs[:3]
        options: tuple[Any, ...] = inputs[3:]
        if isinstance(function, UnfusedAttention):
            if function.masked_softmax_fusion and supports(inputs):
                return attention_recompute_scores(query, key, value, scale=inputs.scale, causal=inputs.causal)
            if torch.compiler.is_compiling():
                weights = run_with_recompute(
                    lambda query, key: function.weights(AttentionInputs(query, key, value, *options)),
                    uses_rng,
                    query,
                    key,
                )
                return function.weighted_sum(weights, value)
        # Early stop: the recomputation ends once the last matmul has saved its arguments. Queries, keys and values are
        # arguments of the recomputed function, so that they pass through saved-tensor hooks.
        return run_with_recompute(
            lambda query, key, value: function(AttentionInputs(query, key, value, *options)),
            uses_rng,
            query,
            key,
            value,
        )
