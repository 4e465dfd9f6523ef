"""Norms, activation, attention and dropout of a stack: keys, and what they resolve to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field

from ...kernels.attention.backend_support import BackendName
from .extension_keys import GLU_SUFFIX, ExtensionName
from .extensions import extension_names
from .key_block import NonEmptyText, extension_field
from .positions import PositionBiasSlice, PositionKeys, position_bias_slice, resolve_window
from .sizes import head_dim_of

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
OWN_ACTIVATION = "own:"
"""Before the name of an activation of a user's own, as a nonlinearity."""

_ACTIVATIONS: dict[str, tuple[str, bool]] = {
    "gelu": ("gelu", False),
    "approx-gelu": ("gelu_sigmoid", False),
    "relu": ("relu", False),
    "squared-relu": ("relu_squared", False),
    "geglu": ("gelu", True),
    "swiglu": ("silu", True),
    "reglu": ("relu", True),
}
BlockType = Literal["pre_ln", "post_ln", "normformer", "parallel_ln"]
Normalization = Literal["layernorm", "layernorm1p", "rmsnorm"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
AttentionBackend = Literal["auto", "flash", "fused", "unfused", BackendName]


class DenseStackKeys(PositionKeys):
    """Norms, activation, attention and dropout of one stack (nemo_semantics 1.4 and 1.5)."""

    normalization: Normalization = "layernorm"
    """`layernorm`, `layernorm1p` (weight stored minus one, so that weight decay pulls it to 1) or `rmsnorm`."""
    layernorm_epsilon: float = Field(1e-5, gt=0)
    """Epsilon of the norms, added to the variance."""
    layernorm_zero_centered_gamma: bool = False
    """Store the norm weight minus one, for `layernorm` and `rmsnorm`; `layernorm1p` implies it."""
    qk_layernorm: bool = False
    """Apply a norm of the `normalization` kind to each query and key head, before RoPE (Qwen3)."""
    transformer_block_type: BlockType | Annotated[NonEmptyText, ExtensionName("block")] = "pre_ln"
    """Placement of the norms: `pre_ln`, before attention and MLP; `post_ln`, after the residual adds, without a final
    norm; `normformer`, as `pre_ln` and also after the attention and inside the MLP; `parallel_ln`, as `pre_ln` with
    attention and MLP in parallel on the layer's input (stoker's own: GPT-NeoX). Or a `block` of your own."""
    headscale: bool = False
    """Learned scale of each attention head's output, initialized to 1 (NormFormer)."""

    activation: Activation | Annotated[NonEmptyText, ExtensionName("activation")] = "gelu"
    """Activation of the MLP. `fast-x` is the same as `x`: gated projections are always fused into one matrix. Or an
    `activation` of your own, `NAME`, or `NAME-glu` as the gate of a GLU."""
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

    attn_logit_softcapping: float | None = Field(None, gt=0)
    """Softcap of the attention scores, cap * tanh(score / cap) (Gemma 2); null: none."""

    softmax_type: SoftmaxType = "vanilla"
    """Megatron's: `off-by-one` adds 1 to the denominator of the softmax of attention scores, so that a query may attend
    to nothing; `learnable` adds exp(sink) of a learned attention sink per head, initialized to 0 (gpt-oss)."""

    fp32_residual_connection: bool = False
    """Keep the residual stream in fp32 beside 16-bit weights, whose norms round it: sums of many layers lose less, and
    do not overflow in fp16. Twice the memory of the residual stream. With fp32 weights it is fp32 anyway."""
    apply_query_key_layer_scaling: bool = False
    """Keeps scores from overflowing in fp16, without mathematical effect. Here they never do, as they are scaled in
    fp32, so it changes nothing; disabled with a warning in other precisions, as in NeMo."""
    normalize_attention_scores: bool = True
    """Scale attention scores by 1/sqrt(head width); False: no scaling (Hugging Face T5)."""
    use_flash_attention: bool | None = None
    """True: flash or fused kernels only. False: no flash kernels. null: the best supported backend."""
    attention_backend: AttentionBackend = extension_field("auto")
    """A backend family (`flash`, `fused`, `unfused`) or a backend by name; `auto` lets the dispatcher choose."""
    transformer_engine: bool | None = None
    """True: prefer TransformerEngine's attention in each family, an error if it is not installed; False: never use it;
    null: where it is installed and the best choice. With `fp8` True also lets the linear layers multiply through it."""
    masked_softmax_fusion: bool = True
    """Fuse scale, mask and softmax of unfused attention into one kernel on a GPU; False: plain PyTorch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSlice:
    """Attention of a layer.

    Attributes:
        groups: key and value heads; divides `heads`, the query heads.
        head_dim: width of a head.
        scale: factor of the scores.
        qkv_bias: bias on the projections of queries, keys and values.
        output_bias: bias on the output projection.
        dropout: dropout probability of the attention weights in training.
        window: attention window to the left and right of a query, inclusive, -1 for unlimited; None for no window.
        softcap: softcap of the scores, cap * tanh(score / cap); 0 for none.
        softmax_type: attention sinks in the denominator of the softmax: none (`vanilla`), zeros or learned.
        qk_norm: norms over each query and key head, before the rotary embedding.
        head_scale: a learned factor of each head's output (NormFormer, arXiv 2110.09456).
        use_flash_attention: None for any backend family, True without unfused, False without flash.
        backend: `auto`, a backend family or a backend.
        transformer_engine: True to prefer TransformerEngine, False to exclude it, None for either.
        masked_softmax_fusion: unfused attention may use the fused softmax.
        split: other ranks have other heads.
        fp8: training multiplies in fp8, in layers whose linear layers do.
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
    softmax_type: SoftmaxType
    position_bias: PositionBiasSlice | None
    qk_norm: bool
    head_scale: bool
    use_flash_attention: bool | None
    backend: str
    transformer_engine: bool | None
    masked_softmax_fusion: bool
    split: bool = False
    fp8: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSlice:
    """LayerNorm or RMSNorm; with `zero_centered` the weight is stored minus one."""

    kind: Literal["layernorm", "rmsnorm"]
    epsilon: float
    zero_centered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSlice:
    """MLP of a layer: act(x) or, gated, act(gate) * up, each of width `ffn_hidden_size`.

    `nonlinearity` is a name in `kernels.activations.NONLINEARITIES`, or `OWN_ACTIVATION` and the name of a component.
    """

    ffn_hidden_size: int
    nonlinearity: str
    gated: bool
    bias: bool
    dropout: float

    @property
    def is_own(self) -> bool:
        """True for an activation of a user's own, which the fused kernels do not know."""
        return self.nonlinearity.startswith(OWN_ACTIVATION)


def attention_slice(
    keys: DenseStackKeys, *, causal: bool, max_length: int | None = None, fp8: bool = False
) -> AttentionSlice:
    """Resolve the self-attention, in `fp8` or not, for sequences of up to `max_length` tokens (None: any)."""
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
        softmax_type=keys.softmax_type,
        position_bias=position_bias_slice(keys),
        qk_norm=keys.qk_layernorm,
        head_scale=keys.headscale,
        use_flash_attention=keys.use_flash_attention,
        backend=keys.attention_backend,
        transformer_engine=keys.transformer_engine,
        masked_softmax_fusion=keys.masked_softmax_fusion,
        fp8=fp8,
    )


