"""Parameter counts in closed form, without building the model."""

from __future__ import annotations

from .batch_shape import BatchSpec
from .bert import BertSlice
from .families import FamilyKeys, family_slice, sequence_length_of
from .moe import MoESlice
from .stack import AttentionSlice, StackSlice
from .t5 import T5Slice


def count_norm(stack: StackSlice, width: int | None = None) -> int:
    """Count the parameters of one norm, of width `hidden_size` unless given."""
    return (width or stack.hidden_size) * (2 if stack.norm.kind == "layernorm" else 1)


def count_position_bias(stack: StackSlice) -> int:
    """Count the parameters of the position bias on attention scores, shared by the layers of a stack."""
    distance = stack.attention.position_bias
    if distance is None or not distance.learned:
        return 0
    return stack.attention.heads * (distance.buckets if distance.kind == "relative" else 3)


def count_final_norm(stack: StackSlice) -> int:
    """Count the parameters of the final norm; `post_ln` has none, as its layers end with a norm."""
    return 0 if stack.block == "post_ln" else count_norm(stack)


def count_mlp(stack: StackSlice, width: int | None = None) -> int:
    """Count the parameters of one MLP or expert without norms, of width `ffn_hidden_size` unless given."""
    mlp, width = stack.mlp, width or stack.mlp.ffn_hidden_size
    up_rows = width * (2 if mlp.gated else 1)
    return stack.hidden_size * (up_rows + width) + (up_rows + stack.hidden_size) * mlp.bias


def count_experts(stack: StackSlice, moe: MoESlice, *, active: bool = False) -> int:
    """Count the parameters of a MoE layer's router, experts and shared expert.

    Args:
        stack: the stack.
        moe: its experts.
        active: count the active parameters per token: `topk` experts instead of all.
    """
    shared = moe.shared_ffn_hidden_size
    experts = (moe.topk if active else moe.experts) * count_mlp(stack, moe.ffn_hidden_size)
    return moe.experts * stack.hidden_size + experts + (count_mlp(stack, shared) if shared else 0)


def count_layer(stack: StackSlice) -> int:
    """Count the parameters of one layer without its MLP or experts: attention and norms."""
    hidden, attention, mlp = stack.hidden_size, stack.attention, stack.mlp
    query_rows = attention.heads * attention.head_dim
    qkv_rows = query_rows + 2 * attention.groups * attention.head_dim
    matrices = hidden * (qkv_rows + query_rows)
    biases = qkv_rows * attention.qkv_bias + hidden * attention.output_bias
    norms = 2 * count_norm(stack) + attention.heads * attention.head_scale
    if attention.qk_norm:
        norms += 2 * count_norm(stack, attention.head_dim)
    if stack.block == "normformer":
        norms += count_norm(stack) + count_norm(stack, mlp.ffn_hidden_size)
    return matrices + biases + norms


def count_cross_attention(stack: StackSlice, attention: AttentionSlice) -> int:
    """Count the parameters of the cross-attention of one layer, with its norms."""
    hidden = stack.hidden_size
    query_rows, kv_rows = attention.heads * attention.head_dim, 2 * attention.groups * attention.head_dim
    matrices = hidden * (2 * query_rows + kv_rows)
    biases = (query_rows + kv_rows) * attention.qkv_bias + hidden * attention.output_bias
    norms = count_norm(stack) * (2 if stack.block == "normformer" else 1)
    if attention.qk_norm:
        norms += 2 * count_norm(stack, attention.head_dim)
    return matrices + biases + norms + attention.heads * attention.head_scale


def count_stack(stack: StackSlice, cross_attention: AttentionSlice | None = None, *, active: bool = False) -> int:
    """Count the parameters of a stack with final norm and position bias; `active` as in `count_experts`."""
    layer = count_layer(stack)
    if cross_attention is not None:
        layer += count_cross_attention(stack, cross_attention)
    sparse = 0 if stack.moe is None else sum(stack.moe.layers)
    experts = 0 if stack.moe is None else sparse * count_experts(stack, stack.moe, active=active)
    dense = (stack.num_layers - sparse) * count_mlp(stack)
    return stack.num_layers * layer + dense + experts + count_final_norm(stack) + count_position_bias(stack)


def count_parameters(
    keys: FamilyKeys, vocab_size: int, batch_spec: BatchSpec | None = None, *, active: bool = False
) -> int:
    """Count the parameters of a model, including the padding rows of its vocabulary.

    Args:
        keys: configuration of the model.
        vocab_size: vocabulary size of the tokenizer.
        batch_spec: shape of the samples, which determines the rows of learned position embeddings; None: from the keys
            alone.
        active: count the active parameters per token: only `topk` experts of a layer.
    """
    model = family_slice(
        keys, vocab_size=vocab_size, batch_spec=batch_spec or BatchSpec(seq_length=sequence_length_of(keys))
    )
    vocab = model.padded_vocab_size
    match model:
        case T5Slice():
            hidden = model.encoder.stack.hidden_size
            tables = vocab * ((1 if model.shared_embeddings else 2) + (0 if model.tied else 1))
            tables += (model.encoder.learned_positions or 0) + (model.decoder.learned_positions or 0)
            stacks = count_stack(model.encoder.stack, active=active)
            stacks += count_stack(model.decoder.stack, model.cross_attention, active=active)
            distance = model.cross_attention.position_bias
            positions = 0 if distance is None else distance.buckets * model.cross_attention.heads
            return tables * hidden + stacks + positions + vocab * model.head_bias
        case BertSlice():
            stack = model.stack
            hidden = stack.hidden_size
            tables = vocab * (1 if model.tied else 2) + (model.learned_positions or 0) + model.token_types
            transform = hidden * (hidden + 1) + count_norm(stack) if model.mlm_transform else 0
            extra = transform + vocab * model.head_bias + count_norm(stack) * model.embedding_norm
            return tables * hidden + count_stack(stack, active=active) + extra
        case _:
            tables = vocab * (1 if model.tied else 2) + (model.learned_positions or 0)
            return tables * model.stack.hidden_size + count_stack(model.stack, active=active)
