"""Nested dictionaries addressed by dotted paths: the form a configuration has before it is typed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Tree = dict[str, Any]
MISSING = "???"
"""What YAML holds for a key that must be given before a run can start (OmegaConf's mark)."""


def join(parent: str, name: str) -> str:
    """The path of `name` below `parent`; the root is the empty path."""
    return f"{parent}.{name}" if parent else name


def parent_of(path: str) -> str:
    """The path one level up; empty for a key of the root."""
    return path.rpartition(".")[0]


def leaves(tree: Mapping[str, Any], parent: str = "") -> Iterator[tuple[str, Any]]:
    """Every path and value that is not itself a block; an empty block counts as a value, a list is one value."""
    for name, value in tree.items():
        path = join(parent, name)
        if isinstance(value, dict) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def get(tree: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value or block at `path`, or `default` where there is none."""
    node: Any = tree
    for name in path.split(".") if path else ():
        if not isinstance(node, dict) or name not in node:
            return default
        node = node[name]
    return node


def put(tree: Tree, path: str, value: Any) -> None:
    """Set `path`; a value in the way of a block is replaced by the block."""
    *blocks, name = path.split(".")
    for block in blocks:
        below = tree.get(block)
        if not isinstance(below, dict):
            below = tree[block] = {}
        tree = below
    tree[name] = value


def remove(tree: Tree, path: str) -> bool:
    """Remove `path` and everything below it; False when there was nothing."""
    above = get(tree, parent_of(path))
    return isinstance(above, dict) and above.pop(path.rpartition(".")[2], tree) is not tree


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """A new tree: `above` over `below`, blocks merged key by key, everything else replaced."""
    result = {name: merged(value, {}) if isinstance(value, dict) else value for name, value in below.items()}
    for name, value in above.items():
        under = result.get(name)
        if isinstance(value, dict):
            result[name] = merged(under if isinstance(under, dict) else {}, value)
        else:
            result[name] = value
    return result
