"""Resolved configuration of each module, as frozen dataclasses derived once from the flat keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .bert import BertKeys
from .gpt import GPTKeys
from .memory import RecomputeModule
from .memory_slice import OffloadSlice, RecomputeSlice, effective_modules, offload_slice, recompute_slice
from .model_keys import ModelKeys
from .moe_slice import MoESlice, moe_slice
from .position_slices import (
    BOUNDED_POSITION_TYPES,
    PositionBiasSlice,
    RotarySlice,
    head_dim_of,
    position_bias_slice,
    rotary_slice,
)
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
    """Attention of a layer.

    Attributes:
        heads: query heads.
        groups: key and value heads; divides `heads`.
        head_dim: width of a head.
        scale: factor of the scores.
        qkv_bias: bias on the query, key and value projection.
        output_bias: bias on the output projection.
        dropout: dropout probability of the attention weights in training.
        causal: causal attention.
        window: attention window to the left and right of a query, inclusive, -1 for unlimited; None for no window.
        softcap: softcap of the scores, cap * tanh(score / cap); 0 for none.
        position_bias: position bias on the scores, if any.
        qk_norm: norms over each query and key head.
        head_scale: a learned factor for each head.
        use_flash_attention: None for any backend family, True without unfused, False without flash.
        backend: `auto`, a backend family or a backend.
        transformer_engine: True to prefer TransformerEngine, False to exclude it, None for either.
        masked_softmax_fusion: unfused attention may use the fused softmax.
    """

    heads: int
    groups: int
    head_dim: int
    scale: float
    qkv_bias: bool
    output_bias: bool
    dropout: float
    causal: bool
    window: tuple[int, int] | None
    softcap: float
    position_bias: PositionBiasSlice | None
    qk_norm: bool
    head_scale: bool
    use_flash_attention: bool | None
    backend: str
    transformer_engine: bool | None
    masked_softmax_fusion: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSlice:
    """LayerNorm or RMSNorm; with `zero_centered` the weight is stored minus one."""

    kind: Literal["layernorm", "rmsnorm"]
    epsilon: float
    zero_centered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSlice:
    """MLP of a layer: act(x) or, gated, act(gate) * up, each of width `ffn_hidden_size`."""

    ffn_hidden_size: int
    nonlinearity: NonLinearity
    gated: bool
    bias: bool
    dropout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSlice:
    """Stack of transformer layers.

    Attributes:
        num_layers: number of layers.
        hidden_size: width of the residual stream.
        block: placement of the norms in a layer.
        hidden_dropout: dropout probability of attention and MLP outputs before the residual add, and of the embeddings.
        attention: self-attention.
        rotary: rotary embedding, or None.
        norm: all norms of the stack.
        mlp: MLP of the dense layers.
        moe: experts of the MoE layers; None in a dense stack.
        init_std: standard deviation of the initial weights.
        output_init_std: standard deviation of the initial output projections of attention and MLP.
        recompute: recompute (activation checkpointing); None for none.
        offload: CPU offloading; None for none.
    """

    num_layers: int
    hidden_size: int
    block: Literal["pre_ln", "post_ln", "normformer", "parallel_ln"]
    hidden_dropout: float
    attention: AttentionSlice
    rotary: RotarySlice | None
    norm: NormSlice
    mlp: MLPSlice
    moe: MoESlice | None
    init_std: float
    output_init_std: float
    recompute: RecomputeSlice | None
    offload: OffloadSlice | None

    def recomputed_modules(self, layer: int, *, offloading: bool) -> frozenset[RecomputeModule]:
        """Return the modules of a layer that are recomputed; none if the layer is recomputed as a whole.

        Args:
            layer: 0-based index of the layer.
            offloading: CPU offloading is active, which needs a GPU.
        """
        if self.recompute is not None and layer < self.recompute.layers:
            return frozenset()
        modules = frozenset[RecomputeModule]() if self.recompute is None else self.recompute.modules
        if not offloading or self.offload is None or layer >= self.offload.layers:
            return modules
        return modules | self.offload.recomputed_modules & self.effective_modules(range(layer, layer + 1))

    def effective_modules(self, layers: range) -> frozenset[RecomputeModule]:
        """Return the modules that some of these layers have and that can be recomputed."""
        moe = self.moe
        return effective_modules(
            moe.layers[layers.start : layers.stop] if moe is not None else (),
            shared_expert=moe is not None and moe.shared_ffn_hidden_size is not None,
            post_ln=self.block == "post_ln",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTSlice:
    """Decoder-only GPT.

    Attributes:
        stack: the decoder.
        seq_length: sequence length in training.
        learned_positions: rows of the learned position embedding, None without one.
        positions_by_document: positions may restart at each document of a packed sequence.
        embedding_scale: factor of the embeddings.
        logits_softcap: softcap of the logits, cap * tanh(logit / cap); 0 for none.
        vocab_size: vocabulary size without padding.
        padded_vocab_size: rows of token embedding and output head.
        tied: the output head shares the token embedding.
        embedding_dropout: dropout probability of the embeddings.
        embedding_std: standard deviation of the initial token embeddings.
        label_smoothing: share of the target spread over the other tokens in training.
        seed: seed of the initialization.
        compile: compile each layer; None decides by device.
    """

    stack: StackSlice
    seq_length: int
    learned_positions: int | None
    positions_by_document: bool
    embedding_scale: float
    logits_softcap: float
    vocab_size: int
    padded_vocab_size: int
    tied: bool
    embedding_dropout: float
    embedding_std: float
    label_smoothing: float
    seed: int
    compile: bool | None

    @property
    def stacks(self) -> tuple[StackSlice]:
        """All stacks: the only one."""
        return (self.stack,)

    @property
    def max_positions(self) -> int | None:
        """Longest supported sequence, None if unlimited."""
        return self.learned_positions or (self.stack.rotary.positions if self.stack.rotary else None)


def resolve_window(keys: StackKeys, *, causal: bool, max_length: int | None = None) -> tuple[int, int] | None:
    """Resolve the attention window; None if it masks nothing in sequences of up to `max_length` tokens (None: any)."""
    left, right = (
        -1 if max_length is not None and side >= max_length - 1 else side for side in keys.window_size or (-1, -1)
    )
    right = 0 if causal else right
    return None if left < 0 and (causal or right < 0) else (left, right)


def attention_slice(keys: StackKeys, *, causal: bool, max_length: int | None = None) -> AttentionSlice:
    """Resolve the self-attention, for sequences of up to `max_length` tokens (None: any)."""
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
        window=resolve_window(keys, causal=causal, max_length=max_length),
        softcap=keys.attn_logit_softcapping or 0.0,
        position_bias=position_bias_slice(keys),
        qk_norm=keys.qk_layernorm,
        head_scale=keys.headscale,
        use_flash_attention=keys.use_flash_attention,
        backend=keys.attention_backend,
        transformer_engine=keys.transformer_engine,
        masked_softmax_fusion=keys.masked_softmax_fusion,
    )


def mlp_slice(keys: StackKeys) -> MLPSlice:
    """Resolve the MLP."""
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
    """Resolve the norm."""
    return NormSlice(
        kind="rmsnorm" if keys.normalization == "rmsnorm" else "layernorm",
        epsilon=keys.layernorm_epsilon,
        zero_centered=keys.normalization == "layernorm1p" or keys.layernorm_zero_centered_gamma,
    )


def stack_slice(keys: StackKeys, *, causal: bool, positions: int, is_t5: bool = False) -> StackSlice:
    """Resolve a stack, of a T5 or not, for sequences of up to `positions` tokens."""
    scaled = keys.init_method_std / math.sqrt(2 * keys.num_layers)
    moe = moe_slice(keys, is_t5=is_t5)
    return StackSlice(
        num_layers=keys.num_layers,
        hidden_size=keys.hidden_size,
        block=keys.transformer_block_type,
        hidden_dropout=keys.hidden_dropout,
        attention=attention_slice(
            keys,
            causal=causal,
            max_length=positions if keys.position_embedding_type in BOUNDED_POSITION_TYPES else None,
        ),
        rotary=rotary_slice(keys, positions=positions),
        norm=norm_slice(keys),
        mlp=mlp_slice(keys),
        moe=moe,
        init_std=keys.init_method_std,
        output_init_std=scaled if keys.use_scaled_init_method else keys.init_method_std,
        recompute=recompute_slice(keys, with_experts=moe.layers if moe else ()),
        offload=offload_slice(keys),
    )


def max_sequence_length(keys: GPTKeys | BertKeys) -> int | None:
    """Return the longest supported sequence, None if unlimited."""
    if keys.position_embedding_type not in BOUNDED_POSITION_TYPES:
        return None
    return max(keys.encoder_seq_length, keys.max_position_embeddings or 0)


def resolve_vocab_sizes(keys: ModelKeys, vocab_size: int) -> tuple[int, int]:
    """Return the vocabulary size without and with padding, for a tokenizer of `vocab_size` tokens.

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
    return real_vocab, -(-real_vocab // divisor) * divisor


def gpt_slice(keys: GPTKeys, *, vocab_size: int) -> GPTSlice:
    """Resolve the keys of a GPT for a tokenizer of `vocab_size` tokens.

    Raises:
        ValueError: `override_vocab_size` is smaller than the tokenizer's vocabulary.
    """
    real_vocab, padded_vocab = resolve_vocab_sizes(keys, vocab_size)
    positions = max(keys.encoder_seq_length, keys.max_position_embeddings or 0)
    return GPTSlice(
        stack=stack_slice(keys, causal=True, positions=positions),
        seq_length=keys.encoder_seq_length,
        learned_positions=positions if keys.position_embedding_type.startswith("learned_") else None,
        positions_by_document=keys.position_embedding_type == "learned_absolute",
        embedding_scale=math.sqrt(keys.hidden_size) if keys.apply_embedding_scaling else 1.0,
        logits_softcap=keys.logits_soft_cap or 0.0,
        vocab_size=real_vocab,
        padded_vocab_size=padded_vocab,
        tied=keys.share_embeddings_and_output_weights,
        embedding_dropout=keys.hidden_dropout if keys.embedding_dropout is None else keys.embedding_dropout,
        embedding_std=keys.embedding_init_method_std or keys.init_method_std,
        label_smoothing=keys.label_smoothing,
        seed=keys.seed,
        compile=keys.compile,
    )
