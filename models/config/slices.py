"""What each part of a model needs to know, as small frozen records derived once from the flat keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .gpt import GPTKeys
from .stack import StackKeys

NonLinearity = Literal["gelu", "gelu_tanh", "gelu_sigmoid", "relu", "relu_squared", "silu"]

_ACTIVATIONS: dict[str, tuple[NonLinearity, bool]] = {
    "gelu": ("gelu", False),
    "approx-gelu": ("gelu_sigmoid", False),
    "relu": ("relu", False),
    "squared-relu": ("relu_squared", False),
    "geglu": ("gelu", True),
    "swiglu": ("silu", True),
    "reglu": ("relu", True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSlice:
    """One attention of a layer.

    Attributes:
        heads: query heads.
        groups: key and value heads; divides `heads`.
        head_dim: width of a head.
        scale: factor of the scores.
        qkv_bias: bias on the query, key and value projection.
        output_bias: bias on the output projection.
        dropout: probability of dropping an attention weight in training.
        causal: a token sees no later token.
        use_flash_attention: None for any family, True without unfused, False without flash.
        backend: `auto`, one family or one backend.
        transformer_engine: True for TransformerEngine first, False for none of it, None for either.
        masked_softmax_fusion: unfused attention may take the fused softmax.
    """

    heads: int
    groups: int
    head_dim: int
    scale: float
    qkv_bias: bool
    output_bias: bool
    dropout: float
    causal: bool
    use_flash_attention: bool | None
    backend: str
    transformer_engine: bool | None
    masked_softmax_fusion: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySlice:
    """Rotary embedding: the first `dim` channels of each head turn, the rest pass.

    Attributes:
        dim: rotated channels, even.
        base: base of the frequencies, base ** (-2i / dim).
        interleaved: pairs (2i, 2i + 1) turn; otherwise channel i with channel i + dim / 2.
        position_scale: factor of every position (1 / `seq_len_interpolation_factor`).
        positions: rows of the table, the longest sequence.
    """

    dim: int
    base: float
    interleaved: bool
    position_scale: float
    positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSlice:
    """A norm: with mean and bias (`layernorm`) or without (`rmsnorm`); `zero_centered` stores its gain minus one."""

    kind: Literal["layernorm", "rmsnorm"]
    epsilon: float
    zero_centered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSlice:
    """The feed-forward part of a layer: act(x) or, gated, act(gate) * up, each of width `ffn_hidden_size`."""

    ffn_hidden_size: int
    nonlinearity: NonLinearity
    gated: bool
    bias: bool
    dropout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSlice:
    """A stack of equal layers.

    Attributes:
        num_layers: layers.
        hidden_size: width of the residual stream.
        hidden_dropout: dropout of what attention and MLP add to the stream, and of the embeddings.
        attention: the self-attention of a layer.
        rotary: its rotary embedding, if it has one.
        norm: every norm of the stack.
        mlp: the MLP of a layer.
        init_std: deviation of the initial weights.
        output_init_std: the same for the two projections of a layer that write to the stream.
    """

    num_layers: int
    hidden_size: int
    hidden_dropout: float
    attention: AttentionSlice
    rotary: RotarySlice | None
    norm: NormSlice
    mlp: MLPSlice
    init_std: float
    output_init_std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTSlice:
    """A decoder-only GPT.

    Attributes:
        stack: the decoder.
        seq_length: tokens in a training sample.
        learned_positions: rows of the learned position table, None without one.
        vocab_size: real tokens.
        padded_vocab_size: rows of the embedding table and of the head.
        tied: the head is the embedding table.
        seed: of the initialisation.
        compile: compile each layer; None leaves it to the device.
    """

    stack: StackSlice
    seq_length: int
    learned_positions: int | None
    vocab_size: int
    padded_vocab_size: int
    tied: bool
    seed: int
    compile: bool | None

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model can take, None for any."""
        return self.learned_positions or (self.stack.rotary.positions if self.stack.rotary else None)


def head_dim_of(keys: StackKeys) -> int:
    """Width of one head."""
    return keys.kv_channels or keys.hidden_size // keys.num_attention_heads


