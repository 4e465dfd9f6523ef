"""Recompute policies: one class per kind of activation checkpointing, applied to a stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ...kernels.attention.backends.registry import AttentionFunction
from ...kernels.attention.backends.unfused import UnfusedAttention
from ...kernels.attention.dispatch import BackendSelection
from ...kernels.attention.inputs import AttentionInputs
from ...kernels.attention.recompute_scores import attention_recompute_scores, supports
from ..config.memory import RecomputeModule
from ..config.slices import StackSlice
from ..layers.mlp import MLP
from ..memory.activation_checkpoint import run_with_recompute, uses_rng
from ..moe.moe_layer import MoE
from ..stack import Layer, Stack


class RecomputePolicy(Protocol):
    """Recomputation of some activations of a stack in the backward, in training only."""

    def apply(self, stack: Stack) -> None:
        """Enable the policy in a stack that has not run yet."""
        ...


@dataclass(frozen=True, slots=True)
class FullRecompute:
    """Full recompute of the first `num_layers` layers, saving one input per chunk of `chunk_size` layers.

    With chunks of one layer, activation checkpointing is inside the compiled graph of the layer: the compiler fuses the
    recomputation into the backward and drops what is not needed, above all the last matmul.
    """

    num_layers: int
    chunk_size: int

    def apply(self, stack: Stack) -> None:
        """See `RecomputePolicy`; chunks cover all layers of the stack."""
        if self.chunk_size > 1:
            stack.recompute_chunk, stack.preserve_rng_state = self.chunk_size, uses_rng(stack)
            return
        for layer in _layers(stack, range(self.num_layers)):
            layer.recompute, layer.preserve_rng_state = True, uses_rng(layer)


@dataclass(frozen=True, slots=True)
class NormRecompute:
    """Recompute the norm before a projection, in these layers."""

    numbers: Sequence[int]

    def apply(self, stack: Stack) -> None:
        """See `RecomputePolicy`."""
        for layer in _layers(stack, self.numbers):
            layer.recompute_norms = True


@dataclass(frozen=True, slots=True)
class MLPActivationRecompute:
    """Recompute everything between the projections of an MLP or shared expert, in these layers."""

    numbers: Sequence[int]

    def apply(self, stack: Stack) -> None:
        """See `RecomputePolicy`."""
        for layer in _layers(stack, self.numbers):
            mlp = layer.mlp.shared if isinstance(layer.mlp, MoE) else layer.mlp
            if isinstance(mlp, MLP):
                mlp.recompute = True


@dataclass(frozen=True, slots=True)
class MoERecompute:
    """Recompute router and experts as a whole, in these layers."""

    numbers: Sequence[int]

    def apply(self, stack: Stack) -> None:
        """See `RecomputePolicy`."""
        for layer in _layers(stack, self.numbers):
            if isinstance(layer.mlp, MoE):
                layer.mlp.recompute, layer.mlp.preserve_rng_state = True, uses_rng(layer.mlp)


@dataclass(frozen=True, slots=True)
class CoreAttentionRecompute:
    """Recompute attention scores and softmax, in these layers (selective recomputation, arXiv 2205.05198).

    Attributes:
        numbers: indices of the layers.
        self_attention: apply to self-attention; False if its backend saves no scores.
        cross_attention: apply to cross-attention, likewise.
    """

    numbers: Sequence[int]
    self_attention: bool
    cross_attention: bool

    def apply(self, stack: Stack) -> None:
        """See `RecomputePolicy`."""
        for layer in _layers(stack, self.numbers):
            for attention, wanted in (
                (layer.attention, self.self_attention),
                (layer.cross_attention, self.cross_attention),
            ):
                if attention is not None and wanted and "training" in attention.backends:
                    attention.backends["training"] = RecomputedAttention(attention.backends["training"])


class RecomputedAttention:
    """Attention function that saves only queries, keys and values, and recomputes the scores in the backward.

    The matmul with the values is not recomputed, except in compiled layers with a backend other than `unfused`. For
    calls of `unfused` that its kernels support, the log-sum-exps are saved too and the scores recomputed from them.

    Args:
        function: attention function to wrap.
    """

    def __init__(self, function: AttentionFunction) -> None:
        self.function = function

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """Compute attention."""
        uses_rng, function = inputs.dropout_p > 0, self.function
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


def recompute_policies(
    stack_slice: StackSlice,
    decisions: Mapping[str, BackendSelection],
    self_attention: str,
    cross_attention: str | None = None,
    *,
    offloads: bool,
) -> Iterator[RecomputePolicy]:
    """Yield the recompute policies of a stack.

    Args:
        stack_slice: slice of the stack.
        decisions: attention backends of the model by label.
        self_attention: label of the stack's self-attention in training.
        cross_attention: label of its cross-attention in training; None without.
        offloads: CPU offloading is active, which requires a GPU.
    """
    recompute = stack_slice.recompute
    if recompute is not None and recompute.layers:
        yield FullRecompute(recompute.layers, recompute.chunk)
    recomputed = [
        stack_slice.recomputed_modules(number, offloading=offloads) for number in range(stack_slice.num_layers)
    ]
    saves_scores = {label for label, decision in decisions.items() if decision.saves_scores}
    policies: dict[RecomputeModule, Callable[[Sequence[int]], RecomputePolicy]] = {
        "norm": NormRecompute,
        "mlp_activation": MLPActivationRecompute,
        "moe": MoERecompute,
        "core_attention": partial(
            CoreAttentionRecompute,
            self_attention=self_attention in saves_scores,
            cross_attention=cross_attention in saves_scores,
        ),
    }
    for name, policy in policies.items():
        if numbers := [number for number, modules in enumerate(recomputed) if name in modules]:
            yield policy(numbers)


def _layers(stack: Stack, numbers: Sequence[int]) -> Iterator[Layer]:
    return (cast(Layer, stack.layers[number]) for number in numbers)
