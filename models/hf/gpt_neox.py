"""GPT-NeoX and Pythia, whose fused QKV weights are interleaved by head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config.families import FamilyKeys
from .architecture import Architecture
from .config_fields import (
    SIZES,
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
from .rope_fields import RotaryFields
from .weight_layout import PaddedVocabulary, QKVInterleavedByHead
from .weight_map import WeightMap, WeightRule, weight_and_bias_rules

_LAYER, _HF_LAYER = "decoder.layers.{n}.", "gpt_neox.layers.{n}."


@dataclass(frozen=True, slots=True)
class _Block:
    """`use_parallel_residual`: parallel or sequential attention and MLP."""

    fields = ("use_parallel_residual",)

    def read(self, config: HFConfig) -> Mapping[str, Any]:
        parallel = validate_value("use_parallel_residual", config.get("use_parallel_residual", True), "switch")
        return {"transformer_block_type": "parallel_ln" if parallel else "pre_ln"}

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        return {"use_parallel_residual": get_key(keys, "transformer_block_type") == "parallel_ln"}


GPT_NEOX = Architecture(
    model_type="gpt_neox",
    name="GPTNeoXForCausalLM",
    family="gpt",
    field_mappings=(
        FixedKeys({"normalization": "layernorm", "bias": True, "ffn_dropout": 0.0, "embedding_dropout": None}),
        *SIZES,
        position_field(2048),
        KeyField("layer_norm_eps", ("layernorm_epsilon",), "number", 1e-5),
        KeyField("hidden_dropout", ("hidden_dropout",), "share", 0.0),
        KeyField("attention_dropout", ("attention_dropout",), "share", 0.0),
        ActivationField("hidden_act", gated=False, default="gelu"),
        RotaryFields(base="rotary_emb_base", fraction="rotary_pct", default_fraction=0.25),
        TiedHeadField(default=False),
        RequiredValue(
            "attention_bias",
            True,
            "the MLP has biases, and `model.bias` applies to both",
            write_value=True,
        ),
        _Block(),
    ),
    weights=WeightMap(
        rules=(
            WeightRule("token_embedding.weight", ("gpt_neox.embed_in.weight",), PaddedVocabulary()),
            WeightRule("head.weight", ("embed_out.weight",), PaddedVocabulary()),
            *weight_and_bias_rules("decoder.", "gpt_neox.", [("final_norm", "final_layer_norm")]),
            WeightRule(
                f"{_LAYER}attention.qkv.{{kind}}",
                (f"{_HF_LAYER}attention.query_key_value.{{kind}}",),
                QKVInterleavedByHead(),
            ),
            *weight_and_bias_rules(
                _LAYER,
                _HF_LAYER,
                [
                    ("attention_norm", "input_layernorm"),
                    ("mlp_norm", "post_attention_layernorm"),
                    ("attention.output", "attention.dense"),
                    ("mlp.up", "mlp.dense_h_to_4h"),
                    ("mlp.down", "mlp.dense_4h_to_h"),
                ],
            ),
        ),
        head="embed_out.weight",
        embedding="gpt_neox.embed_in.weight",
        buffers=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    ),
)
