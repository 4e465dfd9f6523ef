"""Cross-attention of a decoder to the encoder output."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from ...kernels.attention.decode import DecodeInputs, decode_attention
from ...kernels.attention.inputs import AttentionInputs
from ...kernels.fp8.operands import Source
from ..config.dense_stack import AttentionSlice
from ..config.stack import StackSlice
from ..kv_cache import CrossAttentionCache
from ..parallel.linear import column_traffic, row_traffic
from ..parallel.traffic import Collective
from .attention import Attention, Backends
from .context import LayerContext
from .cost import Matrix, PartMemory, SavedTensors, StackInputs, Weights
from .dropout import CROSS_ATTENTION_WEIGHTS, LORA_CROSS_KV, LORA_CROSS_OUTPUT, LORA_CROSS_QUERY, DropoutMask
from .fused_linear import linear_add_residual, norm_linear
from .norm import LayerNorm, RMSNorm
from .self_attention import attention_memory, attention_weights, context_traffic, shared_head_bytes


class CrossAttention(Attention):
    """Attention to an encoder output as wide as the residual stream, with the same backends as self-attention.

    The rows of `kv` are all key groups, then all value groups: [k | v].

    Args:
        stack: slice of the decoder.
        attention: slice of the attention.
        backends: attention function for each kind of call.
    """

    query: nn.Linear
    kv: nn.Linear

    def __init__(self, stack: StackSlice, attention: AttentionSlice, backends: Backends) -> None:
        super().__init__(stack, attention, backends, {"query": attention.heads, "kv": 2 * attention.groups})

    def forward(
        self,
        hidden: Tensor,
        context: LayerContext,
        norm: LayerNorm | RMSNorm | None = None,
        residual: Tensor | None = None,
        source: Source | None = None,
    ) -> Tensor:
        """Attend from each decoder token to all real tokens of the encoder output.

        Args:
            hidden: (batch, queries, hidden_size), already normed unless `norm` is given.
            context: kind of call, and `memory` of the same batch; cached for a decode step (queries = 1).
            norm: norm to apply to `hidden` without saving its output; None if it has been applied.
            residual: residual stream to add the output to, shaped like `hidden`; None without.
            source: see `BranchInput`.

        Returns:
            (batch, queries, hidden_size).
        """
        dropout = context.dropout
        mask = None if dropout is None else dropout.of_stream(LORA_CROSS_QUERY)
        if norm is None:
            query = linear_add_residual(None, self.query, hidden, mask, source)
        else:
            query, residual = norm_linear(norm, self.query, hidden, residual, mask)
        if context.batch is not None:
            query = query.view(context.batch, -1, query.shape[-1])
        query = query.unflatten(-1, (self.heads, self.head_dim))
        if self.query_norm is not None:
            query = self.query_norm(query)
        memory = context.memory
        assert memory is not None
        if isinstance(memory, CrossAttentionCache):
            output = self._decode(query[:, 0], memory)[:, None]
        else:
            mask = None
            if dropout is not None and memory.tokens is not None:
                mask = DropoutMask(dropout.keys[LORA_CROSS_KV], memory.tokens)
            key, value = self.keys_and_values(memory.hidden, mask)
            dropout_p, rng = self._dropout(CROSS_ATTENTION_WEIGHTS, dropout)
            inputs = AttentionInputs(
                query,
                key,
                value,
                softmax_scale=self.scale,
                softcap=self.softcap,
                distance_bias=memory.distance_bias,
                sinks=self._sinks(query),
                key_padding_mask=memory.padding,
                dropout_p=dropout_p,
                rng=rng,
                packed=memory.packed,
            )
            output = self.backends[context.kind](inputs)
        return self._project_output(output, residual, LORA_CROSS_OUTPUT, dropout)

    def keys_and_values(self, memory: Tensor, dropout: DropoutMask | None = None) -> tuple[Tensor, Tensor]:
        """Project an encoder output (batch, tokens, hidden_size) to K and V, each (batch, tokens, groups, head_dim)."""
        projected = linear_add_residual(None, self.kv, memory, dropout)
        key, value = projected.unflatten(-1, (2 * self.groups, self.head_dim)).chunk(2, dim=2)
        return (key if self.key_norm is None else self.key_norm(key)), value

    def _decode(self, query: Tensor, memory: CrossAttentionCache) -> Tensor:
        """Attend from one token per sequence, (rows, heads, head_dim), to cached keys and values."""
        inputs = DecodeInputs(
            query,
            memory.key,
            memory.value,
            memory.positions,
            scale=self.scale,
            lengths=memory.memory_lengths,
            distance_bias=memory.distance_bias,
            sinks=self._sinks(query),
            softcap=self.softcap,
        )
        return decode_attention(inputs)


# ---------------------------------------------------------------- cost


def cross_attention_weights(attention: AttentionSlice, stack: StackSlice) -> Weights:
    """Return the weights of a cross-attention: those of self-attention, in other matrices."""
    hidden, query, key = stack.hidden_size, attention.heads * attention.head_dim, attention.groups * attention.head_dim
    matrices = (
        Matrix("query", hidden * query),
        Matrix("kv", hidden * 2 * key, "encoder tokens"),
        Matrix("output", hidden * query),
    )
    return replace(attention_weights(attention, stack), matrices=matrices)


def cross_attention_traffic(inputs: StackInputs) -> tuple[Collective, ...]:
    """Return the traffic of the cross-attention of a layer; none without one."""
    attention, mesh, compute = inputs.cross, inputs.mesh, inputs.widths.compute
    if attention is None:
        return ()
    amaxes = inputs.amax_traffic() * 3
    exchanged = (*amaxes, *context_traffic(attention, inputs, inputs.encoder_tokens))
    if mesh.tensor == 1:
        return exchanged
    whole, encoder = (
        elements * compute for elements in (inputs.outer_elements, inputs.encoder_tokens * inputs.stack.hidden_size)
    )
    trained = "attention_qkv" in inputs.trained_projections
    return (
        *column_traffic(whole, mesh, gathers=mesh.sequence, trained=trained, gathered_bytes=inputs.gathered_bytes),
        *column_traffic(encoder, mesh, gathers=False, trained=trained, shared=shared_head_bytes(attention, inputs)),
        *exchanged,
        *row_traffic(whole, mesh),
    )


def cross_attention_memory(inputs: StackInputs) -> PartMemory | None:
    """Return the memory of the cross-attention of a layer; None without one."""
    attention, decision = inputs.cross, inputs.cross_attention
    if attention is None or decision is None:
        return None
    rows = inputs.tokens * attention.heads, inputs.encoder_tokens * attention.groups
    memory = attention_memory(attention, inputs, decision, rows, has_rotary=False)
    if not inputs.saves_fp8:
        return memory
    # the cast of the encoder's output, which is saved once otherwise
    cast = SavedTensors("attention", inputs.saved_input_bytes(inputs.encoder_tokens, inputs.stack.hidden_size))
    return replace(memory, saved=(*memory.saved, cast))
