"""Self-attention: fused QKV projection, positions, the attention backend, output projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.attention.backends.triton import triton_attention
from ...kernels.attention.decode import Append, DecodeInputs, decode_attention, triton_decode_attention
from ...kernels.attention.dispatch import BackendSelection
from ...kernels.attention.inputs import AttentionInputs
from ...kernels.attention.kv_append import apply_rotary_and_append_kv
from ...kernels.bias_gradients import split_heads
from ...kernels.fp8.operands import Source
from ...kernels.fused_qkv_rope import fused_qkv_rope
from ...kernels.launch import triton_runs_on
from ...kernels.rope import apply_rotary
from ..config.dense_stack import AttentionSlice
from ..config.stack import StackSlice
from ..dispatch.core_attention import core_memory, recomputes_from_log_sum_exp
from ..kv_cache import LayerKVCache
from ..parallel.linear import column_traffic, row_traffic
from ..parallel.traffic import Collective
from .attention import Attention, Backends
from .context import LayerContext
from .cost import ByteWidths, Matrix, PartMemory, SavedTensors, StackInputs, Weights
from .dropout import ATTENTION_WEIGHTS, LORA_OUTPUT, LORA_QKV
from .fused_linear import can_detach_bias, linear_add_residual, norm_linear
from .norm import LayerNorm, RMSNorm, norm_parameters
from .position_embeddings import RotaryTables


class SelfAttention(Attention):
    """Multi-head, multi-query or grouped-query self-attention.

    The rows of `qkv` are all query heads, then all key groups, then all value groups: [q | k | v].

    Args:
        stack: slice of the stack.
        backends: attention function for each kind of call.

    Attributes:
        rotary_interleaved: rotate adjacent pairs of channels instead of halves, with a rotary embedding.
    """

    qkv: nn.Linear

    def __init__(self, stack: StackSlice, backends: Backends) -> None:
        attention = stack.attention
        super().__init__(stack, attention, backends, {"qkv": attention.heads + 2 * attention.groups})
        self.causal = attention.causal
        self.window = attention.window
        self.rotary_interleaved = stack.rotary.interleaved if stack.rotary else False

    def forward(
        self,
        hidden: Tensor,
        context: LayerContext,
        norm: LayerNorm | RMSNorm | None = None,
        residual: Tensor | None = None,
        source: Source | None = None,
        output_bias: Tensor | None = None,
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            hidden: (batch, tokens, hidden_size), already normed unless `norm` is given; sharded over tokens with
                sequence parallelism, (1, batch * tokens / ranks, hidden_size).
            context: kind of call, positions, masks and KV cache.
            norm: norm to apply to `hidden` without saving its output; None if it has been applied.
            residual: residual stream to add the output to, shaped like `hidden`; None without.
            source: see `BranchInput`.
            output_bias: see `BranchInput`.

        Returns:
            Shaped like `hidden`.
        """
        mask = None if context.dropout is None else context.dropout.of_stream(LORA_QKV)
        bias = None  # whose gradient the split computes
        if norm is not None:
            projected, residual = norm_linear(norm, self.qkv, hidden, residual, mask)
        elif self._concatenates_gradients(context) and can_detach_bias(self.qkv, hidden):
            bias = self.qkv.bias
            projected = F.linear(hidden, self.qkv.weight, bias.detach())
        else:
            projected = linear_add_residual(None, self.qkv, hidden, mask, source)
        if context.batch is not None:
            projected = projected.view(context.batch, -1, projected.shape[-1])
        projected = projected.unflatten(-1, (self.heads + 2 * self.groups, self.head_dim))
        cache = context.cache
        if cache is not None and hidden.shape[1] == 1:
            heads = self._decode(projected[:, 0], context, cache)[:, None]
            return self._project_output(heads, residual, LORA_OUTPUT, None)
        if bias is None:
            query, key, value = self._split_and_rotate(projected, context.rotary)
        else:
            query, key, value = split_heads(projected, bias, self.groups)
        if cache is not None:
            cache.prefill(key, value)
        terms = context.terms
        dropout_p, rng = self._dropout(ATTENTION_WEIGHTS, context.dropout)
        inputs = AttentionInputs(
            query,
            key,
            value,
            causal=self.causal,
            window_size=self.window,
            softmax_scale=self.scale,
            softcap=self.softcap,
            distance_bias=None if terms is None else terms.distance_bias,
            alibi_slopes=None if terms is None else terms.alibi_slopes,
            sinks=self._sinks(query),
            key_padding_mask=None if self.causal else context.padding,
            dropout_p=dropout_p,
            rng=rng,
            packed=context.packed,
        )
        heads = self.backends[context.kind](inputs)
        return self._project_output(heads, residual, LORA_OUTPUT, context.dropout, output_bias)

    def _concatenates_gradients(self, context: LayerContext) -> bool:
        """Return True if the backward of the split concatenates gradients, which `triton` attention does not need."""
        is_split = context.rotary is None and self.query_norm is None
        return is_split and self.backends[context.kind] is not triton_attention

    def _decode(self, projected: Tensor, context: LayerContext, cache: LayerKVCache) -> Tensor:
        """Append one token per sequence, (rows, heads + 2 groups, head_dim), to the KV cache; attend to all of it."""
        inputs, append = self.decode_inputs(projected, context, cache)
        if triton_runs_on(projected) and not torch.compiler.is_compiling():
            return triton_decode_attention(inputs, append=append)
        query = apply_rotary_and_append_kv(
            inputs.query, cache.key, cache.value, cache.lengths, append.cos_sin, interleaved=append.interleaved
        )
        return decode_attention(inputs._replace(query=query))

    def decode_inputs(
        self, projected: Tensor, context: LayerContext, cache: LayerKVCache
    ) -> tuple[DecodeInputs, Append]:
        """Return the inputs of a decode step that appends the projection of one token per sequence to the KV cache."""
        if self.query_norm is not None and self.key_norm is not None:
            query, key, value = projected.split((self.heads, self.groups, self.groups), dim=1)
            projected = torch.cat((self.query_norm(query), self.key_norm(key), value), dim=1)
        tables, rotary, terms = None, context.rotary, context.terms
        if rotary is not None:
            key_cosine, key_sine = rotary.for_keys()
            tables = rotary.cosine[:, 0], rotary.sine[:, 0], key_cosine[:, 0], key_sine[:, 0]
        inputs = DecodeInputs(
            projected,
            cache.key,
            cache.value,
            cache.positions,
            scale=self.scale,
            distance_bias=None if terms is None else terms.distance_bias,
            alibi_slopes=None if terms is None else terms.alibi_slopes,
            sinks=self._sinks(projected),
            left_window=-1 if self.window is None else self.window[0],
            softcap=self.softcap,
        )
        return inputs, Append(tables, self.rotary_interleaved)

    def _split_and_rotate(self, projected: Tensor, rotary: RotaryTables | None) -> tuple[Tensor, Tensor, Tensor]:
        """Split (batch, tokens, heads + 2 groups, head_dim) into normed and rotated queries, keys, and values."""
        interleaved = self.rotary_interleaved
        if rotary is not None and rotary.key_cosine is None and self.query_norm is None:
            return fused_qkv_rope(projected, rotary.cosine, rotary.sine, self.groups, interleaved=interleaved)
        query, key, value = projected.split((self.heads, self.groups, self.groups), dim=2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotary is not None:
            query = apply_rotary(query, rotary.cosine, rotary.sine, interleaved=interleaved)
            key = apply_rotary(key, *rotary.for_keys(), interleaved=interleaved)
            if self.query_norm is None:
                # A view would keep the whole projection alive, although rotated queries and keys are new tensors.
                value = value.contiguous()
        return query, key, value


# ---------------------------------------------------------------- cost


def attention_weights(attention: AttentionSlice, stack: StackSlice) -> Weights:
    """Return the weights of an attention with a fused QKV projection."""
    hidden, query = stack.hidden_size, attention.heads * attention.head_dim
    qkv = query + 2 * attention.groups * attention.head_dim
    others = qkv * attention.qkv_bias + hidden * attention.output_bias + attention.heads * attention.head_scale
    others += attention.heads * (attention.softmax_type == "learnable")
    if attention.qk_norm:
        others += 2 * norm_parameters(stack.norm, attention.head_dim)
    return Weights((Matrix("qkv", hidden * qkv), Matrix("output", hidden * query)), others)


def attention_traffic(inputs: StackInputs) -> tuple[Collective, ...]:
    """Return the traffic of self-attention."""
    attention, mesh = inputs.stack.attention, inputs.mesh
    amaxes = inputs.amax_traffic() * 2
    if mesh.tensor == 1:
        return (*amaxes, *context_traffic(attention, inputs, inputs.tokens))
    whole = inputs.outer_elements * inputs.widths.compute
    trained = "attention_qkv" in inputs.trained_projections
    return (
        *amaxes,
        *column_traffic(
            whole,
            mesh,
            gathers=mesh.sequence,
            trained=trained,
            shared=shared_head_bytes(attention, inputs),
            gathered_bytes=inputs.gathered_bytes,
        ),
        *context_traffic(attention, inputs, inputs.tokens),
        *row_traffic(whole, mesh),
    )


def shared_head_bytes(attention: AttentionSlice, inputs: StackInputs) -> tuple[int, ...]:
    """Return the bytes of the gradients of all key heads, of all value heads, and of their biases, if ranks share them;
    see `parallel.collectives.SharedRows`.
    """
    if inputs.shared_heads == 1:
        return ()
    parts = inputs.mesh.tensor // inputs.shared_heads
    rows = parts * attention.groups * attention.head_dim * inputs.widths.compute
    return (rows * inputs.stack.hidden_size,) * 2 + (rows,) * 2 * attention.qkv_bias


def context_traffic(attention: AttentionSlice, inputs: StackInputs, key_tokens: int) -> tuple[Collective, ...]:
    """Return the traffic of the core of an attention over the context-parallel ranks.

    Args:
        attention: its configuration.
        inputs: inputs of the stack.
        key_tokens: keys of the rank.
    """
    split, width = inputs.context_split, attention.head_dim * inputs.widths.compute
    if split is None:
        return ()
    queries, keys = inputs.tokens * attention.heads * width, 2 * key_tokens * attention.groups * width
    if split.exchange == "all_gather":  # what is gathered is saved
        gathered = Collective("context", "all-gather", keys * split.size, "forward")
        return gathered, gathered._replace(kind="reduce-scatter", during="backward")
    found: list[Collective] = []
    is_both = split.exchange == "a2a+p2p"
    if split.head_ranks > 1:  # queries, keys, values and output, and their gradients
        axis = "context heads" if is_both else "context"
        exchanged = Collective(axis, "all-to-all", 2 * queries + keys, "forward", number=2)
        found += [exchanged, exchanged._replace(during="backward")]
    steps = split.ring_ranks - 1
    if steps:  # keys and values go around, in the backward pass with their gradients
        axis = "context ring" if is_both else "context"
        sent = Collective(axis, "send", keys * steps, "forward", number=steps, overlaps=True)
        gradients = keys * max(4, inputs.widths.compute) // inputs.widths.compute * split.ring_ranks
        found += [sent, sent._replace(during="backward")]
        # the last ones go home when nothing is left to compute
        last = sent._replace(during="backward", num_bytes=gradients // split.ring_ranks, number=1, overlaps=False)
        found += [last._replace(num_bytes=last.num_bytes * steps, number=steps, overlaps=True), last]
    return tuple(found)


def context_moved_bytes(attention: AttentionSlice, inputs: StackInputs, key_tokens: int) -> tuple[int, int]:
    """Return the bytes that a rank reads and writes, forward and backward, around the exchange of an attention over the
    context-parallel ranks: to arrange and sum what it exchanges.

    Counted from the code of `models.parallel`, a sum as read and written once a step; a compiler may fuse more or less.

    Args:
        attention: its configuration.
        inputs: inputs of the stack.
        key_tokens: keys of the rank.
    """
    split, width = inputs.context_split, attention.head_dim * inputs.widths.compute
    if split is None:
        return 0, 0
    queries, keys = inputs.tokens * attention.heads * width, 2 * key_tokens * attention.groups * width
    if split.exchange == "all_gather":
        # keys and values joined, and the outputs of two runs; the gathered ones are saved, and counted with that
        return 2 * keys + 2 * queries, 2 * queries
    forward = backward = 0
    if split.head_ranks > 1:  # joined and put in order, and outputs before and after they are sent
        forward = backward = 2 * 2 * (queries + keys) + 2 * 2 * queries
    if (steps := split.ring_ranks) > 1:
        wide = max(4, inputs.widths.compute) // inputs.widths.compute
        # keys and values joined; in each step the wide sum of outputs is read and written beside a block's
        forward += 2 * keys + steps * (1 + 2 * wide) * queries
        # likewise the gradients of queries, then rounded, and those of keys, to which what arrives is added; every step
        # but the first reads output and gradient once more for their products
        backward += 2 * keys + (steps * (1 + 2 * wide) + wide + 1 + 2 * (steps - 1)) * queries
        backward += (steps * (1 + 2 * wide) + (steps - 1) * 3 * wide + wide + 1) * keys
    return forward, backward


def self_attention_memory(inputs: StackInputs) -> PartMemory:
    """Return the memory of self-attention."""
    q, k = (heads * inputs.tokens for heads in (inputs.stack.attention.heads, inputs.stack.attention.groups))
    has_rotary = inputs.stack.rotary is not None
    return attention_memory(inputs.stack.attention, inputs, inputs.attention, (q, k), has_rotary=has_rotary)


def attention_memory(
    attention: AttentionSlice,
    inputs: StackInputs,
    decision: BackendSelection,
    rows: tuple[int, int],
    *,
    has_rotary: bool,
) -> PartMemory:
    """Return the memory of one attention of a layer.

    Args:
        attention: its configuration.
        inputs: inputs of the stack.
        decision: backend chosen for its training calls.
        rows: query heads and key heads, over all tokens of a micro batch.
        has_rotary: queries and keys are rotated, which copies them.
    """
    widths, compiled = inputs.widths, inputs.compiled
    q_bytes, k_bytes = (number * attention.head_dim * widths.compute for number in rows)
    # what the backward pass reads of the projections' outputs, and copies of queries and keys; values are a view of the
    # projection's output, or a copy where nothing else of that output is needed
    projected, copies = q_bytes + 2 * k_bytes, 0
    if attention.qk_norm:
        copies = q_bytes + k_bytes
    elif has_rotary:
        projected, copies = k_bytes, q_bytes + k_bytes
    qk_norms = _qk_norm_bytes(attention, inputs, sum(rows)) if attention.qk_norm else 0
    core = core_memory(attention, decision, widths.compute, compiled=compiled).shared_by(inputs.mesh.context)
    kept = projected + copies if core.inputs is None else core.inputs
    recompute_inputs = freed = 0
    norm_input = projected if attention.qk_norm and (compiled or _qk_norm_saves_input(inputs.stack, widths)) else 0
    if decision.call.fp8:
        kept += norm_input
    elif decision.saves_scores:
        kept += norm_input  # the copies in matmul layout are of the norm's output
        # recomputed from q, k and v as projected, not from the copies in the layout and dtype of the matmuls
        recompute_inputs = projected + copies - kept
        freed = min(recompute_inputs, 0)  # these copies exist again in the backward pass
        if recomputes_from_log_sum_exp(attention, decision):
            recompute_inputs += rows[0] * 4  # log-sum-exp
            freed = core.working // 2  # the gradient of the attention weights is never materialized
    elif core.inputs is not None:
        kept += copies
    saves_output = not decision.saves_scores and not core.output
    outputs = _output_inputs(attention, inputs, q_bytes, saves_output=saves_output)
    saved = [
        SavedTensors("attention", kept + qk_norms),
        SavedTensors("attention", 2 * k_bytes * _gathered_key_ranks(inputs)),
        SavedTensors("attention", core.log_sum_exp),
        SavedTensors("scores", core.scores, "core_attention" if decision.saves_scores else None),
        *(SavedTensors("attention", each) for each in (*outputs, core.output)),
    ]
    working = 2 * q_bytes + 2 * k_bytes + q_bytes + core.working + _exchanged_bytes(inputs, q_bytes, k_bytes)
    return PartMemory(tuple(each for each in saved if each.num_bytes), working, working - freed, recompute_inputs)


def _output_inputs(attention: AttentionSlice, inputs: StackInputs, q_bytes: int, *, saves_output: bool) -> list[int]:
    """Return the bytes saved of the output of the core, which the core may save too, and of the input of the output
    projection, often the same.
    """
    whole = attention.head_scale or (saves_output and inputs.saves_fp8)
    return [inputs.saved_input_bytes(inputs.tokens, attention.heads * attention.head_dim), q_bytes * whole]


def _gathered_key_ranks(inputs: StackInputs) -> int:
    """Return the number of context-parallel ranks of whose keys and values each has copies; 0 if of its own only."""
    split = inputs.context_split
    return split.size if split is not None and split.exchange == "all_gather" else 0


def _exchanged_bytes(inputs: StackInputs, q_bytes: int, k_bytes: int) -> int:
    """Return the bytes of what context-parallel ranks exchange in the backward pass of an attention: gradients of the
    keys and values of all ranks; the rank's heads of all tokens and their gradients; or in a ring the keys and values
    of two ranks, and their gradients.
    """
    split = inputs.context_split
    if split is None:
        return 0
    if split.exchange == "all_gather":
        return 2 * k_bytes * split.size
    heads = 2 * (q_bytes + 2 * k_bytes) if split.head_ranks > 1 else 0
    gradients = k_bytes * max(4, inputs.widths.compute) // inputs.widths.compute
    return heads + (2 * (2 * k_bytes + 2 * gradients) if split.ring_ranks > 1 else 0)


def _qk_norm_bytes(attention: AttentionSlice, inputs: StackInputs, rows: int) -> int:
    """Return the bytes that norms over `rows` query and key heads save besides their outputs."""
    if inputs.compiled:
        return rows * 4
    copies = 0 if _qk_norm_saves_input(inputs.stack, inputs.widths) else 1
    copies += inputs.stack.norm.kind == "rmsnorm"  # the normalized input
    return copies * rows * attention.head_dim * 4


def _qk_norm_saves_input(stack: StackSlice, widths: ByteWidths) -> bool:
    """Return True if an eager QK norm saves the projection's output itself instead of an fp32 copy."""
    if widths.compute >= 4:
        return True
    return stack.norm.kind == "layernorm" and not (stack.norm.zero_centered or widths.casts_weights)