def rotary_dim_of(keys: StackKeys) -> int:
    """Channels of a head that turn: int(width * rotary_percentage)."""
    return int(head_dim_of(keys) * keys.rotary_percentage)


def attention_slice(keys: StackKeys, *, causal: bool) -> AttentionSlice:
    """The self-attention the keys describe."""
    head_dim = head_dim_of(keys)
    return AttentionSlice(
        heads=keys.num_attention_heads,
        groups=keys.num_query_groups or keys.num_attention_heads,
        head_dim=head_dim,
        scale=1 / math.sqrt(head_dim) if keys.normalize_attention_scores else 1.0,
        qkv_bias=keys.bias or keys.qkv_bias,
        output_bias=keys.bias,
        dropout=keys.attention_dropout,
        causal=causal,
        use_flash_attention=keys.use_flash_attention,
        backend=keys.attention_backend,
        transformer_engine=keys.transformer_engine,
        masked_softmax_fusion=keys.masked_softmax_fusion,
    )


def mlp_slice(keys: StackKeys) -> MLPSlice:
    """The MLP the keys describe."""
    nonlinearity, gated = _ACTIVATIONS[keys.activation.removeprefix("fast-")]
    if keys.openai_gelu and nonlinearity == "gelu":
        nonlinearity = "gelu_tanh"
    return MLPSlice(
        ffn_hidden_size=keys.ffn_hidden_size,
        nonlinearity=nonlinearity,
        gated=gated,
        bias=keys.bias,
        dropout=keys.ffn_dropout,
    )


def norm_slice(keys: StackKeys) -> NormSlice:
    """The norm the keys describe."""
    return NormSlice(
        kind="rmsnorm" if keys.normalization == "rmsnorm" else "layernorm",
        epsilon=keys.layernorm_epsilon,
        zero_centered=keys.normalization == "layernorm1p" or keys.layernorm_zero_centered_gamma,
    )


def rotary_slice(keys: StackKeys, *, positions: int) -> RotarySlice | None:
    """The rotary embedding the keys describe, None for other kinds of positions."""
    if keys.position_embedding_type != "rope":
        return None
    return RotarySlice(
        dim=rotary_dim_of(keys),
        base=keys.rotary_base,
        interleaved=keys.rotary_interleaved,
        position_scale=1 / (keys.seq_len_interpolation_factor or 1.0),
        positions=positions,
    )


def stack_slice(keys: StackKeys, *, causal: bool, positions: int) -> StackSlice:
    """The stack the keys describe, for sequences of up to `positions` tokens."""
    scaled = keys.init_method_std / math.sqrt(2 * keys.num_layers)
    return StackSlice(
        num_layers=keys.num_layers,
        hidden_size=keys.hidden_size,
        hidden_dropout=keys.hidden_dropout,
        attention=attention_slice(keys, causal=causal),
        rotary=rotary_slice(keys, positions=positions),
        norm=norm_slice(keys),
        mlp=mlp_slice(keys),
        init_std=keys.init_method_std,
        output_init_std=scaled if keys.use_scaled_init_method else keys.init_method_std,
    )


def gpt_slice(keys: GPTKeys, *, vocab_size: int) -> GPTSlice:
    """The GPT the keys describe, for a tokenizer of `vocab_size` tokens.

    Raises:
        ValueError: `override_vocab_size` is smaller than the tokenizer's vocabulary.
    """
    real_vocab = keys.override_vocab_size or vocab_size
    if real_vocab < vocab_size:
        raise ValueError(
            f"`override_vocab_size` ({real_vocab}) must not be smaller than the tokenizer's vocabulary; "
            f"use {vocab_size} or more, or null."
        )
    divisor = keys.make_vocab_size_divisible_by
    positions = max(keys.encoder_seq_length, keys.max_position_embeddings or 0)
    return GPTSlice(
        stack=stack_slice(keys, causal=True, positions=positions),
        seq_length=keys.encoder_seq_length,
        learned_positions=positions if keys.position_embedding_type == "learned_absolute" else None,
        vocab_size=real_vocab,
        padded_vocab_size=-(-real_vocab // divisor) * divisor,
        tied=keys.share_embeddings_and_output_weights,
        seed=keys.seed,
        compile=keys.compile,
    )
