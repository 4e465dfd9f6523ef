"""Index of the schema's keys by dotted path, with type, default and description for docs and error messages."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ....models.config.extension_keys import ExtensionName
from ....models.config.extensions import Kind
from ....models.config.key_block import ComponentName
from ....models.config.model import FAMILIES, Family
from ...utils.text import one_line
from ..dotted_paths import Tree, join
from ..yaml_reader import YamlError, parse_yaml
from .root import MODEL_BLOCKS, RootBlock


@dataclass(frozen=True, slots=True)
class SchemaKey:
    """One key that acts.

    Attributes:
        path: dotted path.
        default: default value, as plain data.
        description: description (the docstring of the field).
        kind: accepted type in words: `an integer >= 1, or null`.
        choices: accepted values, if they are a closed list; besides, components of the user's own may be named.
        extends: kind of the components that must be registered to be named, or None.
        own: True for a key of stoker's that NeMo does not have.
        is_text: True if it takes text only (and null).
        is_open: True for a block with arbitrary keys (`env_vars`).
    """

    path: str
    default: Any
    description: str
    kind: str
    choices: tuple[Any, ...]
    extends: Kind | None
    own: bool
    is_text: bool
    is_open: bool


@cache
def schema_keys(family: Family = "gpt") -> Mapping[str, SchemaKey]:
    """Return every leaf of a family's schema by path, in schema order."""
    fields = _fields(_defaults(family))
    keys = {path: _key(path, field, default) for path, field, default in fields if not isinstance(default, BaseModel)}
    return MappingProxyType(keys)


@cache
def schema_blocks(family: Family = "gpt") -> Mapping[str, str]:
    """Return the description of every block of a family's schema by path, without the root."""
    fields = _fields(_defaults(family))
    blocks = {path: one_line(field.description or "") for path, field, block in fields if isinstance(block, BaseModel)}
    return MappingProxyType(blocks)


def find_key(path: str) -> SchemaKey | None:
    """Return the key at `path` in the first family that has it, GPT first; for use before the family is known."""
    return next((keys[path] for keys in map(schema_keys, FAMILIES) if path in keys), None)


STACKS: Mapping[Family, tuple[str, ...]] = MappingProxyType(
    {"gpt": ("model",), "t5": ("model.encoder", "model.decoder"), "bert": ("model",)}
)
"""The blocks of each family that hold the keys of a stack."""


def without_stack(path: str) -> str:
    """Return a path below a T5 stack as in a family with one stack: `model.encoder.bias` becomes `model.bias`."""
    for stack in STACKS["t5"]:
        if path.startswith(f"{stack}."):
            return f"model.{path.removeprefix(f'{stack}.')}"
    return path


def defaults_tree(family: Family = "gpt") -> Tree:
    """Return a new tree of all defaults."""
    return _defaults(family).model_dump(mode="python")


def enclosing_open_block(path: str) -> str | None:
    """Return the open block that contains `path` (`env_vars.NVTE_FLASH_ATTN`: `env_vars`), or None."""
    parent, _, _ = path.rpartition(".")
    key = schema_keys().get(parent)
    return parent if key is not None and key.is_open else None


def _defaults(family: Family) -> RootBlock:
    return RootBlock(model=MODEL_BLOCKS[family].model_validate({}))


def _fields(block: BaseModel, parent: str = "") -> Iterator[tuple[str, FieldInfo, Any]]:
    """Yield path, field and default of every key and block below a block of defaults."""
    for name, field in type(block).model_fields.items():
        path, default = join(parent, name), getattr(block, name)
        yield path, field, default
        if isinstance(default, BaseModel):
            yield from _fields(default, path)


def _key(path: str, field: FieldInfo, default: Any) -> SchemaKey:
    extra = field.json_schema_extra
    annotation: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation  # pyrefly: ignore[not-a-type]
    members = _members(annotation)
    choices = tuple(value for member in members if get_origin(member) is Literal for value in get_args(member))
    extensions = [mark for member in members if (mark := _mark(member, ExtensionName))]
    only_choices = all(
        get_origin(member) is Literal or member is types.NoneType or _mark(member, ComponentName | ExtensionName)
        for member in members
    )
    kinds = {member for member in map(_unannotated, members) if member is not types.NoneType}
    return SchemaKey(
        path=path,
        default=default,
        description=one_line(field.description or ""),
        kind=_describe(annotation, field.examples),
        choices=choices if only_choices else (),
        extends=extensions[0].kind if extensions else None,
        own=isinstance(extra, dict) and bool(extra.get("own")),
        is_text=kinds == {str},
        is_open=any(get_origin(_unannotated(member)) is dict for member in members),
    )


