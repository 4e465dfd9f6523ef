"""What the backward pass of a stack runs again, as policies: one class for each, which `apply` sets up in a stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ...kernels.attention.backends.registry import AttentionFunction
from ...kernels.attention.backends.unfused import UnfusedAttention
from ...kernels.attention.dispatch import Decision
from ...kernels.attention.recompute_scores import attention_with_scores_again, serves
from ..config.memory import RecomputeModule
from ..config.slices import StackSlice
from ..layers.mlp import MLP
from ..memory.activation_checkpoint import draws, run_again
from ..moe.moe_layer import MoE
from ..stack import Layer, Stack


class RecomputePolicy(Protocol):
    """Something that a stack shall run again in the backward, in training alone."""

    def apply(self, stack: Stack) -> None:
        """Set it up in a stack that has not run yet."""
        ...


@dataclass(frozen=True, slots=True)
class WholeLayers:
    """Of the first `number` layers only the input is kept, of `chunk` layers in a row only that of the first.

    The checkpoint of a single layer is inside its compiled graph: the compiler fuses the second run into the backward
    and leaves out what nothing needs, the last matrix product above all.
    """

    number: int
    chunk: int

    def apply(self, stack: Stack) -> None:
        """Set it up in a stack; chunks are of all of its layers."""
        if self.chunk > 1:
            stack.recompute_chunk, stack.recompute_draws = self.chunk, draws(stack)
            return
        for layer in _layers(stack, range(self.number)):
            layer.recompute, layer.recompute_draws = True, draws(layer)


@dataclass(frozen=True, slots=True)
class Norms:
    """In these layers the norm before a projection is run again with it, up to its product."""

    numbers: Sequence[int]

    def apply(self, stack: Stack) -> None:
        """Set it up in a stack."""
        for layer in _layers(stack, self.numbers):
            layer.recompute_norms = True


@dataclass(frozen=True, slots=True)
class MLPActivations:
    """In these layers, what lies between the projections of an MLP or of a shared expert is run again."""

    numbers: Sequence[int]

    def apply(self, stack: Stack) -> None:
        """Set it up in a stack."""
        for layer in _layers(stack, self.numbers):
            mlp = layer.mlp.shared if isinstance(layer.mlp, MoE) else layer.mlp
            if isinstance(mlp, MLP):
                mlp.recompute = True


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """In these layers router and experts are run again as a whole."""

    numbers: Sequence[int]

    def apply(self, stack: Stack) -> None:
        """Set it up in a stack."""
        for layer in _layers(stack, self.numbers):
            if isinstance(layer.mlp, MoE):
                layer.mlp.recompute, layer.mlp.recompute_draws = True, draws(layer.mlp)


@dataclass(frozen=True, slots=True)
class CoreAttention:
    """In these layers the scores of attention and their softmax are made again (arXiv 2205.05198).

    Attributes:
        numbers: of the layers.
        own: of self-attention; False where its backend keeps no scores.
        cross: likewise of cross-attention.
    """

    numbers: Sequence[int]
    own: bool
    cross: bool

    def apply(self, stack: Stack) -> None:
        """Set it up in a stack."""
        for layer in _layers(stack, self.numbers):
            for attention, wanted in ((layer.attention, self.own), (layer.cross_attention, self.cross)):
                if attention is not None and wanted and "training" in attention.backends:
                    attention.backends["training"] = RecomputedAttention(attention.backends["training"])


class RecomputedAttention:
    """An attention function of which queries, keys and values are kept, and nothing else.

    The product with the values is not made again, but in compiled layers with another backend than `unfused`. Where its
    kernels serve a call of `unfused`, the log-sum-exps are kept too, and the scores come again from them.

    Args:
        function: what runs again.
    """

    def __init__(self, function: AttentionFunction) -> None:
        self.function = function

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, dropout: float = 0.0, **options: Any) -> Tensor:
        """Attend, with the arguments of `AttentionFunction`."""
        drops, function = dropout > 0, self.function
        if not torch.is_grad_enabled():
            return function(query, key, value, dropout=dropout, **options)
        in_kernels = isinstance(function, UnfusedAttention) and function.masked_softmax_fusion
        if in_kernels and serves(query, dropout=dropout, **options):
            return attention_with_scores_again(query, key, value, scale=options["scale"], causal=options["causal"])
        if torch.compiler.is_compiling() and isinstance(function, UnfusedAttention):
            weights = run_again(function.weights, drops, query, key, dropout=dropout, **options)
            return function.product(weights, value)
        # the second run ends where the last product has kept its arguments
        return run_again(function, drops, query, key, value, dropout=dropout, **options)


def policies_of(
    described: StackSlice, decisions: Mapping[str, Decision], own: str, cross: str | None = None, *, offloads: bool
) -> Iterator[RecomputePolicy]:
    """The policies of a stack.

    Args:
        described: the stack.
        decisions: what the dispatcher chose for each attention and kind of call of the model.
        own: among them the self-attention of the stack in training.
        cross: likewise its cross-attention; None without.
        offloads: what it says of host memory has an effect: there is a GPU.
    """
    recompute = described.recompute
    if recompute is not None and recompute.layers:
        yield WholeLayers(recompute.layers, recompute.chunk)
    parts = [described.made_again(number, offloads=offloads) for number in range(described.num_layers)]
    keeping = {label for label, decision in decisions.items() if decision.keeps_scores}
    policies: dict[RecomputeModule, Callable[[Sequence[int]], RecomputePolicy]] = {
        "norm": Norms,
        "mlp_activation": MLPActivations,
        "moe": ExpertLayers,
        "core_attention": partial(CoreAttention, own=own in keeping, cross=cross in keeping),
    }
    for name, policy in policies.items():
        if numbers := [number for number, made_again in enumerate(parts) if name in made_again]:
            yield policy(numbers)


def _layers(stack: Stack, numbers: Sequence[int]) -> Iterator[Layer]:
    return (cast(Layer, stack.layers[number]) for number in numbers)
