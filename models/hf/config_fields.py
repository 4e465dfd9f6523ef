"""What the fields of a config.json mean in our keys, both ways: what is not known to be harmless is a problem."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ..config.families import FamilyKeys

LARGEST = 1 << 24
"""No size of a model is larger; more would only overflow what is calculated from it."""

Kind = Literal["size", "count", "number", "share", "switch"]


class FieldError(Exception):
    """A field or a key that has no counterpart; the message is one line and names it."""


@dataclass(frozen=True, slots=True)
class Theirs:
    """A config.json, and what the weights beside it say.

    Attributes:
        config: its fields.
        own_head: the weights hold an output head that differs from the token embeddings.
    """

    config: Mapping[str, Any]
    own_head: bool

    def get(self, field: str, default: Any = None) -> Any:
        """The value of a field, the default where there is none."""
        return self.config.get(field, default)


class Part(Protocol):
    """One or several fields that mean something together."""

    @property
    def fields(self) -> Sequence[str]:
        """The fields it reads."""
        ...

    def read(self, theirs: Theirs) -> Mapping[str, Any]:
        """Our keys (dotted below `model`) of their fields.

        Raises:
            FieldError: a value without a counterpart here.
        """
        ...

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        """Their fields of our keys.

        Raises:
            FieldError: a value without a counterpart there.
        """
        ...


REQUIRED: Any = object()
"""The default of a field that must be there."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field and the key of ours that means the same.

    Args:
        name: the field.
        ours: our keys, several where they must all be equal (the two stacks of a T5).
        kind: `size` from 1, `count` from 0, `number` above 0, `share` from 0 and below 1, `switch`.
        default: what it means to leave the field out.
        nullable: null is a value, the same on both sides.
        also: other names of the field, of older versions.
        write_none: write null too.
        value: what to write, where it is not the value of the first key.
    """

    name: str
    ours: tuple[str, ...]
    kind: Kind
    default: Any = REQUIRED
    nullable: bool = False
    also: tuple[str, ...] = ()
    write_none: bool = False
    value: Callable[[Any], Any] | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """Its names."""
        return (self.name, *self.also)

    def read(self, theirs: Theirs) -> Mapping[str, Any]:
        """The same value under our keys."""
        found = [name for name in self.fields if name in theirs.config]
        if not found and self.default is REQUIRED:
            raise FieldError(f"`{self.name}` is missing")
        name = found[0] if found else self.name
        value = theirs.get(name, self.default)
        if value is None and self.nullable:
            return dict.fromkeys(self.ours)
        return dict.fromkeys(self.ours, checked(name, value, self.kind))

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        """The value of the first of our keys."""
        value = self.value(keys) if self.value is not None else key_of(keys, self.ours[0])
        return {} if value is None and not self.write_none else {self.name: value}


@dataclass(frozen=True, slots=True)
class Fixed:
    """Keys of ours that every model of the family has so."""

    keys: Mapping[str, Any]

    @property
    def fields(self) -> tuple[str, ...]:
        """None."""
        return ()

    def read(self, theirs: Theirs) -> Mapping[str, Any]:
        """The keys."""
        return self.keys

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        """Nothing: who exports compares what the written fields mean with what the model is."""
        return {}


@dataclass(frozen=True, slots=True)
class Must:
    """A field that changes the results, and has no counterpart but for one value.

    Args:
        name: the field.
        value: the only one that can be had.
        why: what another one would mean.
        default: what it means to leave the field out.
        write: write it.
    """

    name: str
    value: Any
    why: str
    default: Any = None
    write_it: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """The field."""
        return (self.name,)

    def read(self, theirs: Theirs) -> Mapping[str, Any]:
        """Nothing."""
        found = theirs.get(self.name, self.default if self.default is not None else self.value)
        if type(found) is not type(self.value) or found != self.value:
            raise FieldError(f"`{self.name}` ({shown(found)}) must be {shown(self.value)}: {self.why}")
        return {}

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        """The value."""
        return {self.name: self.value} if self.write_it else {}


# name of theirs to our activation, and whether its GELU is the tanh form; the first name of several is written
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
class Activation:
    """The nonlinearity of the MLP by its name.

    Args:
        name: the field.
        gated: the MLP has a gate.
        default: what it means to leave the field out.
    """

    name: str
    gated: bool
    default: str

    @property
    def fields(self) -> tuple[str, ...]:
        """The field."""
        return (self.name,)

    def read(self, theirs: Theirs) -> Mapping[str, Any]:
        """`activation` and the form of GELU."""
        name = theirs.get(self.name, self.default)
        known = _GATED if self.gated else _PLAIN
        if not isinstance(name, str) or name not in known:
            raise FieldError(f"`{self.name}` ({shown(name)}) must be one of {', '.join(known)}")
        activation, tanh = known[name]
        return {"activation": activation, "openai_gelu": tanh}

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        """The first name of it."""
        ours = str(key_of(keys, "activation")).removeprefix("fast-"), key_of(keys, "openai_gelu")
        for name, meaning in (_GATED if self.gated else _PLAIN).items():
            if meaning == ours:
                return {self.name: name}
        raise FieldError(f"`activation` ({key_of(keys, 'activation')}) is none that this architecture has")


@dataclass(frozen=True, slots=True)
class TiedHead:
    """Whether the output head is the table of token embeddings.

    Args:
        ours: our key.
        default: what it means to leave the field out.
    """

    ours: str
    default: bool

    @property
    def fields(self) -> tuple[str, ...]:
        """`tie_word_embeddings`."""
        return ("tie_word_embeddings",)

    def read(self, theirs: Theirs) -> Mapping[str, Any]:
        """The key; the weights must agree."""
        tied = checked("tie_word_embeddings", theirs.get("tie_word_embeddings", self.default), "switch")
        if tied and theirs.own_head:
            raise FieldError(
                "`tie_word_embeddings` (true) contradicts the weights, whose output head differs from the embeddings; "
                "set it to false in config.json if the head is meant"
            )
        return {self.ours: tied}

    def write(self, keys: FamilyKeys) -> Mapping[str, Any]:
        """The field."""
        return {"tie_word_embeddings": key_of(keys, self.ours)}


COMMON = frozenset(
    (
        # what it is called and who wrote it
        *("_name_or_path", "architectures", "model_type", "transformers_version", "tokenizer_class", "prefix"),
        *("torch_dtype", "dtype", "use_bfloat16", "torchscript", "_attn_implementation", "attn_implementation"),
        *("_attn_implementation_autoset", "_experts_implementation", "tf_legacy_loss", "gradient_checkpointing"),
        *("initializer_range", "pretraining_tp", "_commit_hash", "unsloth_version", "unsloth_fixed"),
        *("is_llama_config", "transformers.js_config"),
        # what a call returns
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward"),
        # tokens: the tokenizer and generation_config.json say them
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id"),
        *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"),
        # defaults of generate()
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "top_k", "top_p"),
        *("typical_p", "temperature", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "output_scores"),
        *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "remove_invalid_values"),
        *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "diversity_penalty"),
        *("return_dict_in_generate", "task_specific_params", "n_ctx", "max_new_tokens"),
        # heads of classifiers
        *("problem_type", "id2label", "label2id", "num_labels", "finetuning_task", "classifier_dropout"),
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    )
)
"""Fields of any config.json that change nothing of what a language model computes from tokens."""

ALWAYS: tuple[Part, ...] = (
    Must("is_encoder_decoder", False, "the model would have two stacks", default=False),
    Must("is_decoder", False, "the model would be a part of another one", default=False),
    Must("add_cross_attention", False, "the model would read another one", default=False),
    Must("tie_encoder_decoder", False, "encoder and decoder would share their layers", default=False),
    Must("cross_attention_hidden_size", None, "the model would read another one"),
    Must("pruned_heads", {}, "heads would be missing", default={}),
    Must("quantization_config", None, "the weights are quantized; convert the model they were made from"),
    Must("auto_map", None, "the model is defined by code that comes with it, which is never run"),
    Must("rope_interleaved", False, "neighbours would turn, not halves", default=False),
    Must("use_mrope", False, "positions would have several axes", default=False),
)
"""Fields that may stand in any config.json and would change the results."""


def checked(name: str, value: Any, kind: Kind) -> Any:
    """A value of the kind it must have.

    Raises:
        FieldError: it is of another type, or out of range.
    """
    match kind:
        case "switch":
            if isinstance(value, bool):
                return value
            raise FieldError(f"`{name}` ({shown(value)}) must be true or false")
        case "size" | "count":
            lowest = 1 if kind == "size" else 0
            if type(value) is int and lowest <= value <= LARGEST:
                return value
            raise FieldError(f"`{name}` ({shown(value)}) must be a whole number from {lowest} to {LARGEST:,}")
        case _:
            number = float(value) if type(value) in (int, float) and abs(value) < 1e30 else math.nan
            if kind == "share":
                if 0 <= number < 1:
                    return number
                raise FieldError(f"`{name}` ({shown(value)}) must be a number from 0 to below 1")
            if number > 0:
                return number
            raise FieldError(f"`{name}` ({shown(value)}) must be a number above 0")


def shown(value: Any, most: int = 60) -> str:
    """A value of a config.json, or a name in somebody's file, in a message: on one line, and not endless."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else " ".join(str(value).split())
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def key_of(keys: FamilyKeys, path: str) -> Any:
    """The value of one of our keys by its dotted path."""
    value: Any = keys
    for name in path.split("."):
        value = getattr(value, name)
    return value


def read_fields(parts: Sequence[Part], theirs: Theirs, harmless: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Our keys of a config.json, and every problem with it.

    Args:
        parts: what its fields mean.
        theirs: the fields.
        harmless: fields that change no results.
    """
    keys: dict[str, Any] = {}
    problems: list[str] = []
    for part in parts:
        try:
            keys |= part.read(theirs)
        except FieldError as error:
            problems.append(str(error))
    known = {field for part in parts for field in part.fields} | set(harmless)
    for field in theirs.config:
        if field not in known:
            problems.append(
                f"`{shown(field)}` ({shown(theirs.config[field])}) is not known here, and may change the results; "
                "--ignore-field leaves it out if you know that it does not"
            )
    return keys, problems
