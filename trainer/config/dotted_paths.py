"""Nested dictionaries addressed by dotted paths: the untyped form of a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Tree = dict[str, Any]
MISSING = "???"
"""Value of a mandatory key that is not set yet (as in OmegaConf)."""


def join(parent: str, name: str) -> str:
    """Return the path of `name` below `parent`; the root is the empty path."""
    return f"{parent}.{name}" if parent else name


def parent_of(path: str) -> str:
    """Return the path one level up; empty for a key of the root."""
    return path.rpartition(".")[0]


def parents_of(path: str) -> Iterator[str]:
    """Yield the paths of all blocks above `path`, from the innermost, without the root."""
    while path := parent_of(path):
        yield path


def leaves(tree: Mapping[str, Any], parent: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every leaf; an empty block and a list count as one leaf."""
    for name, value in tree.items():
        path = join(parent, name)
        if isinstance(value, dict) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def get(tree: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value or block at `path`, or `default` if it does not exist."""
    node: Any = tree
    for name in path.split(".") if path else ():
        if not isinstance(node, dict) or name not in node:
            return default
        node = node[name]
    return node


def put(tree: Tree, path: str, value: Any) -> None:
    """Set `path`, creating blocks; a value along the path is replaced by a block."""
    *blocks, name = path.split(".")
    for block in blocks:
        below = tree.get(block)
        if not isinstance(below, dict):
            below = tree[block] = {}
        tree = below
    tree[name] = value


def remove(tree: Tree, path: str) -> bool:
    """Remove `path` and everything below it; return False if it did not exist."""
    above = get(tree, parent_of(path))
    return isinstance(above, dict) and above.pop(path.rpartition(".")[2], tree) is not tree


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """Return a new tree with `above` merged over `below`: blocks key by key, all other values replaced."""
    result = {name: merged(value, {}) if isinstance(value, dict) else value for name, value in below.items()}
    for name, value in above.items():
        under = result.get(name)
        if isinstance(value, dict):
            result[name] = merged(under if isinstance(under, dict) else {}, value)
        else:
            result[name] = value
    return result
