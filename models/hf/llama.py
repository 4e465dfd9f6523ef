"""Llama-style architectures: Llama, Mistral, Qwen2, Qwen3 and Mixtral."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config.families import FamilyKeys
from ..config.sizes import head_dim_of
from .architecture import Architecture
from .config_fields import (
    SIZES,
    ActivationField,
    FieldError,
    FieldMapping,
    FixedKeys,
    HFConfig,
    KeyField,
    RequiredValue,
    TiedHeadField,
    format_value,
    get_key,
    position_field,
    validate_value,
)
from .rope_fields import RotaryFields
from .weight_layout import ConcatenatedRows, PaddedVocabulary, PerExpert
from .weight_map import WeightMap, WeightRule, weight_and_bias_rules

_LAYER, _HF_LAYER = "decoder.layers.{n}.", "model.layers.{n}."

_ATTENTION = (
    WeightRule("token_embedding.weight", ("model.embed_tokens.weight",), PaddedVocabulary()),
    WeightRule("head.weight", ("lm_head.weight",), PaddedVocabulary()),
    WeightRule("decoder.final_norm.weight", ("model.norm.weight",)),
    WeightRule(f"{_LAYER}attention_norm.weight", (f"{_HF_LAYER}input_layernorm.weight",)),
    WeightRule(f"{_LAYER}mlp_norm.weight", (f"{_HF_LAYER}post_attention_layernorm.weight",)),
    WeightRule(
        f"{_LAYER}attention.qkv.{{kind}}",
        tuple(f"{_HF_LAYER}self_attn.{part}_proj.{{kind}}" for part in "qkv"),
        ConcatenatedRows(("heads", "groups", "groups")),
    ),
    *weight_and_bias_rules(_LAYER, _HF_LAYER, [("attention.output", "self_attn.o_proj")]),
    WeightRule(f"{_LAYER}attention.query_norm.weight", (f"{_HF_LAYER}self_attn.q_norm.weight",)),
    WeightRule(f"{_LAYER}attention.key_norm.weight", (f"{_HF_LAYER}self_attn.k_norm.weight",)),
)
_MLP = (
    WeightRule(
        f"{_LAYER}mlp.up.{{kind}}",
        (f"{_HF_LAYER}mlp.gate_proj.{{kind}}", f"{_HF_LAYER}mlp.up_proj.{{kind}}"),
        ConcatenatedRows(),
    ),
    *weight_and_bias_rules(_LAYER, _HF_LAYER, [("mlp.down", "mlp.down_proj")]),
)
_SPARSE = f"{_HF_LAYER}block_sparse_moe."
_EXPERTS = (
    WeightRule(f"{_LAYER}mlp.router.weight", (f"{_SPARSE}gate.weight",)),
    WeightRule(
        f"{_LAYER}mlp.experts.up",
        (f"{_SPARSE}experts.{{e}}.w1.weight", f"{_SPARSE}experts.{{e}}.w3.weight"),
        PerExpert(2),
    ),
    WeightRule(f"{_LAYER}mlp.experts.down", (f"{_SPARSE}experts.{{e}}.w2.weight",), PerExpert()),
)


def _weights(*rows: WeightRule) -> WeightMap:
    return WeightMap(
        rules=_ATTENTION + rows,
        head="lm_head.weight",
        embedding="model.embed_tokens.weight",
        buffers=(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq",),
    )


@dataclass(frozen=True, slots=True)
class _Biases:
    """`attention_bias` and `mlp_bias`, which must be equal: stoker has one key for both."""

    fields = ("attention_bias", "mlp_bias")

    def read(self, config: HFConfig) -> Mapping[str, Any]:
        attention, mlp = (validate_value(name, config.get(name, False), "switch") for name in self.fields)
        if attention != mlp:
            raise FieldError(
                f"`attention_bias` ({format_value(attention)}) and `mlp_bias` ({format_value(mlp)}) must be "
                "equal: `model.bias` "
                "applies to both"
            )
        return {"bias": attention}

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        return dict.fromkeys(self.fields, get_key(keys, "bias"))


@dataclass(frozen=True, slots=True)
class _Window:
    """Sliding window of W tokens including the token itself, which is [W - 1, 0] in stoker.

    Args:
        default: W if the field is absent; None for no window.
    """

    default: int | None = None
    fields = ("sliding_window",)

    def read(self, config: HFConfig) -> Mapping[str, Any]:
        width = config.get("sliding_window", self.default)
        return {"window_size": None if width is None else [validate_value("sliding_window", width, "size") - 1, 0]}

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        left = (get_key(keys, "window_size") or [-1])[0]
        return {"sliding_window": None if left < 0 else left + 1}


@dataclass(frozen=True, slots=True)
class _LayerWindows:
    """Qwen's sliding window, which may apply to some layers only; stoker supports all layers or none."""

    fields = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

    def read(self, config: HFConfig) -> Mapping[str, Any]:
        layers = validate_value("num_hidden_layers", config.get("num_hidden_layers"), "size")
        windowed: Any = 0
        if validate_value("use_sliding_window", config.get("use_sliding_window", False), "switch"):
            width = config.get("sliding_window", 4096)
            full = validate_value("max_window_layers", config.get("max_window_layers", 28), "count")
            windowed = 0 if width is None else max(0, layers - full)
        kinds = config.get("layer_types")
        if kinds is not None:
            if not isinstance(kinds, list) or not set(map(str, kinds)) <= {"full_attention", "sliding_attention"}:
                raise FieldError(
                    f"`layer_types` ({format_value(kinds)}) must hold full_attention and sliding_attention only"
                )
            windowed = kinds.count("sliding_attention")
        if windowed == 0:
            return {"window_size": None}
        if windowed != layers:
            raise FieldError(
                f"`sliding_window` applies to {windowed} of {layers} layers; it must apply to all of them or none"
            )
        return {"window_size": [validate_value("sliding_window", config.get("sliding_window", 4096), "size") - 1, 0]}

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        left, layers = (get_key(keys, "window_size") or [-1])[0], get_key(keys, "num_layers")
        if left < 0:
            return {"use_sliding_window": False, "sliding_window": None, "max_window_layers": layers}
        return {"use_sliding_window": True, "sliding_window": left + 1, "max_window_layers": 0}


