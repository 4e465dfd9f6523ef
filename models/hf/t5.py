"""T5 v1.0 and v1.1, ByT5 and mT5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config.families import FamilyKeys
from .architecture import Architecture
from .config_fields import Activation, Field, FieldError, Fixed, Must, Part, Theirs, checked, key_of, shown
from .weight_layout import Stacked, Vocabulary
from .weight_map import Row, WeightMap

_STACKS = ("encoder", "decoder")


def _stack_rows(stack: str) -> tuple[Row, ...]:
    ours, theirs = f"{stack}.layers.{{n}}.", f"{stack}.block.{{n}}.layer."
    mlp = f"{theirs}{1 if stack == 'encoder' else 2}."
    own, cross = f"{theirs}0.SelfAttention.", f"{theirs}1.EncDecAttention."
    table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    rows = (
        Row(f"{stack}.final_norm.weight", (f"{stack}.final_layer_norm.weight",)),
        Row(f"{stack}.score_positions.table", (table,)),
        Row(f"{ours}attention_norm.weight", (f"{theirs}0.layer_norm.weight",)),
        Row(
            f"{ours}attention.qkv.weight",
            tuple(f"{own}{part}.weight" for part in "qkv"),
            Stacked(("heads", "groups", "groups")),
        ),
        Row(f"{ours}attention.output.weight", (f"{own}o.weight",)),
        Row(f"{ours}mlp_norm.weight", (f"{mlp}layer_norm.weight",)),
        Row(f"{ours}mlp.down.weight", (f"{mlp}DenseReluDense.wo.weight",)),
    )
    if stack == "encoder":
        return rows
    return (
        *rows,
        Row(f"{ours}cross_attention_norm.weight", (f"{theirs}1.layer_norm.weight",)),
        Row(f"{ours}cross_attention.query.weight", (f"{cross}q.weight",)),
        Row(f"{ours}cross_attention.kv.weight", (f"{cross}k.weight", f"{cross}v.weight"), Stacked()),
        Row(f"{ours}cross_attention.output.weight", (f"{cross}o.weight",)),
    )


def _up_row(stack: str, names: tuple[str, ...]) -> Row:
    theirs = f"{stack}.block.{{n}}.layer.{1 if stack == 'encoder' else 2}.DenseReluDense."
    return Row(f"{stack}.layers.{{n}}.mlp.up.weight", tuple(f"{theirs}{name}.weight" for name in names), Stacked())


def _weights(up: tuple[str, ...]) -> WeightMap:
    return WeightMap(
        rows=(
            Row("token_embedding.weight", ("shared.weight",), Vocabulary()),
            Row("head.weight", ("lm_head.weight",), Vocabulary()),
            *(row for stack in _STACKS for row in (*_stack_rows(stack), _up_row(stack, up))),
        ),
        head="lm_head.weight",
        embedding="shared.weight",
        copies=((r"(encoder|decoder)\.embed_tokens\.weight", "shared.weight"),),
        # T5 v1.0 was released with a table that cross-attention never reads.
        buffers=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    )


def _both(*names: str) -> tuple[str, ...]:
    return tuple(f"{stack}.{name}" for name in names for stack in _STACKS)


@dataclass(frozen=True, slots=True)
class _FeedForward:
    """`feed_forward_proj`: an activation, with `gated-` before it where there is a gate; gated GELU is the tanh form.

    Args:
        default: what it means to leave the field out.
        gated: whether the architecture's weights have a gate.
    """

    default: str
    gated: bool
    fields = ("feed_forward_proj", "dense_act_fn", "is_gated_act")

    def read(self, theirs: Theirs) -> Mapping[str, Any]:
        text = theirs.get("feed_forward_proj", self.default)
        name = text.removeprefix("gated-") if isinstance(text, str) else text
        if (isinstance(text, str) and text.startswith("gated-")) != self.gated:
            raise FieldError(f"`feed_forward_proj` ({shown(text)}) contradicts the weights of the MLP")
        if text == "gated-gelu":
            name = "gelu_new"
        if theirs.get("dense_act_fn", name) != name or theirs.get("is_gated_act", self.gated) is not self.gated:
            raise FieldError(f"`dense_act_fn` and `is_gated_act` must be those of `feed_forward_proj` ({shown(text)})")
        part = Activation("feed_forward_proj", gated=self.gated, default="")
        meaning = part.read(Theirs({"feed_forward_proj": name}, own_head=False))
        return {f"{stack}.{key}": value for key, value in meaning.items() for stack in _STACKS}

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        part = Activation("feed_forward_proj", gated=self.gated, default="")
        name = part.write(key_of(keys, "encoder"))["feed_forward_proj"]
        if not self.gated:
            return {"feed_forward_proj": name}
        return {"feed_forward_proj": "gated-gelu" if name == "gelu_new" else f"gated-{name}"}


@dataclass(frozen=True, slots=True)
class _Head:
    """T5 v1.0 ties its head and scales what goes into it; v1.1 does neither.

    Newer versions of transformers write `tie_word_embeddings: true` for both, and `scale_decoder_outputs`; whether the
    weights hold a head of its own decides. A tied head without the scale is one that they alone know.

    Args:
        tied_is_scaled: what a tied head means; False where versions of transformers do not agree on it.
    """

    tied_is_scaled: bool = True
    fields = ("tie_word_embeddings", "scale_decoder_outputs")

    def read(self, theirs: Theirs) -> Mapping[str, Any]:
        says_tied = checked("tie_word_embeddings", theirs.get("tie_word_embeddings", True), "switch")
        tied = says_tied and not theirs.own_head
        if tied and not self.tied_is_scaled:
            raise FieldError(
                "`tie_word_embeddings` (true): the weights hold no output head of their own, and versions of "
                "transformers do not agree on what that computes"
            )
        scaled = checked("scale_decoder_outputs", theirs.get("scale_decoder_outputs", tied), "switch")
        if scaled and not tied:
            raise FieldError("`scale_decoder_outputs` (true) must be false: the head is not the table of embeddings")
        return {"share_decoder_tokens_head_embeddings": tied, "scale_tied_logits": scaled}

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        tied = key_of(keys, "share_decoder_tokens_head_embeddings")
        unscaled = {"scale_decoder_outputs": False} if tied and not key_of(keys, "scale_tied_logits") else {}
        return {"tie_word_embeddings": tied, **unscaled}


def _parts(default: str, *, gated: bool, head: _Head) -> tuple[Part, ...]:
    return (
        Fixed(
            {
                **dict.fromkeys(_both("normalization"), "rmsnorm"),
                **dict.fromkeys(_both("bias", "normalize_attention_scores"), False),
                **dict.fromkeys(_both("position_embedding_type"), "relative"),
                "share_token_embeddings": True,
                "tokens_head_bias": False,
                "embedding_dropout": None,
            }
        ),
        Field("vocab_size", ("override_vocab_size",), "size"),
        Field("d_model", _both("hidden_size"), "size", also=("hidden_size",)),
        Field("d_kv", _both("kv_channels"), "size", 64, also=("head_dim",), value=_width),
        Field("d_ff", _both("ffn_hidden_size"), "size"),
        Field("num_layers", ("encoder.num_layers",), "size", also=("num_hidden_layers",)),
        _DecoderLayers(),
        Field("num_heads", _both("num_attention_heads"), "size", also=("num_attention_heads",)),
        Field("relative_attention_num_buckets", _both("relative_attention_num_buckets"), "size", 32),
        Field("relative_attention_max_distance", _both("relative_attention_max_distance"), "size", 128),
        Field("dropout_rate", _both("hidden_dropout", "attention_dropout", "ffn_dropout"), "share", 0.1),
        Field("layer_norm_epsilon", _both("layernorm_epsilon"), "number", 1e-6),
        _FeedForward(default, gated),
        head,
        Must("is_encoder_decoder", True, "half of a T5", default=True, write_it=True),
    )


def _width(keys: Any) -> int:
    return keys.encoder.kv_channels or keys.encoder.hidden_size // keys.encoder.num_attention_heads


@dataclass(frozen=True, slots=True)
class _DecoderLayers:
    """The decoder has as many layers as the encoder unless it says otherwise."""

    fields = ("num_decoder_layers",)

    def read(self, theirs: Theirs) -> Mapping[str, Any]:
        layers = theirs.get("num_decoder_layers")
        layers = theirs.get("num_layers", theirs.get("num_hidden_layers")) if layers is None else layers
        return {"decoder.num_layers": checked("num_decoder_layers", layers, "size")}

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        return {"num_decoder_layers": key_of(keys, "decoder.num_layers")}


_HARMLESS = frozenset({"initializer_factor", "n_positions", "output_past", "max_seq_length"})
_NAME, _OLD = "T5ForConditionalGeneration", ("T5WithLMHeadModel", "T5Model")

T5 = Architecture(
    model_type="t5",
    name=_NAME,
    also=_OLD,
    family="t5",
    parts=_parts("relu", gated=False, head=_Head()),
    weights=_weights(("wi",)),
    harmless=_HARMLESS,
)
T5_GATED = Architecture(
    model_type="t5",
    name=_NAME,
    also=_OLD,
    family="t5",
    parts=_parts("relu", gated=True, head=_Head()),
    weights=_weights(("wi_0", "wi_1")),
    harmless=_HARMLESS,
)
MT5 = Architecture(
    model_type="mt5",
    name="MT5ForConditionalGeneration",
    family="t5",
    parts=_parts("gated-gelu", gated=True, head=_Head(tied_is_scaled=False)),
    weights=_weights(("wi_0", "wi_1")),
    harmless=_HARMLESS,
)
