"""The keys of one stack of layers. GPT holds them at `model.*`, T5 in `model.encoder` and `model.decoder`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .block import Block, own

Activation = Literal[
    "gelu",
    "geglu",
    "swiglu",
    "reglu",
    "squared-relu",
    "fast-geglu",
    "fast-swiglu",
    "fast-reglu",
    "approx-gelu",
    "relu",
]
Normalization = Literal["layernorm", "layernorm1p", "rmsnorm"]
PositionEmbedding = Literal["learned_absolute", "rope", "none"]
AttentionBackend = Literal[
    "auto",
    "flash",
    "fused",
    "unfused",
    "triton",
    "sdpa_flash",
    "sdpa_efficient",
    "sdpa_cudnn",
    "sdpa_math",
    "flash_attn",
    "te_flash",
    "te_fused",
    "te_unfused",
    "lse_first",
    "reference",
]


class StackKeys(Block):
    """Geometry, norms, activation, attention, positions and dropout of one stack (nemo_semantics 1.4 and 1.5)."""

    num_layers: int = Field(12, ge=1)
    """Number of transformer layers."""
    hidden_size: int = Field(768, ge=1)
    """Width of the residual stream."""
    ffn_hidden_size: int = Field(3072, ge=1)
    """Width of the MLP; a gated activation has two projections of this width (no 2/3 rule)."""
    num_attention_heads: int = Field(12, ge=1)
    """Number of query heads."""
    kv_channels: int | None = Field(None, ge=1)
    """Width of one head; null: `hidden_size` / `num_attention_heads`."""
    num_query_groups: int | None = Field(None, ge=1)
    """Number of key/value heads: null or `num_attention_heads` is MHA, 1 is MQA, a divisor in between is GQA."""

    normalization: Normalization = "layernorm"
    """`layernorm`, `layernorm1p` (weight stored minus one, so weight decay pulls it to 1) or `rmsnorm`."""
    layernorm_epsilon: float = Field(1e-5, gt=0)
    """Added to the variance under the root."""
    layernorm_zero_centered_gamma: bool = False
    """Store the norm weight minus one, for `layernorm` and `rmsnorm`; `layernorm1p` implies it."""
    transformer_block_type: Literal["pre_ln"] = "pre_ln"
    """Where the norms sit in a layer."""

    activation: Activation = "gelu"
    """Activation of the MLP. `fast-x` is `x`: the gated projections are always one fused matrix here."""
    openai_gelu: bool = False
    """Use the tanh form of GELU instead of the exact (erf) form."""
    bias: bool = True
    """Bias in the linear layers of attention and MLP."""
    qkv_bias: bool = False
    """Bias on the query, key and value projection even where `bias` is False (Qwen)."""

    hidden_dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout after attention and MLP, before the residual add, and on the embeddings."""
    attention_dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout on the attention probabilities."""
    ffn_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout inside the MLP, after the activation."""

    init_method_std: float = Field(0.02, gt=0)
    """Standard deviation of the normal initialisation of weights."""
    use_scaled_init_method: bool = True
    """Divide that deviation by sqrt(2 * num_layers) for the output projections of attention and MLP."""

    position_embedding_type: PositionEmbedding = "learned_absolute"
    """How positions enter: a learned table, rotary embedding, or nothing."""
    rotary_percentage: float = Field(1.0, gt=0, le=1)
    """Part of each head that is rotated; the rest passes through."""
    rotary_base: float = Field(10000.0, gt=0)
    """Base of the rotary frequencies: base ** (-2i / d)."""
    rotary_interleaved: bool = False
    """Rotate pairs (2i, 2i+1) instead of the two halves of the head."""
    seq_len_interpolation_factor: float | None = Field(None, ge=1)
    """Divide positions by this factor before rotating; null is 1."""

    apply_query_key_layer_scaling: bool = False
    """An fp16 trick without mathematical effect; off, with a warning, for every other precision, as in NeMo."""
    normalize_attention_scores: bool = True
    """Scale scores by 1/sqrt(head width); False: no scaling (Hugging Face T5)."""
    use_flash_attention: bool | None = None
    """True: flash or fused kernels only. False: no flash kernels. null: whatever fits best."""
    attention_backend: AttentionBackend = own("auto")
    """One family (`flash`, `fused`, `unfused`) or one backend by name; `auto` lets the dispatcher choose."""
    transformer_engine: bool | None = None
    """True: TransformerEngine's attention first in each family, an error where it is not installed; False: never; null:
    where it is installed and fits best. The linear layers are PyTorch's in any case."""
    masked_softmax_fusion: bool = True
    """Scale, mask and softmax of unfused attention in one kernel on a GPU; False: in plain torch."""
