"""GPT-NeoX and Pythia, whose fused QKV weights are interleaved by head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config.families import FamilyKeys
from .architecture import Architecture
from .config_fields import Activation, Field, FixedKeys, HFConfig, RequiredValue, TiedHeadField, checked, get_key
from .llama import longest
from .rope_fields import RotaryFields
from .weight_layout import PaddedVocabulary, QKVInterleavedByHead
from .weight_map import Row, WeightMap, weight_and_bias_rules

_LAYER, _HF_LAYER = "decoder.layers.{n}.", "gpt_neox.layers.{n}."


@dataclass(frozen=True, slots=True)
class _Block:
    """`use_parallel_residual`: parallel or sequential attention and MLP."""

    fields = ("use_parallel_residual",)

    def read(self, config: HFConfig) -> Mapping[str, Any]:
        parallel = checked("use_parallel_residual", config.get("use_parallel_residual", True), "switch")
        return {"transformer_block_type": "parallel_ln" if parallel else "pre_ln"}

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        return {"use_parallel_residual": get_key(keys, "transformer_block_type") == "parallel_ln"}


GPT_NEOX = Architecture(
    model_type="gpt_neox",
    name="GPTNeoXForCausalLM",
    family="gpt",
    parts=(
        FixedKeys({"normalization": "layernorm", "bias": True, "ffn_dropout": 0.0, "embedding_dropout": None}),
        Field("vocab_size", ("override_vocab_size",), "size"),
        Field("hidden_size", ("hidden_size",), "size"),
        Field("intermediate_size", ("ffn_hidden_size",), "size"),
        Field("num_hidden_layers", ("num_layers",), "size"),
        Field("num_attention_heads", ("num_attention_heads",), "size"),
        Field(
            "max_position_embeddings", ("encoder_seq_length", "max_position_embeddings"), "size", 2048, value=longest
        ),
        Field("layer_norm_eps", ("layernorm_epsilon",), "number", 1e-5),
        Field("hidden_dropout", ("hidden_dropout",), "share", 0.0),
        Field("attention_dropout", ("attention_dropout",), "share", 0.0),
        Activation("hidden_act", gated=False, default="gelu"),
        RotaryFields(base="rotary_emb_base", part="rotary_pct", default_fraction=0.25),
        TiedHeadField("share_embeddings_and_output_weights", default=False),
        RequiredValue(
            "attention_bias",
            True,
            "the MLP has biases, and `model.bias` applies to both",
            default=True,
            write_value=True,
        ),
        _Block(),
    ),
    weights=WeightMap(
        rows=(
            Row("token_embedding.weight", ("gpt_neox.embed_in.weight",), PaddedVocabulary()),
            Row("head.weight", ("embed_out.weight",), PaddedVocabulary()),
            *weight_and_bias_rules("decoder.", "gpt_neox.", [("final_norm", "final_layer_norm")]),
            Row(
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
