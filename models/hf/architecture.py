"""Hugging Face architectures: mapping of weights and config.json fields, and comparison of model slices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from ..config.batch_shape import BatchSpec
from ..config.families import FamilyKeys, FamilySlice, family_slice
from ..config.model import Family
from ..config.t5 import T5Slice
from .config_fields import (
    IGNORED_FIELDS,
    REQUIRED_VALUES,
    FieldError,
    FieldMapping,
    HFConfig,
    format_value,
    read_fields,
)
from .weight_layout import Geometry
from .weight_map import WeightMap

_TRAINING = {
    *("dropout", "hidden_dropout", "embedding_dropout", "label_smoothing", "init_std", "output_init_std"),
    *("embedding_std", "seed", "compile", "use_flash_attention", "backend", "transformer_engine"),
    *("masked_softmax_fusion", "aux_loss", "z_loss", "jitter", "recompute", "offload"),
    *("implementation", "router_dtype", "bias_update_rate", "seq_length", "positions_by_document"),
    *("force_load_balancing", "padded_vocab_size"),
    *("drop_policy", "pad_to_capacity"),  # act with a capacity only
}
"""Fields of a slice that affect training or computation, but not the function that the model computes."""
_MEANING = {"balancing": lambda kind: kind == "sinkhorn"}
"""Fields that are compared by a function of their value: an auxiliary loss affects training only."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Mapping between a Hugging Face architecture and a stoker model family.

    Attributes:
        model_type: `model_type` of config.json.
        name: class name of the language model, as in `architectures`.
        family: stoker model family.
        field_mappings: mappings of config.json fields.
        weights: mapping of weights.
        aliases: other classes with the same weights and additional ones, which are ignored.
        ignored_fields: fields that do not change results, in addition to `IGNORED_FIELDS`.
    """

    model_type: str
    name: str
    family: Family
    field_mappings: tuple[FieldMapping, ...]
    weights: WeightMap
    aliases: tuple[str, ...] = ()
    ignored_fields: frozenset[str] = frozenset()

    def to_keys(self, config: HFConfig, ignored: Collection[str] = ()) -> tuple[dict[str, Any], list[str]]:
        """Convert a config.json to stoker keys, dotted relative to `model`; return them and all problems found.

        Args:
            config: fields of config.json, and properties of the weights.
            ignored: fields to ignore, at the user's request.
        """
        values = {name: value for name, value in config.fields.items() if name not in ignored}
        own_fields = {field for part in self.field_mappings for field in part.fields}
        known = own_fields | self.ignored_fields
        parts = (*self.field_mappings, *(part for part in REQUIRED_VALUES if not known & set(part.fields)))
        keys, problems = read_fields(
            parts, HFConfig(values, config.has_separate_head), IGNORED_FIELDS | self.ignored_fields
        )
        architectures = values.get("architectures")
        names = {self.name, *self.aliases}
        if architectures is not None and not (
            isinstance(architectures, list) and all(name in names for name in architectures)
        ):
            problems.insert(
                0,
                f"`architectures` ({format_value(architectures)}) must be {self.name}: other model classes are "
                "not supported",
            )
        return keys, problems

    def to_config(self, keys: FamilyKeys, *, vocab_size: int) -> dict[str, Any]:
        """Return the config.json of a model.

        Args:
            keys: configuration keys of the model.
            vocab_size: vocabulary size of the model.

        Raises:
            FieldError: the architecture does not support a setting of the model; one line for each.
        """
        config: dict[str, Any] = {"architectures": [self.name], "model_type": self.model_type}
        problems: list[str] = []
        for part in self.field_mappings:
            try:
                config |= part.write(keys)
            except FieldError as error:
                problems.append(str(error))
        if problems:
            raise FieldError("\n".join(problems))
        return config | {"vocab_size": vocab_size}


def slice_differences(model: FamilySlice, converted: FamilySlice) -> list[str]:
    """Return the fields in which two models compute different functions: dotted names, with both values."""
    return list(_differences(model, converted, ""))


def _differences(model: Any, converted: Any, path: str) -> list[str]:
    if not is_dataclass(model) or type(model) is not type(converted):
        return (
            []
            if model == converted
            else [f"{path} is {format_value(model)}, which would become {format_value(converted)}"]
        )
    found: list[str] = []
    for field in fields(model):
        if field.name in _TRAINING:
            continue
        field_path = f"{path}.{field.name}" if path else field.name
        left, right = getattr(model, field.name), getattr(converted, field.name)
        if meaning := _MEANING.get(field.name):
            left, right = meaning(left), meaning(right)
        found += _differences(left, right, field_path)
    return found


def slice_from_keys(keys: FamilyKeys, vocab_size: int, batch_spec: BatchSpec) -> FamilySlice:
    """Return the slice of a model with exactly `vocab_size` tokens."""
    return family_slice(
        keys.model_copy(update={"override_vocab_size": None}), vocab_size=vocab_size, batch_spec=batch_spec
    )


def geometry_of(model: FamilySlice) -> Geometry:
    """Return the sizes that weight layouts depend on."""
    attention = (model.encoder.stack if isinstance(model, T5Slice) else model.stack).attention
    return Geometry(heads=attention.heads, groups=attention.groups, vocab_size=model.vocab_size)


def unflatten_keys(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Convert dotted keys to nested dictionaries."""
    tree: dict[str, Any] = {}
    for path, value in dotted.items():
        *blocks, name = path.split(".")
        block = tree
        for part in blocks:
            block = block.setdefault(part, {})
        block[name] = value
    return tree