def mlp_slice(keys: DenseStackKeys) -> MLPSlice:
    """Resolve the MLP."""
    nonlinearity, gated = _activation(keys.activation)
    if keys.openai_gelu and nonlinearity == "gelu":
        nonlinearity = "gelu_tanh"
    return MLPSlice(
        ffn_hidden_size=keys.ffn_hidden_size,
        nonlinearity=nonlinearity,
        gated=gated,
        bias=keys.bias,
        dropout=keys.ffn_dropout,
    )


def is_own_block(block: str) -> bool:
    """Return True for a `transformer_block_type` of a user's own."""
    return block not in get_args(BlockType)


def _activation(name: str) -> tuple[str, bool]:
    """Return the nonlinearity, and whether it is the gate of a GLU."""
    if known := _ACTIVATIONS.get(name.removeprefix("fast-")):
        return known
    gated = name not in extension_names("activation")
    return f"{OWN_ACTIVATION}{name.removesuffix(GLU_SUFFIX) if gated else name}", gated


def norm_slice(keys: DenseStackKeys) -> NormSlice:
    """Resolve the norm."""
    return NormSlice(
        kind="rmsnorm" if keys.normalization == "rmsnorm" else "layernorm",
        epsilon=keys.layernorm_epsilon,
        zero_centered=keys.normalization == "layernorm1p" or keys.layernorm_zero_centered_gamma,
    )