def _groups(keys: Any) -> int:
    return keys.num_query_groups or keys.num_attention_heads


def _parts(
    *, groups: int | None = None, head_width: int | None = None, positions: int, epsilon: float, base: float = 10000.0
) -> tuple[FieldMapping, ...]:
    """Return the field mappings common to all these architectures; the arguments are the defaults of absent fields."""
    return (
        FixedKeys({"normalization": "rmsnorm", "hidden_dropout": 0.0, "ffn_dropout": 0.0, "embedding_dropout": None}),
        *SIZES,
        KeyField("num_key_value_heads", ("num_query_groups",), "size", groups, nullable=True, value=_groups),
        KeyField("head_dim", ("kv_channels",), "size", head_width, nullable=True, value=head_dim_of),
        position_field(positions),
        KeyField("rms_norm_eps", ("layernorm_epsilon",), "number", epsilon),
        KeyField("attention_dropout", ("attention_dropout",), "share", 0.0),
        ActivationField("hidden_act", gated=True, default="silu"),
        RotaryFields(default_base=base),
        TiedHeadField(default=False),
    )


LLAMA = Architecture(
    model_type="llama",
    name="LlamaForCausalLM",
    family="gpt",
    field_mappings=(*_parts(positions=2048, epsilon=1e-6), _Biases()),
    weights=_weights(*_MLP),
)
MISTRAL = Architecture(
    model_type="mistral",
    name="MistralForCausalLM",
    family="gpt",
    field_mappings=(
        *_parts(groups=8, positions=131072, epsilon=1e-6),
        FixedKeys({"bias": False}),
        _Window(4096),
        RequiredValue("attention_bias", False, "Mistral has no biases"),
    ),
    weights=_weights(*_MLP),
)
QWEN2 = Architecture(
    model_type="qwen2",
    name="Qwen2ForCausalLM",
    family="gpt",
    field_mappings=(
        *_parts(groups=32, positions=32768, epsilon=1e-6),
        FixedKeys({"bias": False, "qkv_bias": True}),
        _LayerWindows(),
        RequiredValue("attention_bias", True, "Qwen2 always has biases on queries, keys and values"),
    ),
    weights=_weights(*_MLP),
)
QWEN3 = Architecture(
    model_type="qwen3",
    name="Qwen3ForCausalLM",
    family="gpt",
    field_mappings=(
        *_parts(groups=32, head_width=128, positions=32768, epsilon=1e-6),
        FixedKeys({"bias": False, "qk_layernorm": True}),
        _LayerWindows(),
        RequiredValue(
            "attention_bias",
            False,
            "the MLP has no biases, and `model.bias` applies to both",
            write_value=True,
        ),
    ),
    weights=_weights(*_MLP),
)
MIXTRAL = Architecture(
    model_type="mixtral",
    name="MixtralForCausalLM",
    family="gpt",
    field_mappings=(
        *_parts(groups=8, positions=131072, epsilon=1e-5, base=1e6),
        FixedKeys({"bias": False, "moe_router_load_balancing_type": "aux_loss", "moe_router_pre_softmax": False}),
        _Window(),
        KeyField("num_local_experts", ("num_moe_experts",), "size", 8),
        KeyField("num_experts_per_tok", ("moe_router_topk",), "size", 2, value=lambda keys: keys.moe_router_topk or 2),
        KeyField("router_aux_loss_coef", ("moe_aux_loss_coeff",), "share", 0.001),
    ),
    weights=_weights(*_EXPERTS),
    ignored_fields=frozenset({"output_router_logits", "router_jitter_noise"}),  # used in training only
)
