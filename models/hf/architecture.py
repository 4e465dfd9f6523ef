"""An architecture of Hugging Face's: its weights, its fields, and the models of ours that it can hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from ..config.batch_shape import SampleForm
from ..config.bert_slice import BertSlice
from ..config.families import FamilyKeys, FamilySlice, family_slice
from ..config.model_keys import Family
from ..config.t5_slice import T5Slice
from .config_fields import ALWAYS, COMMON, FieldError, Part, Theirs, read_fields, shown
from .weight_layout import Geometry
from .weight_map import WeightMap

_TRAINING = {
    *("dropout", "hidden_dropout", "embedding_dropout", "label_smoothing", "init_std", "output_init_std"),
    *("embedding_std", "seed", "compile", "use_flash_attention", "backend", "transformer_engine"),
    *("masked_softmax_fusion", "aux_loss", "z_loss", "jitter", "recompute", "offload"),
    *("implementation", "router_dtype", "bias_update_rate", "seq_length", "positions_by_document"),
    *("padded_vocab_size", "drop_policy", "pad_to_capacity"),  # the last two act with a capacity only
}
"""Parts of a slice that say how a model is trained or computed, not what it is."""
_MEANING = {"balancing": lambda kind: kind == "sinkhorn"}
"""Parts of which some values are the same function: a loss that balances is one of training."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A table of weights and a table of fields.

    Attributes:
        model_type: as in config.json.
        name: the class of its language model.
        family: of ours that it is.
        parts: what its fields mean.
        weights: what its tensors hold.
        also: names of other classes with the same weights and more, which are left out.
        harmless: fields that change no results, besides those of any config.json.
    """

    model_type: str
    name: str
    family: Family
    parts: tuple[Part, ...]
    weights: WeightMap
    also: tuple[str, ...] = ()
    harmless: frozenset[str] = frozenset()

    def read(self, theirs: Theirs, ignored: Collection[str] = ()) -> tuple[dict[str, Any], list[str]]:
        """Our keys, dotted below `model`, of a config.json, and every problem with it.

        Args:
            theirs: the fields, and what the weights say.
            ignored: fields that the user knows to change nothing.
        """
        given = {name: value for name, value in theirs.config.items() if name not in ignored}
        own = {field for part in self.parts for field in part.fields}
        parts = (*self.parts, *(part for part in ALWAYS if not own & set(part.fields)))
        keys, problems = read_fields(parts, Theirs(given, theirs.own_head), COMMON | self.harmless)
        named = given.get("architectures")
        known = {self.name, *self.also}
        if named is not None and not (isinstance(named, list) and all(name in known for name in named)):
            problems.insert(0, f"`architectures` ({shown(named)}) must be {self.name}: it is another model")
        return keys, problems

    def write(self, keys: FamilyKeys, *, vocab_size: int) -> dict[str, Any]:
        """The config.json of a model.

        Args:
            keys: what the model is.
            vocab_size: its tokens.

        Raises:
            FieldError: it has something that the architecture has not; one line for each.
        """
        config: dict[str, Any] = {"architectures": [self.name], "model_type": self.model_type}
        problems: list[str] = []
        for part in self.parts:
            try:
                config |= part.write(keys)
            except FieldError as error:
                problems.append(str(error))
        if problems:
            raise FieldError("\n".join(problems))
        return config | {"vocab_size": vocab_size}


def what_differs(ours: FamilySlice, theirs: FamilySlice) -> list[str]:
    """Where two descriptions are of different functions: dotted names, with both values."""
    return list(_differences(ours, theirs, ""))


def _differences(ours: Any, theirs: Any, at: str) -> list[str]:
    if not is_dataclass(ours) or type(ours) is not type(theirs):
        return [] if ours == theirs else [f"{at} is {shown(ours)}, which would become {shown(theirs)}"]
    found: list[str] = []
    for field in fields(ours):
        if field.name not in _TRAINING:
            place, same = f"{at}.{field.name}" if at else field.name, _MEANING.get(field.name, _itself)
            found += _differences(same(getattr(ours, field.name)), same(getattr(theirs, field.name)), place)
    return found


def _itself(value: Any) -> Any:
    return value


def described(keys: FamilyKeys, vocab_size: int, form: SampleForm) -> FamilySlice:
    """The model that keys describe, with `vocab_size` tokens."""
    return family_slice(keys.model_copy(update={"override_vocab_size": None}), vocab_size=vocab_size, form=form)


def geometry_of(model: FamilySlice) -> Geometry:
    """The numbers that layouts need."""
    match model:
        case T5Slice():
            attention = model.encoder.stack.attention
        case BertSlice():
            attention = model.stack.attention
        case _:
            attention = model.stack.attention
    return Geometry(heads=attention.heads, groups=attention.groups, vocab_size=model.vocab_size)


def nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as blocks in blocks."""
    tree: dict[str, Any] = {}
    for path, value in dotted.items():
        *blocks, name = path.split(".")
        block = tree
        for part in blocks:
            block = block.setdefault(part, {})
        block[name] = value
    return tree
