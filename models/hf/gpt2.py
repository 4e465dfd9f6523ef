"""GPT-2, whose linear weights are (in, out)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config.families import FamilyKeys
from .architecture import Architecture
from .config_fields import (
    ActivationField,
    FixedKeys,
    HFConfig,
    KeyField,
    RequiredValue,
    TiedHeadField,
    get_key,
    position_field,
    validate_value,
)
from .weight_layout import PaddedVocabulary, Transposed
from .weight_map import WeightMap, WeightRule, weight_and_bias_rules

_LAYER, _HF_LAYER = "decoder.layers.{n}.", "transformer.h.{n}."
_MATRICES = (
    ("attention.qkv", "attn.c_attn"),
    ("attention.output", "attn.c_proj"),
    ("mlp.up", "mlp.c_fc"),
    ("mlp.down", "mlp.c_proj"),
)


@dataclass(frozen=True, slots=True)
class _Inner:
    """Width of the MLP; four times `n_embd` by default."""

    fields = ("n_inner",)

    def read(self, config: HFConfig) -> Mapping[str, Any]:
        width = config.get("n_inner")
        if width is None:
            width = 4 * validate_value("n_embd", config.get("n_embd", config.get("hidden_size")), "size")
        return {"ffn_hidden_size": validate_value("n_inner", width, "size")}

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        return {"n_inner": get_key(keys, "ffn_hidden_size")}


GPT2 = Architecture(
    model_type="gpt2",
    name="GPT2LMHeadModel",
    aliases=("GPT2Model",),
    family="gpt",
    field_mappings=(
        FixedKeys(
            {
                "normalization": "layernorm",
                "bias": True,
                "position_embedding_type": "learned_absolute",
                "ffn_dropout": 0.0,
            }
        ),
        KeyField("vocab_size", ("override_vocab_size",), "size"),
        position_field(1024, "n_positions", ("max_position_embeddings",)),
        KeyField("n_embd", ("hidden_size",), "size", aliases=("hidden_size",)),
        _Inner(),
        KeyField("n_layer", ("num_layers",), "size", aliases=("num_hidden_layers",)),
        KeyField("n_head", ("num_attention_heads",), "size", aliases=("num_attention_heads",)),
        KeyField("layer_norm_epsilon", ("layernorm_epsilon",), "number", 1e-5),
        KeyField("resid_pdrop", ("hidden_dropout",), "share", 0.1),
        KeyField(
            "embd_pdrop",
            ("embedding_dropout",),
            "share",
            0.1,
            value=lambda keys: keys.hidden_dropout if keys.embedding_dropout is None else keys.embedding_dropout,
        ),
        KeyField("attn_pdrop", ("attention_dropout",), "share", 0.1),
        KeyField("scale_attn_weights", ("normalize_attention_scores",), "switch", True),
        ActivationField("activation_function", gated=False, default="gelu_new"),
        TiedHeadField(default=True),
        RequiredValue(
            "scale_attn_by_inverse_layer_idx",
            False,
            "attention scale by layer index is not supported",
        ),
    ),
    weights=WeightMap(
        rules=(
            WeightRule("token_embedding.weight", ("transformer.wte.weight",), PaddedVocabulary()),
            WeightRule("position_embedding.weight", ("transformer.wpe.weight",)),
            WeightRule("head.weight", ("lm_head.weight",), PaddedVocabulary()),
            *weight_and_bias_rules("decoder.", "transformer.", [("final_norm", "ln_f")]),
            *weight_and_bias_rules(_LAYER, _HF_LAYER, [("attention_norm", "ln_1"), ("mlp_norm", "ln_2")]),
            *(WeightRule(f"{_LAYER}{a}.weight", (f"{_HF_LAYER}{b}.weight",), Transposed()) for a, b in _MATRICES),
            *(WeightRule(f"{_LAYER}{a}.bias", (f"{_HF_LAYER}{b}.bias",)) for a, b in _MATRICES),
        ),
        head="lm_head.weight",
        embedding="transformer.wte.weight",
        buffers=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
        renames=((r"^(?=(wte|wpe|ln_f|h\.\d+)\.)", "transformer."),),
    ),
    ignored_fields=frozenset({"reorder_and_upcast_attn"}),  # affects rounding only
)
