"""Configuration keys of one stack of layers besides experts, recompute and offloading."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from .key_block import ConfigBlock, extension_field

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


class DenseStackKeys(ConfigBlock):
    """Sizes, norms, activation, attention, positions and dropout of one stack (nemo_semantics 1.4 and 1.5)."""

    model_config = ConfigDict(defer_build=True)  # this class and most that derive from it validate nothing themselves

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
    """`layernorm`, `layernorm1p` (weight stored minus one, so that weight decay pulls it to 1) or `rmsnorm`."""
    layernorm_epsilon: float = Field(1e-5, gt=0)
    """Epsilon of the norms, added to the variance."""
    layernorm_zero_centered_gamma: bool = False
    """Store the norm weight minus one, for `layernorm` and `rmsnorm`; `layernorm1p` implies it."""
    qk_layernorm: bool = False
    """Apply a norm of the `normalization` kind to each query and key head, before RoPE (Qwen3)."""
    transformer_block_type: Literal["pre_ln", "post_ln", "normformer", "parallel_ln"] = "pre_ln"
    """Placement of the norms: `pre_ln`, before attention and MLP; `post_ln`, after the residual adds, without a final
    norm; `normformer`, as `pre_ln` and also after the attention and inside the MLP; `parallel_ln`, as `pre_ln` with
    attention and MLP in parallel on the layer's input (stoker's own: GPT-NeoX)."""
    headscale: bool = False
    """Learned scale of each attention head's output, initialized to 1 (NormFormer)."""

    activation: Activation = "gelu"
    """Activation of the MLP. `fast-x` is the same as `x`: gated projections are always fused into one matrix."""
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
    """Standard deviation of the normal initialization of weights."""
    use_scaled_init_method: bool = True
    """Divide `init_method_std` by sqrt(2 * num_layers) for the output projections of attention and MLP."""

    position_embedding_type: PositionEmbedding = "learned_absolute"
    """Learned position embeddings (`learned_absolute`; `learned_parameters`: not restarted at documents within a
    sample), rotary embedding (`rope`; `xpos` decays with distance), a bias on the attention scores (`alibi`, `kerple`,
    `sandwich`, T5's `relative`), or `none`."""
    rotary_percentage: float = Field(1.0, gt=0, le=1)
    """Fraction of each head's channels that is rotated."""
    rotary_base: float = Field(10000.0, gt=0)
    """Base of the rotary frequencies: base ** (-2i / d)."""
    rotary_interleaved: bool = False
    """Rotate pairs (2i, 2i+1) instead of the two halves of the head."""
    seq_len_interpolation_factor: float | None = Field(None, ge=1)
    """Divide positions by this factor before rotating; null is 1."""
    scale_positional_embedding: bool = False
    """NeMo's key for Llama 3.1's RoPE scaling, the same as `rotary_scaling: llama3`."""
    rotary_scaling: Literal["llama3", "yarn"] | None = extension_field(None)
    """RoPE frequency scaling for long contexts: Llama 3.1's or YaRN; null: none."""
    rotary_scaling_factor: float = extension_field(8.0, ge=1)
    """Factor by which `rotary_scaling` divides the lowest frequencies (Hugging Face: `factor`)."""
    rotary_original_length: int = extension_field(8192, ge=1)
    """Context length before `rotary_scaling` (Hugging Face: `original_max_position_embeddings`)."""
    rotary_low_turns: float | None = extension_field(None, gt=0)
    """Frequencies with fewer rotations in that length are scaled; null: 1 (`low_freq_factor`; YaRN: `beta_slow`)."""
    rotary_high_turns: float | None = extension_field(None, gt=0)
    """Frequencies with more rotations are kept; null: 4 for `llama3` (`high_freq_factor`), 32 for `yarn`
    (`beta_fast`)."""
    num_attention_heads_alibi: int | None = Field(None, ge=1)
    """Number of first heads with ALiBi slopes, the others have no position bias; null: all heads."""
    relative_attention_num_buckets: int = Field(32, ge=2)
    """Number of distance buckets of `relative`, including those of later keys."""
    relative_attention_max_distance: int = Field(128, ge=2)
    """Distances from this on share the last bucket of `relative`."""
    window_size: Window | None = None
    """Sliding window `[left, right]`: a token attends to this many tokens before and after it, -1 for all; Hugging
    Face's `sliding_window=4096` is `[4095, 0]`."""
    attn_logit_softcapping: float | None = Field(None, gt=0)
    """Softcap of the attention scores, cap * tanh(score / cap) (Gemma 2); null: none."""

    apply_query_key_layer_scaling: bool = False
    """An fp16 trick without mathematical effect; disabled with a warning in other precisions, as in NeMo."""
    normalize_attention_scores: bool = True
    """Scale attention scores by 1/sqrt(head width); False: no scaling (Hugging Face T5)."""
    use_flash_attention: bool | None = None
    """True: flash or fused kernels only. False: no flash kernels. null: the best supported backend."""
    attention_backend: AttentionBackend = extension_field("auto")
    """A backend family (`flash`, `fused`, `unfused`) or a backend by name; `auto` lets the dispatcher choose."""
    transformer_engine: bool | None = None
    """True: prefer TransformerEngine's attention in each family, an error if it is not installed; False: never use it;
    null: where it is installed and the best choice. Linear layers are always PyTorch's."""
    masked_softmax_fusion: bool = True
    """Fuse scale, mask and softmax of unfused attention into one kernel on a GPU; False: plain PyTorch."""
