"""Transformer layer: residual branches of attention and MLP."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from .config.dense_stack import AttentionSlice
from .config.extensions import ExtensionError, load_extension
from .config.stack import StackSlice
from .layers.attention import Backends
from .layers.context import LayerContext
from .layers.cross_attention import CrossAttention
from .layers.dropout import (
    ATTENTION_ADAPTER,
    ATTENTION_OUTPUT,
    CROSS_ATTENTION_OUTPUT,
    MLP_ADAPTER,
    MLP_OUTPUT,
    LayerDropout,
    require_dropout,
)
from .layers.fp8_linear import reads_source
from .layers.fused_linear import can_detach_bias, can_skip_norm_output
from .layers.mlp import MLP, build_mlp
from .layers.norm import BranchInput, LayerNorm, RMSNorm, build_norm, is_wide_residual
from .layers.self_attention import SelfAttention
from .memory.recompute import RecomputableModule, run_with_recompute, should_recompute
from .moe.moe_layer import MoE, build_moe
from .moe.router import Routing


class RoutedTokens(NamedTuple):
    """Results of a layer up to its experts.

    Attributes:
        residual: residual stream (batch, tokens, hidden_size).
        tokens: input of the experts, (batch, tokens, hidden_size).
        routing: experts of each token.
    """

    residual: Tensor
    tokens: Tensor
    routing: Routing


class Layer(RecomputableModule):
    """Transformer layer: residual branches of self-attention, optional cross-attention, and MLP or MoE.

    Recomputed: everything but the layer input.

    With the residual stream x and a branch f: `pre_ln`: x + f(norm(x)) (arXiv 2002.04745). `post_ln`: norm(x + f(x))
    (arXiv 1706.03762). `normformer`: pre-norm, with norms after each attention and inside the MLP (arXiv 2110.09456).
    `parallel_ln`: every branch reads the layer input x, x + attention(norm(x)) + mlp(norm(x)) (GPT-NeoX,
    arXiv 2204.06745).

    Args:
        attention_norm: norm of the self-attention branch.
        attention: self-attention.
        cross_attention_norm: norm of the cross-attention branch, None without one.
        cross_attention: attention over the encoder output, None in a stack without it.
        mlp_norm: norm of the MLP branch.
        mlp: dense feed-forward, or a mixture of experts.
        dropout: dropout of each branch output before the residual add, in training.
        block: placement of the norms, or the name of a block of a user's own.
        attention_output_norm: norm of the self-attention output, for `normformer`.
        cross_attention_output_norm: norm of the cross-attention output, for `normformer`.

    Attributes:
        attention_adapter: bottleneck adapter on the self-attention output (`peft.bottleneck`), or None.
        mlp_adapter: bottleneck adapter on the MLP output, or None.
    """

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
        block: str = "pre_ln",
        attention_output_norm: LayerNorm | RMSNorm | None = None,
        cross_attention_output_norm: LayerNorm | RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.block = block
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
        self.has_dropout = dropout > 0

    def forward(self, hidden: Tensor, context: LayerContext) -> tuple[Tensor, Tensor | None]:
        """Run the layer without updating its buffers, so that it can be recomputed.

        Args:
            hidden: (batch, tokens, hidden_size).
            context: all other inputs.

        Returns:
            The new residual stream (batch, tokens, hidden_size), and the router statistics for `update_statistics`.
        """
        if self.is_recomputed or context.recompute:
            return run_with_recompute(self._run, self.preserve_rng_state, hidden, context)
        return self._run(hidden, context)

    def update_statistics(self, sums: Tensor | None) -> None:
        """Accumulate router statistics; to be called once per forward, which may itself run twice."""
        if sums is not None and self.training and isinstance(self.mlp, MoE):
            self.mlp.update_statistics(sums)

    def _run(self, hidden: Tensor, context: LayerContext) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.mlp, MoE) and not self.mlp.is_recomputed:
            routed = self.route(hidden, context)
            return self.run_experts(routed, context.dropout), routed.routing.statistics
        layer_input, hidden = hidden, self._run_attentions(hidden, context)
        projection = None if isinstance(self.mlp, MoE) else self.mlp.up
        # a recomputed MLP is a function of its own
        output = None if isinstance(self.mlp, MoE) or self.mlp.is_recomputed else self.mlp.down
        output = output if self._fuses_residual(self.mlp_adapter, None) else None
        read = self._branch_input(self.mlp_norm, hidden, layer_input, projection, output)
        hidden, sums = self._run_mlp(read, read.residual, context)
        return self._post_norm(self.mlp_norm, hidden), sums

    def route(self, hidden: Tensor, context: LayerContext) -> RoutedTokens:
        """Run a layer with experts up to them: attention, norm and router.

        Args:
            hidden: (batch, tokens, hidden_size).
            context: all other inputs.
        """
        assert isinstance(self.mlp, MoE)
        layer_input, hidden = hidden, self._run_attentions(hidden, context)
        read = self._branch_input(self.mlp_norm, hidden, layer_input, None, has_several_readers=True)
        real, batch = _routed(context), len(hidden) if context.batch is None else context.batch
        routing = self.mlp.route(
            read.hidden if read.second_hidden is None else read.second_hidden,
            None if real is None else real.flatten(),
            batch,
            context.dropout,
            context.kind != "generation",
        )
        return RoutedTokens(read.residual, read.hidden, routing)

    def run_experts(self, routed: RoutedTokens, dropout: LayerDropout | None) -> Tensor:
        """Return the new residual stream (batch, tokens, hidden_size) from what `route` has returned."""
        assert isinstance(self.mlp, MoE)
        (residual, tokens, routing), adapter = routed, self.mlp_adapter
        fuses = self._fuses_residual(adapter, None)
        output = self.mlp.run_experts(tokens, routing, residual if fuses else None, dropout)
        if not fuses:
            output = self._finish(output, residual, dropout, (MLP_OUTPUT, MLP_ADAPTER), None, adapter)
        return self._post_norm(self.mlp_norm, output)

    def _run_attentions(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Run the residual branches of self-attention and cross-attention."""
        fuses = self._fuses_residual(self.attention_adapter, self.attention_output_norm)
        output = self.attention.output if fuses else None
        read = self._branch_input(self.attention_norm, hidden, hidden, self.attention.qkv, output)
        layer_input, hidden = hidden, self._run_attention(read, read.residual, context, self.attention_output_norm)
        hidden = self._post_norm(self.attention_norm, hidden)
        if self.cross_attention is not None and self.cross_attention_norm is not None:
            read = self._branch_input(self.cross_attention_norm, hidden, layer_input, self.cross_attention.query)
            hidden = self._run_cross_attention(read, read.residual, context, self.cross_attention_output_norm)
            hidden = self._post_norm(self.cross_attention_norm, hidden)
        return hidden

    def _run_attention(
        self, read: BranchInput, residual: Tensor | None, context: LayerContext, output_norm: nn.Module | None
    ) -> Tensor:
        """Return the output of self-attention after adapter, `output_norm` and dropout, plus `residual` if given."""
        fuses = self._fuses_residual(self.attention_adapter, output_norm)
        added = residual if fuses else None
        output = self.attention(read.hidden, context, read.norm, added, read.source, read.output_bias)
        if fuses:
            return output
        streams = ATTENTION_OUTPUT, ATTENTION_ADAPTER
        return self._finish(output, residual, context.dropout, streams, output_norm, self.attention_adapter)

    def _run_cross_attention(
        self, read: BranchInput, residual: Tensor | None, context: LayerContext, output_norm: nn.Module | None
    ) -> Tensor:
        """See `_run_attention`."""
        assert self.cross_attention is not None
        fuses = self._fuses_residual(None, output_norm)
        output = self.cross_attention(read.hidden, context, read.norm, residual if fuses else None, read.source)
        if fuses:
            return output
        return self._finish(output, residual, context.dropout, (CROSS_ATTENTION_OUTPUT, 0), output_norm)

    def _run_mlp(
        self, read: BranchInput, residual: Tensor | None, context: LayerContext, output_norm: nn.Module | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `_run_attention`; return also the router statistics of experts."""
        fuses, statistics = self._fuses_residual(self.mlp_adapter, output_norm), None
        added = residual if fuses else None
        if isinstance(self.mlp, MoE):
            output, statistics = self.mlp.forward_with_statistics(
                read.hidden,
                _routed(context),
                read.norm,
                batch=context.batch,
                use_capacity=context.kind != "generation",
                residual=added,
                dropout=context.dropout,
            )
        else:
            output = self.mlp(read.hidden, read.norm, added, context.dropout, read.source, read.output_bias)
        if not fuses:
            output = self._finish(
                output, residual, context.dropout, (MLP_OUTPUT, MLP_ADAPTER), output_norm, self.mlp_adapter
            )
        return output, statistics

    def _fuses_residual(self, adapter: nn.Module | None, output_norm: nn.Module | None) -> bool:
        """Return True if the output projection adds the residual: no dropout, norm or adapter comes in between."""
        between = adapter is not None or output_norm is not None or (self.training and self.dropout)
        return not between and self.block != "post_ln"

    def _finish(
        self,
        output: Tensor,
        residual: Tensor | None,
        dropout: LayerDropout | None,
        streams: tuple[int, int],
        output_norm: nn.Module | None,
        adapter: nn.Module | None = None,
    ) -> Tensor:
        """Apply adapter, norm and dropout to the output of a branch, and add it to the residual stream, if given.

        `streams` are the numbers of the dropouts of output and adapter.
        """
        if adapter is not None:
            output = adapter(output, None if dropout is None else dropout.of_stream(streams[1]))
        if output_norm is not None:
            output = output_norm(output)
        if self.training and self.dropout:
            return require_dropout(dropout).of_stream(streams[0]).apply(output, self.dropout, residual)
        return output if residual is None else residual + output

    def _post_norm(self, norm: LayerNorm | RMSNorm, hidden: Tensor) -> Tensor:
        return norm(hidden) if self.block == "post_ln" else hidden

    def _branch_input(
        self,
        norm: LayerNorm | RMSNorm,
        hidden: Tensor,
        layer_input: Tensor,
        projection: nn.Linear | None,
        output: nn.Linear | None = None,
        *,
        has_several_readers: bool = False,
    ) -> BranchInput:
        """Return the residual stream and the input of a branch, normed here or by the branch itself.

        Args:
            norm: norm of the branch.
            hidden: residual stream.
            layer_input: residual stream at the start of the layer.
            projection: the only reader of the norm output; None if there are several.
            output: last linear layer of the branch, if its output is added to the residual stream as it is.
            has_several_readers: several operations of the branch save the norm output, so recomputing it saves nothing.
        """
        if self.block == "post_ln":
            return BranchInput(hidden, hidden)
        source = layer_input if self.block == "parallel_ln" else hidden
        casts = reads_source(projection)
        skips_output = projection is not None and can_skip_norm_output(projection, norm)
        if (norm.recompute or skips_output) and not casts and not has_several_readers and should_recompute(self):
            return BranchInput(hidden, source, norm=norm)
        # The fused norm saves the residual stream. The layer input is saved anyway; a sum would cost extra memory if
        # its summands are saved (other block types) or if one of them is narrower (autocast, an fp32 residual). Of the
        # LayerNorms of a parallel block the compiler saves one normalized input.
        is_saved = hidden is layer_input or (self.block == "pre_ln" and not is_wide_residual(hidden, norm.weight))
        if is_saved and not (self.block == "parallel_ln" and isinstance(norm, LayerNorm)):
            bias = output.bias if output is not None and can_detach_bias(output, hidden) else None
            read = norm.forward_with_residual(hidden, has_several_readers, bias)
        else:
            read = BranchInput(hidden, norm(source))
        return read._replace(source=norm.fp8_source(source)) if casts else read


def _routed(context: LayerContext) -> Tensor | None:
    """Return a mask of the tokens that are routed to experts; None: all are."""
    return context.padding if context.routed is None else context.routed


def build_layer(
    stack: StackSlice,
    number: int,
    backends: Backends,
    cross_attention: AttentionSlice | None,
    cross_backends: Backends | None,
) -> Layer:
    """Build layer `number` of a stack, counted from 0."""
    normformer = stack.block == "normformer"
    norm = partial(build_norm, stack.norm, stack.hidden_size, wide_input=stack.fp32_residual)
    cross = None
    if cross_attention is not None:
        cross = CrossAttention(stack, cross_attention, cross_backends or {})
    parts: dict[str, Any] = {
        "block": stack.block,
        "attention_norm": norm(),
        "attention": SelfAttention(stack, backends),
        "attention_output_norm": norm() if normformer else None,
        "cross_attention_norm": None if cross is None else norm(),
        "cross_attention": cross,
        "cross_attention_output_norm": norm() if cross is not None and normformer else None,
        "mlp_norm": norm(),
        "mlp": build_mlp(stack) if stack.moe is None or not stack.moe.layers[number] else build_moe(stack, stack.moe),
        "dropout": stack.hidden_dropout,
    }
    if not stack.is_own_block:
        return Layer(**parts)
    component = load_extension("block", stack.block)
    if not (isinstance(component, type) and issubclass(component, Layer)):
        raise ExtensionError(f"the block {stack.block} must be a subclass of stoker.Block.")
    return component(norm=norm, **parts)  # pyrefly: ignore[unexpected-keyword]  it is a Block
