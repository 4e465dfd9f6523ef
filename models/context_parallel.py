"""Context parallelism: the plan that makes a model compute the tokens of one rank of each sequence.

No parameter is split: the gradients of all are the sums over the ranks, as is the loss.
"""

from __future__ import annotations

from typing import cast

from ..kernels.attention.backends.triton import triton_attention
from .config.peft import PeftSlice, PromptSlice
from .language_model import BaseLanguageModel
from .layer import Layer
from .layers.attention import Attention
from .layers.recomputed_attention import RecomputedAttention
from .moe.moe_layer import MoE
from .parallel.context import ContextParallel, SequenceShard
from .parallel.context_attention import context_attention


def check_parts(peft: PeftSlice | None, size: int) -> None:
    """Check that a model has no part which several ranks cannot share.

    Raises:
        ValueError: it has soft prompts.
    """
    if isinstance(peft, PromptSlice):
        raise ValueError(
            f"`context_parallel_size` ({size}) must be 1 for a model with soft prompts, which lengthen sequences after "
            "the ranks have shared them."
        )


def apply_context_parallel(model: BaseLanguageModel, ranks: ContextParallel) -> None:
    """Let a model compute the tokens of this rank (`shard_batch`), in training and evaluation, in place.

    Args:
        model: built for these ranks (`build_model`), with its recomputation.
        ranks: the context-parallel ranks.
    """
    for stack in model.stacks:
        shard = stack.shard = SequenceShard(ranks, zigzag=stack is not getattr(model, "encoder", None))
        for module in stack.layers:
            layer = cast(Layer, module)
            if isinstance(layer.mlp, MoE):
                layer.mlp.router.shard = shard
            _exchange(layer.attention, ranks, (shard.zigzag, shard.zigzag))
            if layer.cross_attention is not None:
                _exchange(layer.cross_attention, ranks, (shard.zigzag, False))


def _exchange(attention: Attention, ranks: ContextParallel, zigzag: tuple[bool, bool]) -> None:
    for kind, function in attention.backends.items():
        if ranks.split.ring_ranks > 1 and isinstance(function, RecomputedAttention):
            function = function.function  # a ring saves no scores
        flash = function is triton_attention
        attention.backends[kind] = context_attention(function, ranks, zigzag=zigzag, flash=flash)
