"""Names of keys and values in other frameworks: suggested in error messages, never accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..yaml_reader import read_table

_TABLE = Path(__file__).with_name("other_frameworks.yaml")


def _by_name(names_by_target: Mapping[str, str]) -> dict[str, str]:
    return {name: target for target, names in names_by_target.items() for name in names.split()}


@cache
def foreign_names() -> Mapping[str, str]:
    """Return the key to suggest for each name."""
    return _by_name(read_table(_TABLE)["keys"])


def template_block(path: str) -> tuple[str, str] | None:
    """Return the block of lightning-hydra-template that a key belongs to, and what stoker has in its place."""
    for block, instead in _template_blocks().items():
        if path == block or path.startswith(f"{block}."):
            return block, f"leave it out; {instead}"
    return None


@cache
def _template_blocks() -> Mapping[str, str]:
    return read_table(_TABLE)["template"]


@cache
def _foreign_values() -> Mapping[str, Mapping[str, str]]:
    return {path: _by_name(values) for path, values in read_table(_TABLE)["values"].items()}


def translate_values(path: str, value: Any) -> Sequence[tuple[str, str]]:
    """Return (given value, stoker's value) for each value, or list item, known from other frameworks.

    Several values of stoker's are joined with commas.
    """
    known = _foreign_values().get(path, {})
    named = value if isinstance(value, list) else [value]
    return [(name, known[name.lower()]) for name in named if isinstance(name, str) and name.lower() in known]
