"""Mappings between config.json fields and stoker keys, in both directions; unknown fields are reported as problems."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, Protocol

from ..config.families import FamilyKeys

MAX_SIZE = 1 << 24
"""Upper bound of all sizes, against overflow in later computations."""

Kind = Literal["size", "count", "number", "share", "switch"]


class FieldError(Exception):
    """A field or key without a counterpart; the message is one line and names it."""


@dataclass(frozen=True, slots=True)
class HFConfig:
    """A config.json and properties of its weights.

    Attributes:
        fields: fields of config.json.
        has_separate_head: the weights have an output head that differs from the token embeddings.
    """

    fields: Mapping[str, Any]
    has_separate_head: bool

    def get(self, field: str, default: Any = None) -> Any:
        """Return the value of a field, or the default."""
        return self.fields.get(field, default)


class FieldMapping(Protocol):
    """Mapping of one or several related fields."""

    @property
    def fields(self) -> Sequence[str]:
        """Names of the fields."""
        ...

    def read(self, config: HFConfig) -> Mapping[str, Any]:
        """Convert the fields to stoker keys, dotted relative to `model`.

        Raises:
            FieldError: a value is not supported by stoker.
        """
        ...

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        """Convert stoker keys to the fields.

        Raises:
            FieldError: a value is not supported by the architecture.
        """
        ...


REQUIRED: Any = object()
"""Default of a field that must be present."""


@dataclass(frozen=True, slots=True)
class KeyField:
    """A field and the stoker key of the same meaning.

    Args:
        name: name of the field.
        keys: stoker keys; several if they must all be equal (the two stacks of a T5).
        kind: `size` (integer >= 1), `count` (integer >= 0), `number` (> 0), `share` (in [0, 1)) or `switch` (boolean).
        default: value if the field is absent.
        nullable: null is allowed, with the same meaning on both sides.
        aliases: other names of the field, in older versions.
        value: function of the keys that gives the value to write; None: the value of the first key.
    """

    name: str
    keys: tuple[str, ...]
    kind: Kind
    default: Any = REQUIRED
    nullable: bool = False
    aliases: tuple[str, ...] = ()
    value: Callable[[Any], Any] | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """See `FieldMapping.fields`."""
        return (self.name, *self.aliases)

    def read(self, config: HFConfig) -> Mapping[str, Any]:
        """See `FieldMapping.read`."""
        found = [name for name in self.fields if name in config.fields]
        if not found and self.default is REQUIRED:
            raise FieldError(f"`{self.name}` is missing")
        name = found[0] if found else self.name
        value = config.get(name, self.default)
        if value is None and self.nullable:
            return dict.fromkeys(self.keys)
        return dict.fromkeys(self.keys, validate_value(name, value, self.kind))

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        """See `FieldMapping.write`."""
        value = self.value(keys) if self.value is not None else get_key(keys, self.keys[0])
        return {} if value is None else {self.name: value}


@dataclass(frozen=True, slots=True)
class FixedKeys:
    """Stoker keys with the same value in every model of the architecture."""

    keys: Mapping[str, Any]

    @property
    def fields(self) -> tuple[str, ...]:
        """No fields."""
        return ()

    def read(self, config: HFConfig) -> Mapping[str, Any]:
        """Return the keys."""
        return self.keys

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        """Return nothing: the export reads back the written fields and compares the result with the model."""
        return {}


@dataclass(frozen=True, slots=True)
class RequiredValue:
    """A field that changes results and is supported with one value only, that of an absent field.

    Args:
        name: name of the field.
        value: the supported value.
        why: reason why other values are not supported, for the error message.
        write_value: write the field.
    """

    name: str
    value: Any
    why: str
    write_value: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """See `FieldMapping.fields`."""
        return (self.name,)

    def read(self, config: HFConfig) -> Mapping[str, Any]:
        """Check the value; return no keys."""
        found = config.get(self.name, self.value)
        if type(found) is not type(self.value) or found != self.value:
            raise FieldError(f"`{self.name}` ({format_value(found)}) must be {format_value(self.value)}: {self.why}")
        return {}

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        """See `FieldMapping.write`."""
        return {self.name: self.value} if self.write_value else {}


# Hugging Face name to stoker's `activation`, and True for the tanh approximation of GELU. Of names with the same
# meaning, the first is written.
_GATED = {
    **dict.fromkeys(("silu", "swish"), ("swiglu", False)),
    **dict.fromkeys(("gelu", "gelu_python"), ("geglu", False)),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh"), ("geglu", True)),
    "relu": ("reglu", False),
}
_PLAIN = {
    **dict.fromkeys(("gelu", "gelu_python"), ("gelu", False)),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast"), ("gelu", True)),
    "relu": ("relu", False),
    "relu2": ("squared-relu", False),
    "quick_gelu": ("approx-gelu", False),
}


@dataclass(frozen=True, slots=True)
class ActivationField:
    """The activation function of the MLP.

    Args:
        name: name of the field.
        gated: the MLP is gated.
        default: value if the field is absent.
    """

    name: str
    gated: bool
    default: str

    @property
    def fields(self) -> tuple[str, ...]:
        """See `FieldMapping.fields`."""
        return (self.name,)

    def read(self, config: HFConfig) -> Mapping[str, Any]:
        """Return `activation` and `openai_gelu` (tanh approximation)."""
        name = config.get(self.name, self.default)
        known = _GATED if self.gated else _PLAIN
        if not isinstance(name, str) or name not in known:
            raise FieldError(f"`{self.name}` ({format_value(name)}) must be one of {', '.join(known)}")
        activation, tanh = known[name]
        return {"activation": activation, "openai_gelu": tanh}

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        """See `FieldMapping.write`."""
        wanted = str(get_key(keys, "activation")).removeprefix("fast-"), get_key(keys, "openai_gelu")
        for name, meaning in (_GATED if self.gated else _PLAIN).items():
            if meaning == wanted:
                return {self.name: name}
        raise FieldError(f"`activation` ({get_key(keys, 'activation')}) is not supported by this architecture")


@dataclass(frozen=True, slots=True)
class TiedHeadField:
    """`tie_word_embeddings`: the output head shares the weight of the token embeddings.

    Args:
        default: value if the field is absent.
    """

    default: bool
    key = "share_embeddings_and_output_weights"

    @property
    def fields(self) -> tuple[str, ...]:
        """See `FieldMapping.fields`."""
        return ("tie_word_embeddings",)

    def read(self, config: HFConfig) -> Mapping[str, Any]:
        """Return the key; the weights must agree."""
        tied = validate_value("tie_word_embeddings", config.get("tie_word_embeddings", self.default), "switch")
        if tied and config.has_separate_head:
            raise FieldError(
                "`tie_word_embeddings` (true) contradicts the weights, whose output head differs from the embeddings; "
                "set it to false in config.json to use the output head"
            )
        return {self.key: tied}

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        """See `FieldMapping.write`."""
        return {"tie_word_embeddings": get_key(keys, self.key)}


SIZES = (
    KeyField("vocab_size", ("override_vocab_size",), "size"),
    KeyField("hidden_size", ("hidden_size",), "size"),
    KeyField("intermediate_size", ("ffn_hidden_size",), "size"),
    KeyField("num_hidden_layers", ("num_layers",), "size"),
    KeyField("num_attention_heads", ("num_attention_heads",), "size"),
)
"""Sizes under their usual names."""


def position_field(default: int, name: str = "max_position_embeddings", aliases: tuple[str, ...] = ()) -> KeyField:
    """Return the field of the maximal sequence length: that of the samples or of the position embedding."""
    return KeyField(
        name,
        ("encoder_seq_length", "max_position_embeddings"),
        "size",
        default,
        aliases=aliases,
        value=lambda keys: max(keys.encoder_seq_length, keys.max_position_embeddings or 0),
    )


IGNORED_FIELDS = frozenset(
    (
        # names, versions, precision and training
        *("_name_or_path", "architectures", "model_type", "transformers_version", "tokenizer_class", "prefix"),
        *("torch_dtype", "dtype", "use_bfloat16", "torchscript", "_attn_implementation", "attn_implementation"),
        *("_attn_implementation_autoset", "_experts_implementation", "tf_legacy_loss", "gradient_checkpointing"),
        *("initializer_range", "pretraining_tp", "_commit_hash", "unsloth_version", "unsloth_fixed"),
        *("is_llama_config", "transformers.js_config"),
        # outputs of forward()
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward"),
        # special tokens: taken from the tokenizer and generation_config.json
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id"),
        *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"),
        # defaults of generate()
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "top_k", "top_p"),
        *("typical_p", "temperature", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "output_scores"),
        *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "remove_invalid_values"),
        *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "diversity_penalty"),
        *("return_dict_in_generate", "task_specific_params", "n_ctx", "max_new_tokens"),
        # classification heads
        *("problem_type", "id2label", "label2id", "num_labels", "finetuning_task", "classifier_dropout"),
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    )
)
"""Fields of any config.json that do not change the logits of a language model."""

REQUIRED_VALUES: tuple[FieldMapping, ...] = (
    RequiredValue("is_encoder_decoder", False, "it is not an encoder-decoder architecture"),
    RequiredValue("is_decoder", False, "decoders of encoder-decoder models are not supported"),
    RequiredValue("add_cross_attention", False, "cross-attention is not supported"),
    RequiredValue("tie_encoder_decoder", False, "shared layers of encoder and decoder are not supported"),
    RequiredValue("cross_attention_hidden_size", None, "cross-attention is not supported"),
    RequiredValue("pruned_heads", {}, "pruned heads are not supported"),
    RequiredValue("quantization_config", None, "the weights are quantized; convert the unquantized model"),
    RequiredValue("auto_map", None, "the model requires remote code, which is never run"),
    RequiredValue("rope_interleaved", False, "interleaved rotary embeddings are not supported"),
    RequiredValue("use_mrope", False, "multi-dimensional rotary embeddings are not supported"),
)
"""Fields of any config.json that change results and are supported with one value only."""


def validate_value(name: str, value: Any, kind: Kind) -> Any:
    """Validate a value of a field and return it; see `KeyField` for the kinds.

    Raises:
        FieldError: it has the wrong type or is out of range.
    """
    match kind:
        case "switch":
            if isinstance(value, bool):
                return value
            raise FieldError(f"`{name}` ({format_value(value)}) must be true or false")
        case "size" | "count":
            lowest = 1 if kind == "size" else 0
            if type(value) is int and lowest <= value <= MAX_SIZE:
                return value
            raise FieldError(f"`{name}` ({format_value(value)}) must be a whole number from {lowest} to {MAX_SIZE:,}")
        case _:
            number = float(value) if type(value) in (int, float) and abs(value) < 1e30 else math.nan
            if kind == "share":
                if 0 <= number < 1:
                    return number
                raise FieldError(f"`{name}` ({format_value(value)}) must be a number from 0 to below 1")
            if number > 0:
                return number
            raise FieldError(f"`{name}` ({format_value(value)}) must be a number above 0")


def format_value(value: Any, max_length: int = 60) -> str:
    """Format an untrusted value or name for a message: on one line, printable, at most `max_length` characters."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else " ".join(str(value).split())
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


def get_key(keys: FamilyKeys, path: str) -> Any:
    """Return the value of a stoker key by its dotted path."""
    return attrgetter(path)(keys)


def read_fields(
    mappings: Sequence[FieldMapping], config: HFConfig, ignored_fields: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Convert a config.json to stoker keys; return them and all problems found.

    Args:
        mappings: mappings of fields.
        config: fields of config.json.
        ignored_fields: fields that do not change results.
    """
    keys: dict[str, Any] = {}
    problems: list[str] = []
    for part in mappings:
        try:
            keys |= part.read(config)
        except FieldError as error:
            problems.append(str(error))
    known = {field for part in mappings for field in part.fields} | set(ignored_fields)
    for field in config.fields:
        if field not in known:
            problems.append(
                f"`{format_value(field)}` ({format_value(config.fields[field])}) is not supported and may "
                "change the results; use "
                "--ignore-field if you know that it does not"
            )
    return keys, problems
