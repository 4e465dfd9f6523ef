"""Type the keys with pydantic, and convert its errors into problems with origin, accepted values and fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import ValidationError

from ...models.config.extensions import extension_names
from ...models.config.model import FAMILIES, Family
from ..utils.text import format_days, parse_duration
from . import dotted_paths
from .dotted_paths import Tree
from .nemo.other_frameworks import translate_values
from .override_typos import quoted_override
from .problems import Problem
from .schema.key_index import SchemaKey, enclosing_open_block, format_value, schema_blocks, schema_keys, without_stack
from .schema.root import RootBlock, family_of
from .suggest import closest
from .yaml_reader import parse_scalar

_LARGEST = 2**63 - 1
_SUFFIXES = {"": 1, "k": 1000, "m": 1_000_000}
_COUNT = re.compile(r"(\d[\d,_ ]{0,20})([kKmM]?)")
"""An integer with suffix or separators: 100k, 1,000,000."""
_DURATION = re.compile(r"(\d{1,9}(?::\d{1,9}){0,3})(?:\.0+)?")
"""The last fields of `DD:HH:MM:SS`, at least the seconds."""
Origins = Callable[[str], str]


def validate_types(given: Tree, origin_of: Origins) -> tuple[RootBlock, list[Problem], set[str]]:
    """Type the values `given` for keys that act, as plain data; invalid ones are removed from it.

    Returns:
        The typed root (keys that are invalid or not given have their default), the problems, and the paths of invalid
        keys.
    """
    problems: list[Problem] = []
    wrong: set[str] = set()
    family = family_of(given.get("model"))
    invalid = [(path, value) for path, value in dotted_paths.leaves(given) if _too_large(value)]
    while True:
        for path, value in invalid:
            wrong.add(path)
            problems.append(_problem(path, value, origin_of, family))
            dotted_paths.remove(given, path)
        try:
            return RootBlock.model_validate(given), problems, wrong
        except ValidationError as error:
            invalid = [(path, dotted_paths.get(given, path)) for path in _invalid_paths(error, given)]


def _too_large(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return any(isinstance(item, int) and abs(item) > _LARGEST for item in items)


def _invalid_paths(error: ValidationError, given: Tree) -> Iterable[str]:
    """Return the paths of invalid keys; several errors of one key (members of a union) count as one."""
    found: dict[str, None] = {}
    family = family_of(given.get("model"))
    keys, blocks = schema_keys(family), schema_blocks(family)
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        path = ""
        for index, step in enumerate(item["loc"]):
            if index == 1 and path == "model" and step in FAMILIES:  # tag of the family's union member, not a key
                continue
            longer = dotted_paths.join(path, str(step))
            # A step may also be a member of a union (`model.data.data_prefix`), which is not in the tree.
            in_open_block = (
                enclosing_open_block(longer) is not None
                and dotted_paths.get(given, longer, dotted_paths.MISSING) != dotted_paths.MISSING
            )
            if longer not in keys and longer not in blocks and not in_open_block:
                break
            path = longer
        found[path] = None
    return found


def _problem(path: str, value: Any, origin_of: Origins, family: Family) -> Problem:
    key = schema_keys(family).get(path)
    if key is not None:
        rule, fix = f"must be {key.kind}{_extensions(key)}{_kind_note(value, key)}", _fix(key, value)
    elif enclosing_open_block(path) is not None:
        rule, fix = "must be text, a number, true or false", ""
    else:
        rule, fix = f"must be a block of keys: {schema_blocks(family).get(path, '')}", f"write its keys below `{path}:`"
        if value is None:
            fix = f"~{path}, or {fix}"
        elif isinstance(value, list) and f"{path}.file_names" in schema_keys(family):
            fix = quoted_override(f"{path}.file_names", format_value(value))
    return Problem(path, format_value(value), origin_of(path), rule, fix)


def _extensions(key: SchemaKey) -> str:
    """Return the registered components that a key accepts, in parentheses, if there are any."""
    names = extension_names(key.extends) if key.extends else ()
    return f" ({', '.join(names)})" if names else ""


def _kind_note(value: Any, key: SchemaKey) -> str:
    """Return the type of the value in words, if it is not evident from the shown value."""
    if isinstance(value, str) and value and (key.choices or key.is_text):
        return ""
    match value:
        case bool():
            return ", but is a boolean"
        case str() if value == "":
            return ", but is empty text"
        case str():
            return ", but is text"
        case None:
            return ", but is null"
        case float() if value != value or value in (float("inf"), float("-inf")):
            return ", but is not finite"
        case dict():
            return ", but is a block"
        case list():
            return (", but is empty" if not value else "") if key.kind.startswith("a list") else ", but is a list"
        case int() if abs(value) > _LARGEST:
            return ", but is beyond 64 bits"
        case _:
            return ""


def _fix(key: SchemaKey, value: Any) -> str:
    if foreign := translate_values(without_stack(key.path), value):
        part = "part of " if key.path.endswith(".target_modules") else ""
        mapped = [f"{name} is {part}{ours.replace(',', ' and ')}" for name, ours in foreign]
        ours = dict.fromkeys(own for _, names in foreign for own in names.split(","))
        return f"{', '.join(mapped)}: {key.path}=[{','.join(ours)}]"
    if isinstance(value, str) and value in re.split(r"[ ,]+", key.kind) and accepts_value(key, [value]):
        return f"write {key.path}=[{value}]"
    if isinstance(value, str) and value.lower() in ("none", "no", "off") and key.kind.endswith("or null"):
        return f"write {key.path}=null"
    if isinstance(value, str) and key.choices:
        near = closest(value, [*map(str, key.choices), *(extension_names(key.extends) if key.extends else ())])
        fix = f"did you mean {key.path}={near}?" if near else "" if key.extends else _example(key)
        return f"{fix} if it is your own, give its module with --import".lstrip() if key.extends else fix
    if isinstance(value, str) and "${" in value:
        return "environment variables are not resolved here; set the key"
    if value is None:
        # not "leave it out": a preset may refer to another key that is null
        return "leave it out" if key.default is None else f"write {key.path}={format_value(key.default)}"
    if key.path.endswith((".max_time", ".max_time_per_run", ".train_time_interval")):
        return _fix_for_duration(key, value)
    if isinstance(value, float) and value.is_integer() and accepts_value(key, int(value)):
        return f"write {key.path}={int(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and key.kind == "true or false" and value in (0, 1):
        return f"write {key.path}={'true' if value else 'false'}"
    if isinstance(value, str):
        return _fix_for_text(key, value)
    return ""


def _fix_for_duration(key: SchemaKey, value: Any) -> str:
    """Return the fix for a `DD:HH:MM:SS` of which fields or leading zeros are missing, or given as seconds."""
    if match := _DURATION.fullmatch(str(value)):
        fields = ["0", "0", "0", *match[1].split(":")][-4:]
        text = format_days(parse_duration(":".join(fields)))
        if accepts_value(key, text):
            return f"{key.path}={text}"
    return f"such as {key.path}=00:04:00:00: days, hours, minutes, seconds"


def accepts_value(key: SchemaKey, value: Any) -> bool:
    """Return True if a key accepts a value, as far as its type says."""
    for family in FAMILIES:
        if key.path in schema_keys(family) and not _too_large(value):
            tree: Tree = {}
            dotted_paths.put(tree, "model.family", family)
            dotted_paths.put(tree, key.path, value)
            try:
                RootBlock.model_validate(tree)
            except ValidationError:
                continue
            return True
    return False


def _fix_for_text(key: SchemaKey, value: str) -> str:
    plain = parse_scalar(value)
    if not isinstance(plain, str) and plain is not None and accepts_value(key, plain):
        return f"write {format_value(plain)} without quotes"
    if "integer" in key.kind and (match := _COUNT.fullmatch(value)):
        count = int(re.sub("[,_ ]", "", match[1])) * _SUFFIXES[match[2].lower()]
        if accepts_value(key, count):
            return f"write {key.path}={count}"
    return _example(key)


def _example(key: SchemaKey) -> str:
    return f"such as {key.path}={format_value(key.default)}" if key.default is not None else ""
