"""Parameters of a model in closed form, without building it."""

from __future__ import annotations

from .gpt import GPTKeys
from .slices import StackSlice, gpt_slice


def count_norm(stack: StackSlice) -> int:
    """Parameters of one norm."""
    return stack.hidden_size * (2 if stack.norm.kind == "layernorm" else 1)


def count_layer(stack: StackSlice) -> int:
    """Parameters of one layer: attention, MLP and their two norms."""
    hidden, attention, mlp = stack.hidden_size, stack.attention, stack.mlp
    query_rows = attention.heads * attention.head_dim
    qkv_rows = query_rows + 2 * attention.groups * attention.head_dim
    up_rows = mlp.ffn_hidden_size * (2 if mlp.gated else 1)
    matrices = hidden * (qkv_rows + query_rows + up_rows + mlp.ffn_hidden_size)
    biases = qkv_rows * attention.qkv_bias + hidden * attention.output_bias + (up_rows + hidden) * mlp.bias
    return matrices + biases + 2 * count_norm(stack)


def count_parameters(keys: GPTKeys, vocab_size: int) -> int:
    """Parameters of a GPT, the padding rows of its vocabulary included.

    Args:
        keys: the configuration of the model.
        vocab_size: tokens of the tokenizer.
    """
    gpt = gpt_slice(keys, vocab_size=vocab_size)
    tables = gpt.padded_vocab_size * (1 if gpt.tied else 2) + (gpt.learned_positions or 0)
    return tables * gpt.stack.hidden_size + gpt.stack.num_layers * count_layer(gpt.stack) + count_norm(gpt.stack)
