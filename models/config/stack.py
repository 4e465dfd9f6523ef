"""The keys of one stack of layers. GPT holds them at `model.*`, T5 in `model.encoder` and `model.decoder`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .key_block import Block, own
from .memory import MemoryKeys
from .moe import MoEKeys

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
PositionEmbedding = Literal[
    "learned_absolute",
    "learned_parameters",
    "rope",
    "xpos",
    "alibi",
    "kerple",
    "sandwich",
    "relative",
    "none",
]
Window = Annotated[list[Annotated[int, Field(ge=-1)]], Field(min_length=2, max_length=2)]
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


class DenseStackKeys(Block):
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
    qk_layernorm: bool = False
    """A norm of the `normalization` kind over each query and key head, before they are rotated (Qwen3)."""
    transformer_block_type: Literal["pre_ln", "post_ln", "normformer", "parallel_ln"] = "pre_ln"
    """Where the norms sit in a layer: before attention and MLP; after the residual add, without a final norm; before
    them and again after the attention and inside the MLP; or as the first, with all parts of a layer reading what
    entered it (`parallel_ln`, stoker's own: GPT-NeoX)."""
    headscale: bool = False
    """A learned factor for what each attention head gives, 1 at first (NormFormer)."""

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
    """How positions enter: a table added to the embeddings (`learned_parameters`: whatever documents a sample holds),
    rotation of queries and keys (`rope`; `xpos` fades with distance), a term on the scores (`alibi`, `kerple`,
    `sandwich`, T5's `relative`), or not at all."""
    rotary_percentage: float = Field(1.0, gt=0, le=1)
    """Part of each head that is rotated; the rest passes through."""
    rotary_base: float = Field(10000.0, gt=0)
    """Base of the rotary frequencies: base ** (-2i / d)."""
    rotary_interleaved: bool = False
    """Rotate pairs (2i, 2i+1) instead of the two halves of the head."""
    seq_len_interpolation_factor: float | None = Field(None, ge=1)
    """Divide positions by this factor before rotating; null is 1."""
    scale_positional_embedding: bool = False
    """NeMo's switch for Llama 3.1's rotary frequencies: `rotary_scaling: llama3`."""
    rotary_scaling: Literal["llama3", "yarn"] | None = own(None)
    """Stretch the slow rotary frequencies for long texts: Llama 3.1's way or YaRN; null: no."""
    rotary_scaling_factor: float = own(8.0, ge=1)
    """By which `rotary_scaling` stretches the slowest frequencies (Hugging Face: `factor`)."""
    rotary_original_length: int = own(8192, ge=1)
    """Tokens before `rotary_scaling` (Hugging Face: `original_max_position_embeddings`)."""
    rotary_low_turns: float | None = own(None, gt=0)
    """Waves that turn less often in that length are stretched; null: 1 (`low_freq_factor`, or YaRN's `beta_slow`)."""
    rotary_high_turns: float | None = own(None, gt=0)
    """Waves that turn more often are kept; null: 4 for `llama3` (`high_freq_factor`), 32 for `yarn` (`beta_fast`)."""
    num_attention_heads_alibi: int | None = Field(None, ge=1)
    """The first so many heads have ALiBi's slopes, the others no positions; null: all heads."""
    relative_attention_num_buckets: int = Field(32, ge=2)
    """Buckets of distances of `relative`, those of later keys included."""
    relative_attention_max_distance: int = Field(128, ge=2)
    """Distances from here on share the last bucket of `relative`."""
    window_size: Window | None = None
    """`[left, right]`: a token sees so many tokens before and after it, -1 for all; Hugging Face's
    `sliding_window=4096` is `[4095, 0]`."""
    attn_logit_softcapping: float | None = Field(None, gt=0)
    """Bound attention scores to +-cap by cap * tanh(score / cap) (Gemma 2); null: no bound."""

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


class StackKeys(MemoryKeys, MoEKeys, DenseStackKeys):
    """Everything of one stack, with the experts that may stand in place of its MLPs, and how it saves memory."""
