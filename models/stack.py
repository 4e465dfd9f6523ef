"""One transformer layer, and a stack of them with its final norm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.attention.packed_sequences import PackedSequences
from .dispatch.attention_calls import CallKind
from .kv_cache import CachedMemory, LayerCache
from .layers.attention_bias import ScorePositions, ScoreTerms
from .layers.compiling import prepare_compiler
from .layers.cross_attention import CrossAttention, Memory
from .layers.fused_linear import spares
from .layers.mlp import MLP
from .layers.norm import LayerNorm, Read, RMSNorm
from .layers.position_embeddings import RotaryEmbedding, Rotation, XPosEmbedding
from .layers.self_attention import SelfAttention
from .memory.activation_checkpoint import recomputes, run_again
from .memory.offload_activations import ActivationOffload
from .memory.offload_weights import WeightOffload
from .moe.moe_layer import MoE

BlockType = Literal["pre_ln", "post_ln", "normformer", "parallel_ln"]


class Layer(nn.Module):
    """Self-attention, cross-attention where there is a memory, MLP: each adds to the stream x.

    `pre_ln`: x + part(norm(x)) (arXiv 2002.04745). `post_ln`: norm(x + part(x)) (arXiv 1706.03762). `normformer`:
    pre-norm, with norms after each attention and inside the MLP (arXiv 2110.09456). `parallel_ln`: every part reads
    the x that entered the layer, x + attention(norm(x)) + mlp(norm(x)) (GPT-NeoX, arXiv 2204.06745).

    Args:
        attention_norm: norm of the self-attention.
        attention: self-attention.
        cross_attention_norm: norm of the cross-attention, None without one.
        cross_attention: attention over the memory, None in a stack that has none.
        mlp_norm: norm of the MLP.
        mlp: feed-forward part, one for all tokens or a mixture of experts.
        dropout: dropout of what each part adds to the stream, in training.
        block: where the norms sit.
        attention_output_norm: norm of what the self-attention adds, for `normformer`.
        cross_attention_output_norm: likewise of the cross-attention.

    Attributes:
        recompute: in training keep only the input, and run the layer again in the backward.
        recompute_draws: and random numbers are drawn in it, which shall be the same again.
        recompute_norms: likewise keep the input of a norm that a projection follows instead of what it gives.
        attention_adapter: goes over what the self-attention adds to the stream; None without (`peft.bottleneck`).
        mlp_adapter: likewise of the MLP.
    """

    recompute: bool = False
    recompute_draws: bool = False
    recompute_norms: bool = False

    def __init__(
        self,
        *,
        attention_norm: LayerNorm | RMSNorm,
        attention: SelfAttention,
        mlp_norm: LayerNorm | RMSNorm,
        mlp: MLP | MoE,
        dropout: float,
        cross_attention_norm: LayerNorm | RMSNorm | None = None,
        cross_attention: CrossAttention | None = None,
        block: BlockType = "pre_ln",
        attention_output_norm: LayerNorm | RMSNorm | None = None,
        cross_attention_output_norm: LayerNorm | RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.block: BlockType = block
        self.attention_norm = attention_norm
        self.attention = attention
        self.attention_output_norm = attention_output_norm
        self.cross_attention_norm = cross_attention_norm
        self.cross_attention = cross_attention
        self.cross_attention_output_norm = cross_attention_output_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.attention_adapter: nn.Module | None = None
        self.mlp_adapter: nn.Module | None = None
        self.dropout = dropout
        self.draws = dropout > 0

    def forward(
        self,
        hidden: Tensor,
        rotary: Rotation | None,
        kind: CallKind,
        packed: PackedSequences | None = None,
        memory: Memory | CachedMemory | None = None,
        terms: ScoreTerms | None = None,
        padding: Tensor | None = None,
        cache: LayerCache | None = None,
        routed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The layer without an effect on its buffers, so that it may run twice.

        Args:
            hidden: (batch, tokens, hidden_size).
            rotary: and the others, as in `SelfAttention.forward`.
            kind: the kind of call.
            packed: the documents of the rows.
            memory: what the cross-attention reads; None in a layer without it.
            terms: what the positions add to the scores.
            padding: which tokens attention sees.
            cache: keys and values of texts that grow token by token.
            routed: which tokens go to experts; None for those of `padding`.

        Returns:
            (batch, tokens, hidden_size), and what `count` takes.
        """
        inputs = hidden, rotary, kind, packed, memory, terms, padding, cache, routed
        if self.recompute and recomputes(self):
            return run_again(self._run, self.recompute_draws, *inputs)
        return self._run(*inputs)

    def count(self, sums: Tensor | None) -> None:
        """Add what the layer has counted of its experts, once for each run in training."""
        if sums is not None and self.training and isinstance(self.mlp, MoE):
            self.mlp.count(sums)

    def _run(
        self,
        hidden: Tensor,
        rotary: Rotation | None,
        kind: CallKind,
        packed: PackedSequences | None,
        memory: Memory | CachedMemory | None,
        terms: ScoreTerms | None,
        padding: Tensor | None,
        cache: LayerCache | None,
        routed: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        entered = hidden
        # a part adds to the stream as it multiplies, where nothing comes between
        plain = self.block != "post_ln" and not (self.training and self.dropout)
        read = self._before(self.attention_norm, hidden, entered, self.attention.qkv)
        adds = plain and self.attention_adapter is None and self.attention_output_norm is None
        more: Any = {"norm": read.norm, "cache": cache, "onto": read.stream if adds else None}
        update = self.attention(read.normed, rotary, kind, packed, terms, padding, **more)
        if self.attention_adapter is not None:
            update = self.attention_adapter(update)
        hidden = update if adds else self._add(read.stream, update, self.attention_norm, self.attention_output_norm)
        if self.cross_attention is not None and self.cross_attention_norm is not None:
            assert memory is not None
            read = self._before(self.cross_attention_norm, hidden, entered, self.cross_attention.query)
            adds = plain and self.cross_attention_output_norm is None
            update = self.cross_attention(read.normed, memory, kind, read.norm, read.stream if adds else None)
            output_norm = self.cross_attention_output_norm
            hidden = update if adds else self._add(read.stream, update, self.cross_attention_norm, output_norm)
        sums = None
        adds = plain and self.mlp_adapter is None
        if isinstance(self.mlp, MoE):
            read = self._before(self.mlp_norm, hidden, entered, None, read_often=not self.mlp.recompute)
            more = {"limited": kind != "generation", "again": read.again, "onto": read.stream if adds else None}
            real = padding if routed is None else routed
            update, sums = self.mlp.run(read.normed, real, read.norm, **more)
        else:
            read = self._before(self.mlp_norm, hidden, entered, self.mlp.up)
            update = self.mlp(read.normed, read.norm, read.stream if adds else None)
        if adds:
            return update, sums
        if self.mlp_adapter is not None:
            update = self.mlp_adapter(update)
        return self._add(read.stream, update, self.mlp_norm), sums

    def _before(
        self,
        norm: LayerNorm | RMSNorm,
        hidden: Tensor,
        entered: Tensor,
        first: nn.Linear | None,
        *,
        read_often: bool = False,
    ) -> Read:
        """What a part reads, of a stream that goes on.

        Args:
            norm: of the part.
            hidden: the stream.
            entered: the stream as it entered the layer.
            first: the projection that reads the norm; None where there are several.
            read_often: several operations of the part keep what it reads: it is kept whoever does the norm.
        """
        if self.block == "post_ln":
            return Read(hidden, hidden)
        reads = entered if self.block == "parallel_ln" else hidden
        spared = first is not None and spares(first, norm)
        if (self.recompute_norms or spared) and not read_often and recomputes(self):
            return Read(hidden, reads, norm=norm)
        # what a layer is given is kept anyway; a sum of it is not where its summands are, or where one is narrower
        kept = hidden is entered or (self.block == "pre_ln" and not torch.is_autocast_enabled(hidden.device.type))
        if isinstance(norm, RMSNorm) and kept:
            return norm.forked(hidden, read_often)
        return Read(hidden, norm(reads))

    def _add(
        self,
        hidden: Tensor,
        update: Tensor,
        norm: LayerNorm | RMSNorm,
        output_norm: LayerNorm | RMSNorm | None = None,
    ) -> Tensor:
        """The stream with what a part adds."""
        if output_norm is not None:
            update = output_norm(update)
        if self.training and self.dropout:
            update = F.dropout(update, self.dropout)
        hidden = hidden + update
        return norm(hidden) if self.block == "post_ln" else hidden


class Stack(nn.Module):
    """Layers in a row, one set of positions for all of them, and the norm after the last.

    Args:
        layers: the layers, first to last.
        final_norm: norm of the last layer's output; None where the layers end with one (`post_ln`).
        rotary: the shared rotary embedding, if there is one.
        score_positions: the shared positions that act on scores, if there are any.

    Attributes:
        recompute_chunk: in training keep only the input of so many layers in a row, and run them again together in the
            backward; 1 leaves it to the layers.
        recompute_draws: random numbers are drawn in these, which shall be the same again.
        activation_offload: keeps what the first layers save for the backward in host memory; None where it stays.
        weight_offload: likewise the weights of the first layers, while they are not needed.
    """

    recompute_chunk: int = 1
    recompute_draws: bool = False
    activation_offload: ActivationOffload | None = None
    weight_offload: WeightOffload | None = None

    def __init__(
        self,
        layers: Iterable[Layer],
        *,
        final_norm: LayerNorm | RMSNorm | None,
        rotary: RotaryEmbedding | XPosEmbedding | None = None,
        score_positions: ScorePositions | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.final_norm = final_norm
        self.rotary = rotary
        self.score_positions = score_positions
        self._compiled_step: Callable[..., Tensor] | None = None

    def forward(
        self,
        hidden: Tensor,
        kind: CallKind,
        *,
        positions: Tensor | None = None,
        packed: PackedSequences | None = None,
        padding: Tensor | None = None,
        routed: Tensor | None = None,
        memory: Memory | None = None,
    ) -> Tensor:
        """Run all layers.

        Args:
            hidden: (batch, tokens, hidden_size).
            kind: the kind of call, which selects the attention backend.
            positions: of the tokens, int64 (batch, tokens); None counts each row from 0.
            packed: the documents of the rows, where they must not see each other.
            padding: bool (batch, tokens), True for real tokens, which alone are seen; None where all are.
            routed: bool (batch, tokens), True for the tokens that go to experts, which may be fewer than attention must
                see; None for those of `padding`.
            memory: what cross-attention reads; None in a stack without it.

        Returns:
            (batch, tokens, hidden_size), normed.
        """
        tokens = hidden.shape[1]
        rotary = None if self.rotary is None else self.rotary(tokens if positions is None else positions)
        terms = None if self.score_positions is None else self.score_positions(tokens, tokens)
        weights, activations = self.weight_offload, None
        if self.activation_offload is not None and recomputes(self):
            shared = (rotary, packed, memory, terms, padding, routed)
            activations = self.activation_offload.forward_pass(len(self.layers), shared)
        given = kind, rotary, packed, memory, terms, padding, routed
        chunk = self.recompute_chunk if recomputes(self) else 1
        for first in range(0, len(self.layers), chunk):
            numbers = range(first, min(first + chunk, len(self.layers)))
            layers = [cast(Layer, self.layers[number]) for number in numbers]
            if weights is not None:
                weights.before(numbers)
            with contextlib.nullcontext() if activations is None else activations.layers(numbers, layers):
                if chunk == 1:
                    hidden, sums = _run(layers, hidden, *given)
                else:
                    hidden, sums = run_again(_run, self.recompute_draws, layers, hidden, *given)
            for layer, counted in zip(layers, sums, strict=True):
                layer.count(counted)
            if weights is not None and recomputes(self):
                weights.after(numbers, hidden)
            if activations is not None:
                activations.after(numbers, hidden)
        return hidden if self.final_norm is None else self.final_norm(hidden)

    def go_on(
        self,
        hidden: Tensor,
        caches: Sequence[LayerCache],
        *,
        positions: Tensor | None,
        terms: ScoreTerms | None,
        memories: Sequence[CachedMemory] | None = None,
    ) -> Tensor:
        """Run all layers over texts that begin, or over one more token of each.

        Args:
            hidden: (rows, tokens, hidden_size); one token goes on with a text, more of them begin it.
            caches: of each layer, whose lengths count these tokens.
            positions: of the tokens, int64 (rows, tokens), needed of a single one; None counts each row from 0.
            terms: what the positions add to the scores.
            memories: what the cross-attention of each layer reads; None in a stack without it.

        Returns:
            (rows, tokens, hidden_size), normed.
        """
        rotary = None if self.rotary is None else self.rotary(hidden.shape[1] if positions is None else positions)
        step = self._compiled_step if hidden.shape[1] == 1 and self._compiled_step is not None else _go_on
        for number, layer in enumerate(self.layers):
            memory = None if memories is None else memories[number]
            hidden = step(cast(Layer, layer), hidden, rotary, memory, terms, caches[number])
        return hidden if self.final_norm is None else self.final_norm(hidden)

    def compile_steps(self) -> None:
        """Compile a layer that goes on with texts by one token; equal layers share one compilation."""
        prepare_compiler()
        self._compiled_step = torch.compile(_go_on, fullgraph=True, dynamic=False)

    def compile_parts(self, *, hooked: bool = False, whole: bool = True) -> None:
        """Compile each layer and the final norm; equal layers share one compilation.

        Args:
            hooked: the parts will have hooks around their forward (FSDP2's, which gather and give back the weights):
                leave those outside.
            whole: each part is one graph; otherwise its attention, which cannot be traced, stays outside.
        """
        prepare_compiler()
        for part in (*self.layers, *([] if self.final_norm is None else [self.final_norm])):
            if hooked:
                part.forward = torch.compile(part.forward, fullgraph=whole, dynamic=False)
            else:
                part.compile(fullgraph=whole, dynamic=False)


def _go_on(
    layer: Layer,
    hidden: Tensor,
    rotary: Rotation | None,
    memory: CachedMemory | None,
    terms: ScoreTerms | None,
    cache: LayerCache,
) -> Tensor:
    """A layer over the beginnings of texts, or over one more token of each."""
    return layer(hidden, rotary, "generation", None, memory, terms, None, cache)[0]


def _run(
    layers: Sequence[Layer],
    hidden: Tensor,
    kind: CallKind,
    rotary: Rotation | None,
    packed: PackedSequences | None,
    memory: Memory | None,
    terms: ScoreTerms | None,
    padding: Tensor | None,
    routed: Tensor | None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Some layers in a row; what each of them has to `count` comes out with the result, which may be made twice."""
    counted: list[Tensor | None] = []
    for layer in layers:
        hidden, sums = layer(hidden, rotary, kind, packed, memory, terms, padding, None, routed)
        counted.append(sums)
    return hidden, counted
