"""What the backward pass of a stack runs again, as policies: one class for each, which `apply` sets up in a stack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ..kernels.attention.backends import AttentionFunction
from ..kernels.attention.dispatch import Decision
from ..kernels.attention.scores_again import attention_with_scores_again, serves
from ..kernels.attention.unfused import UnfusedAttention
from .checkpointing import run_again
from .config.memory_slice import RecomputeSlice
from .mlp import MLP
from .moe.layer import MoE
from .stack import Layer, Stack


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
            stack.recompute_chunk = self.chunk
            return
        for layer in _layers(stack)[: self.number]:
            layer.recompute = True


@dataclass(frozen=True, slots=True)
class Norms:
    """In the layers from `first` on, the norm before a projection is run again with it, up to its product."""

    first: int

    def apply(self, stack: Stack) -> None:
        """Set it up in a stack."""
        for layer in _layers(stack)[self.first :]:
            layer.recompute_norms = True


@dataclass(frozen=True, slots=True)
class MLPActivations:
    """In the layers from `first` on, what lies between the projections of an MLP or of a shared expert is run again."""

    first: int

    def apply(self, stack: Stack) -> None:
        """Set it up in a stack."""
        for layer in _layers(stack)[self.first :]:
            mlp = layer.mlp.shared if isinstance(layer.mlp, MoE) else layer.mlp
            if isinstance(mlp, MLP):
                mlp.recompute = True


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """In the layers from `first` on, router and experts are run again as a whole."""

    first: int

    def apply(self, stack: Stack) -> None:
        """Set it up in a stack."""
        for layer in _layers(stack)[self.first :]:
            if isinstance(layer.mlp, MoE):
                layer.mlp.recompute = True


@dataclass(frozen=True, slots=True)
class CoreAttention:
    """In the layers from `first` on, the scores of attention and their softmax are made again (arXiv 2205.05198).

    Attributes:
        first: number of a layer.
        own: of self-attention; False where its backend keeps no scores.
        cross: likewise of cross-attention.
    """

    first: int
    own: bool
    cross: bool

    def apply(self, stack: Stack) -> None:
        """Set it up in a stack."""
        for layer in _layers(stack)[self.first :]:
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
        draws, function = dropout > 0, self.function
        if not torch.is_grad_enabled():
            return function(query, key, value, dropout=dropout, **options)
        in_kernels = isinstance(function, UnfusedAttention) and function.masked_softmax_fusion
        if in_kernels and serves(query, dropout=dropout, **options):
            return attention_with_scores_again(query, key, value, scale=options["scale"], causal=options["causal"])
        if torch.compiler.is_compiling() and isinstance(function, UnfusedAttention):
            weights = run_again(function.weights, draws, query, key, dropout=dropout, **options)
            return function.product(weights, value)
        # the second run ends where the last product has kept its arguments
        return run_again(function, draws, query, key, value, dropout=dropout, **options)


def policies_of(
    recompute: RecomputeSlice, decisions: Mapping[str, Decision], own: str, cross: str | None = None
) -> Iterator[RecomputePolicy]:
    """The policies of a stack.

    Args:
        recompute: what it runs again.
        decisions: what the dispatcher chose for each attention and kind of call of the model.
        own: among them the self-attention of the stack in training.
        cross: likewise its cross-attention; None without.
    """
    first, modules = recompute.layers, recompute.modules
    if first:
        yield WholeLayers(first, recompute.chunk)
    if "norm" in modules:
        yield Norms(first)
    if "mlp_activation" in modules:
        yield MLPActivations(first)
    if "moe" in modules:
        yield ExpertLayers(first)
    if "core_attention" in modules:
        keeping = {label for label, decision in decisions.items() if decision.keeps_scores}
        yield CoreAttention(first, own=own in keeping, cross=cross in keeping)


def _layers(stack: Stack) -> Sequence[Layer]:
    return [cast(Layer, layer) for layer in stack.layers]
