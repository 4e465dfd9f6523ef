"""T5 v1.0 and v1.1, ByT5, and mT5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config.families import FamilyKeys
from ..config.sizes import head_dim_of
from .architecture import Architecture
from .config_fields import (
    ActivationField,
    FieldError,
    FieldMapping,
    FixedKeys,
    HFConfig,
    KeyField,
    RequiredValue,
    format_value,
    get_key,
    validate_value,
)
from .weight_layout import ConcatenatedRows, PaddedVocabulary
from .weight_map import WeightMap, WeightRule

_STACKS = ("encoder", "decoder")


def _stack_rows(stack: str) -> tuple[WeightRule, ...]:
    prefix, hf_prefix = f"{stack}.layers.{{n}}.", f"{stack}.block.{{n}}.layer."
    mlp = f"{hf_prefix}{1 if stack == 'encoder' else 2}."
    attention, cross = f"{hf_prefix}0.SelfAttention.", f"{hf_prefix}1.EncDecAttention."
    table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    rows = (
        WeightRule(f"{stack}.final_norm.weight", (f"{stack}.final_layer_norm.weight",)),
        WeightRule(f"{stack}.score_positions.table", (table,)),
        WeightRule(f"{prefix}attention_norm.weight", (f"{hf_prefix}0.layer_norm.weight",)),
        WeightRule(
            f"{prefix}attention.qkv.weight",
            tuple(f"{attention}{part}.weight" for part in "qkv"),
            ConcatenatedRows(("heads", "groups", "groups")),
        ),
        WeightRule(f"{prefix}attention.output.weight", (f"{attention}o.weight",)),
        WeightRule(f"{prefix}mlp_norm.weight", (f"{mlp}layer_norm.weight",)),
        WeightRule(f"{prefix}mlp.down.weight", (f"{mlp}DenseReluDense.wo.weight",)),
    )
    if stack == "encoder":
        return rows
    return (
        *rows,
        WeightRule(f"{prefix}cross_attention_norm.weight", (f"{hf_prefix}1.layer_norm.weight",)),
        WeightRule(f"{prefix}cross_attention.query.weight", (f"{cross}q.weight",)),
        WeightRule(f"{prefix}cross_attention.kv.weight", (f"{cross}k.weight", f"{cross}v.weight"), ConcatenatedRows()),
        WeightRule(f"{prefix}cross_attention.output.weight", (f"{cross}o.weight",)),
    )


def _up_row(stack: str, names: tuple[str, ...]) -> WeightRule:
    hf_prefix = f"{stack}.block.{{n}}.layer.{1 if stack == 'encoder' else 2}.DenseReluDense."
    return WeightRule(
        f"{stack}.layers.{{n}}.mlp.up.weight", tuple(f"{hf_prefix}{name}.weight" for name in names), ConcatenatedRows()
    )


def _weights(up: tuple[str, ...]) -> WeightMap:
    return WeightMap(
        rules=(
            WeightRule("token_embedding.weight", ("shared.weight",), PaddedVocabulary()),
            WeightRule("head.weight", ("lm_head.weight",), PaddedVocabulary()),
            *(row for stack in _STACKS for row in (*_stack_rows(stack), _up_row(stack, up))),
        ),
        head="lm_head.weight",
        embedding="shared.weight",
        duplicates=((r"(encoder|decoder)\.embed_tokens\.weight", "shared.weight"),),
        # The T5 v1.0 checkpoints contain an unused relative position bias of the cross-attention.
        buffers=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    )


def _both(*names: str) -> tuple[str, ...]:
    return tuple(f"{stack}.{name}" for name in names for stack in _STACKS)


@dataclass(frozen=True, slots=True)
class _FeedForward:
    """`feed_forward_proj`: activation, with the prefix `gated-` in a gated MLP; `gated-gelu` is the tanh approximation.

    Args:
        default: value if the field is absent.
        gated: the MLP weights of the architecture are gated.
    """

    default: str
    gated: bool
    fields = ("feed_forward_proj", "dense_act_fn", "is_gated_act")

    def read(self, config: HFConfig) -> Mapping[str, Any]:
        value = config.get("feed_forward_proj", self.default)
        name = value.removeprefix("gated-") if isinstance(value, str) else value
        if (isinstance(value, str) and value.startswith("gated-")) != self.gated:
            raise FieldError(f"`feed_forward_proj` ({format_value(value)}) contradicts the weights of the MLP")
        if value == "gated-gelu":
            name = "gelu_new"
        if config.get("dense_act_fn", name) != name or config.get("is_gated_act", self.gated) is not self.gated:
            raise FieldError(
                f"`dense_act_fn` and `is_gated_act` must be those of `feed_forward_proj` ({format_value(value)})"
            )
        activation = ActivationField("feed_forward_proj", gated=self.gated, default="")
        keys = activation.read(HFConfig({"feed_forward_proj": name}, has_separate_head=False))
        return {f"{stack}.{key}": value for key, value in keys.items() for stack in _STACKS}

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        activation = ActivationField("feed_forward_proj", gated=self.gated, default="")
        name = activation.write(get_key(keys, "encoder"))["feed_forward_proj"]
        if not self.gated:
            return {"feed_forward_proj": name}
        return {"feed_forward_proj": "gated-gelu" if name == "gelu_new" else f"gated-{name}"}


@dataclass(frozen=True, slots=True)
class _Head:
    """Output head: T5 v1.0 ties it to the embeddings and scales its input; v1.1 does neither.

    Newer versions of transformers write `tie_word_embeddings: true` for both, and `scale_decoder_outputs`; the head is
    tied if the weights have no separate one. Only newer versions support a tied head without the scale.

    Args:
        tied_is_scaled: support a tied head, which is scaled by default; False for architectures where versions of
            transformers disagree on the scale.
    """

    tied_is_scaled: bool = True
    fields = ("tie_word_embeddings", "scale_decoder_outputs")

    def read(self, config: HFConfig) -> Mapping[str, Any]:
        field = validate_value("tie_word_embeddings", config.get("tie_word_embeddings", True), "switch")
        tied = field and not config.has_separate_head
        if tied and not self.tied_is_scaled:
            raise FieldError(
                "`tie_word_embeddings` (true): the weights have no separate output head, and versions of transformers "
                "disagree on the scale of a tied one"
            )
        scaled = validate_value("scale_decoder_outputs", config.get("scale_decoder_outputs", tied), "switch")
        if scaled and not tied:
            raise FieldError("`scale_decoder_outputs` (true) must be false: the head is not tied to the embeddings")
        return {"share_decoder_tokens_head_embeddings": tied, "scale_tied_logits": scaled}

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        tied = get_key(keys, "share_decoder_tokens_head_embeddings")
        unscaled = {"scale_decoder_outputs": False} if tied and not get_key(keys, "scale_tied_logits") else {}
        return {"tie_word_embeddings": tied, **unscaled}


def _parts(default: str, *, gated: bool, head: _Head) -> tuple[FieldMapping, ...]:
    return (
        FixedKeys(
            {
                **dict.fromkeys(_both("normalization"), "rmsnorm"),
                **dict.fromkeys(_both("bias", "normalize_attention_scores"), False),
                **dict.fromkeys(_both("position_embedding_type"), "relative"),
                "share_token_embeddings": True,
                "tokens_head_bias": False,
                "embedding_dropout": None,
            }
        ),
        KeyField("vocab_size", ("override_vocab_size",), "size"),
        KeyField("d_model", _both("hidden_size"), "size", aliases=("hidden_size",)),
        KeyField(
            "d_kv",
            _both("kv_channels"),
            "size",
            64,
            aliases=("head_dim",),
            value=lambda keys: head_dim_of(keys.encoder),
        ),
        KeyField("d_ff", _both("ffn_hidden_size"), "size"),
        KeyField("num_layers", ("encoder.num_layers",), "size", aliases=("num_hidden_layers",)),
        _DecoderLayers(),
        KeyField("num_heads", _both("num_attention_heads"), "size", aliases=("num_attention_heads",)),
        KeyField("relative_attention_num_buckets", _both("relative_attention_num_buckets"), "size", 32),
        KeyField("relative_attention_max_distance", _both("relative_attention_max_distance"), "size", 128),
        KeyField("dropout_rate", _both("hidden_dropout", "attention_dropout", "ffn_dropout"), "share", 0.1),
        KeyField("layer_norm_epsilon", _both("layernorm_epsilon"), "number", 1e-6),
        _FeedForward(default, gated),
        head,
        RequiredValue("is_encoder_decoder", True, "a single stack of T5 is not supported", write_value=True),
    )


@dataclass(frozen=True, slots=True)
class _DecoderLayers:
    """`num_decoder_layers`; by default, the number of encoder layers."""

    fields = ("num_decoder_layers",)

    def read(self, config: HFConfig) -> Mapping[str, Any]:
        layers = config.get("num_decoder_layers")
        layers = config.get("num_layers", config.get("num_hidden_layers")) if layers is None else layers
        return {"decoder.num_layers": validate_value("num_decoder_layers", layers, "size")}

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        return {"num_decoder_layers": get_key(keys, "decoder.num_layers")}


_HARMLESS = frozenset({"initializer_factor", "n_positions", "output_past", "max_seq_length"})
_NAME, _OLD = "T5ForConditionalGeneration", ("T5WithLMHeadModel", "T5Model")

T5 = Architecture(
    model_type="t5",
    name=_NAME,
    aliases=_OLD,
    family="t5",
    field_mappings=_parts("relu", gated=False, head=_Head()),
    weights=_weights(("wi",)),
    ignored_fields=_HARMLESS,
)
T5_GATED = Architecture(
    model_type="t5",
    name=_NAME,
    aliases=_OLD,
    family="t5",
    field_mappings=_parts("relu", gated=True, head=_Head()),
    weights=_weights(("wi_0", "wi_1")),
    ignored_fields=_HARMLESS,
)
MT5 = Architecture(
    model_type="mt5",
    name="MT5ForConditionalGeneration",
    family="t5",
    field_mappings=_parts("gated-gelu", gated=True, head=_Head(tied_is_scaled=False)),
    weights=_weights(("wi_0", "wi_1")),
    ignored_fields=_HARMLESS,
)
