"""BERT with its masked language modeling head; pooler and next sentence prediction are ignored."""

from __future__ import annotations

from .architecture import Architecture
from .config_fields import SIZES, FixedKeys, KeyField, RequiredValue, TiedHeadField, position_field
from .weight_layout import ConcatenatedRows, PaddedVocabulary
from .weight_map import WeightMap, WeightRule, weight_and_bias_rules

_LAYER, _HF_LAYER = "encoder.layers.{n}.", "bert.encoder.layer.{n}."

BERT = Architecture(
    model_type="bert",
    name="BertForMaskedLM",
    aliases=("BertForPreTraining",),
    family="bert",
    field_mappings=(
        FixedKeys(
            {
                "normalization": "layernorm",
                "activation": "gelu",
                "bias": True,
                "transformer_block_type": "post_ln",
                "position_embedding_type": "learned_absolute",
                "ffn_dropout": 0.0,
                "embedding_dropout": None,
                "bert.embedding_norm": True,
                "bert.mlm_transform": True,
                "bert.head_bias": True,
            }
        ),
        *SIZES,
        position_field(512),
        KeyField("type_vocab_size", ("bert.token_types",), "size", 2),
        KeyField("layer_norm_eps", ("layernorm_epsilon",), "number", 1e-12),
        KeyField("hidden_dropout_prob", ("hidden_dropout",), "share", 0.1),
        KeyField("attention_probs_dropout_prob", ("attention_dropout",), "share", 0.1),
        RequiredValue("hidden_act", "gelu", "the MLM head uses the exact GELU", write_value=True),
        RequiredValue("position_embedding_type", "absolute", "relative positions are not supported"),
        TiedHeadField(default=True),
    ),
    ignored_fields=frozenset(
        {
            *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
            *("pooler_size_per_head", "pooler_type"),
        }
    ),
    weights=WeightMap(
        rules=(
            WeightRule("token_embedding.weight", ("bert.embeddings.word_embeddings.weight",), PaddedVocabulary()),
            WeightRule("position_embedding.weight", ("bert.embeddings.position_embeddings.weight",)),
            WeightRule("token_type_embedding.weight", ("bert.embeddings.token_type_embeddings.weight",)),
            WeightRule("head_bias", ("cls.predictions.bias",), PaddedVocabulary()),
            WeightRule("head.weight", ("cls.predictions.decoder.weight",), PaddedVocabulary()),
            *weight_and_bias_rules(
                "",
                "",
                [
                    ("embedding_norm", "bert.embeddings.LayerNorm"),
                    ("transform", "cls.predictions.transform.dense"),
                    ("transform_norm", "cls.predictions.transform.LayerNorm"),
                ],
            ),
            WeightRule(
                f"{_LAYER}attention.qkv.{{kind}}",
                tuple(f"{_HF_LAYER}attention.self.{part}.{{kind}}" for part in ("query", "key", "value")),
                ConcatenatedRows(("heads", "groups", "groups")),
            ),
            *weight_and_bias_rules(
                _LAYER,
                _HF_LAYER,
                [
                    ("attention.output", "attention.output.dense"),
                    ("attention_norm", "attention.output.LayerNorm"),
                    ("mlp.up", "intermediate.dense"),
                    ("mlp.down", "output.dense"),
                    ("mlp_norm", "output.LayerNorm"),
                ],
            ),
        ),
        head="cls.predictions.decoder.weight",
        embedding="bert.embeddings.word_embeddings.weight",
        duplicates=((r"cls\.predictions\.decoder\.bias", "cls.predictions.bias"),),
        buffers=(r"bert\.embeddings\.(position_ids|token_type_ids)",),
        ignored=(r"bert\.pooler\.dense\.(weight|bias)", r"cls\.seq_relationship\.(weight|bias)"),
        renames=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
    ),
)