def _members(annotation: Any) -> list[Any]:
    """Return the members of a union, or the annotation itself if it is not a union."""
    if get_origin(annotation) is Annotated:
        bare, *metadata = get_args(annotation)
        inner = _members(bare)
        return [Annotated[m, *metadata] if len(inner) == 1 or m is not types.NoneType else m for m in inner]
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for argument in get_args(annotation) for member in _members(argument)]
    return [annotation]


def _unannotated(annotation: Any) -> Any:
    return _unannotated(get_args(annotation)[0]) if get_origin(annotation) is Annotated else annotation


def _mark(annotation: Any, kind: Any) -> Any:
    """Return the mark of a type that names components of the user's own."""
    metadata = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((mark for mark in metadata if isinstance(mark, kind)), None)


def _describe(annotation: Any, examples: list[Any] | None = None) -> str:
    members = _members(annotation)
    words = [_describe_member(member, examples) for member in members if _unannotated(member) is not types.NoneType]
    if len(words) < len(members):
        words.append("null")
    return ", or ".join(words)


_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def _describe_member(annotation: Any, examples: list[Any] | None) -> str:
    bare = _unannotated(annotation)
    if mark := _mark(annotation, ComponentName):
        return mark.description
    if extension := _mark(annotation, ExtensionName):
        return f"the name of a registered `{extension.kind}`"
    if get_origin(bare) is Literal:
        values = [format_value(value) for value in get_args(bare)]
        return values[0] if len(values) == 1 else "one of " + ", ".join(values)
    if get_origin(bare) is list:
        bounds = _bounds(annotation)
        size = f"{bounds['min_length']} " if bounds.get("min_length") == bounds.get("max_length", -1) else ""
        (item,) = get_args(bare)
        one = re.sub(r"\b(?:an? )?(number|integer)\b", r"\1s", _describe(item)).removeprefix("a ").removeprefix("an ")
        return f"a list of {size}{one.replace(', or ', ' or ')}"
    if get_origin(bare) is dict:
        return "a block of names and values"
    text = _NAMES.get(bare, getattr(bare, "__name__", str(bare)))
    bounds = _bounds(annotation)
    limits = [f"{sign} {bounds[name]:.10g}" for name, sign in _SIGNS.items() if name in bounds]
    if limits:
        text += " " + " and ".join(limits)
    if bare is str and examples:
        text += f" such as {examples[0]}"
    return text


_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def _bounds(annotation: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if get_origin(annotation) is not Annotated:
        return found
    bare, *metadata = get_args(annotation)
    found.update(_bounds(bare))
    for item in metadata:
        parts = item.metadata if isinstance(item, FieldInfo) else [item]
        for part in parts:
            for constraint in part if isinstance(part, annotated_types.GroupedMetadata) else [part]:
                for name in (*_SIGNS, "min_length", "max_length"):
                    value = getattr(constraint, name, None)
                    if value is not None:
                        found[name] = value
    return found


def format_value(value: Any) -> str:
    """Return a value in YAML notation on one line."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case list():
            return "[" + ", ".join(map(_show_item, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{_show_item(name)}: {_show_item(item)}" for name, item in value.items()) + "}"
        case float():
            return _show_float(value)
        case str():
            return _show_text(value)
        case _:
            return str(value)


def _show_item(value: Any) -> str:
    """Return a value for a list or block on one line, where commas and brackets need quotes."""
    text = format_value(value)
    return _quoted(value) if isinstance(value, str) and text == value and set(",[]{}:") & set(text) else text


@lru_cache(maxsize=1024)  # parsing takes longer than loading the rest of the key
def _show_text(value: str) -> str:
    """Return text without quotes if YAML parses it back unchanged, else quoted."""
    try:
        plain = parse_yaml(f"k: {value}", Path()).tree == {"k": value}
    except YamlError:
        plain = False
    return value if plain and value and "\n" not in value else _quoted(value)


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "''") + "'" if value.isprintable() else json.dumps(value)


def _show_float(value: float) -> str:
    text = repr(value)
    if "e" in text:
        digits, _, exponent = text.partition("e")
        return f"{digits}e{int(exponent)}"
    return text
