"""What NeMo's files write in other words: spellings that are read as the key or value they mean, and reported."""

from __future__ import annotations

from collections.abc import Iterator

from ...models.config.block import Finding
from . import paths
from .key_table import VALUES
from .paths import Tree
from .schema import family_of
from .schema_index import STACKS, plain_path, schema_keys

_DISPATCHERS = ("allgather", "alltoall", "alltoall_seq", "flex")
_ANY_CASE = ("normalization", "position_embedding_type", "activation")
_NULL_IS_DEFAULT = ("hidden_dropout", "attention_dropout", "ffn_dropout")


def respelled(tree: Tree, moved: dict[str, str]) -> Iterator[Finding]:
    """Rewrite `tree` in place.

    Args:
        tree: resolved values.
        moved: takes new path -> old path for a key that was written under another name.

    Yields:
        What was read differently, and for the typo of NeMo's documentation also a contradiction.
    """
    yield from _token_dispatcher(tree, moved)
    family = family_of(tree.get("model"))
    keys = schema_keys(family)
    for path in (f"{stack}.{name}" for stack in STACKS[family] for name in _ANY_CASE):
        value = paths.get(tree, path)
        known = [*map(str, keys[path].choices), *map(str, VALUES.get(plain_path(path), ()))]
        if isinstance(value, str) and value not in known:
            meant = [choice for choice in known if choice.lower() == value.lower()]
            if meant:
                paths.put(tree, path, meant[0])
                yield Finding("warning", (path,), f"`{value}` is read as `{meant[0]}`", f"{path}={meant[0]}")
    for path in (f"{stack}.{name}" for stack in STACKS[family] for name in _NULL_IS_DEFAULT):
        if paths.get(tree, path, 0) is None:
            default = keys[path].default
            paths.remove(tree, path)
            yield Finding("info", (path,), f"null is read as the default, {default}", f"{path}={default}")


def _token_dispatcher(tree: Tree, moved: dict[str, str]) -> Iterator[Finding]:
    """NeMo's documentation lists `moe_token_dropping` twice; the second, with a word, is the dispatcher."""
    wrong, right = "model.moe_token_dropping", "model.moe_token_dispatcher_type"
    value = paths.get(tree, wrong)
    if not isinstance(value, str) or value not in _DISPATCHERS:
        return
    given = paths.get(tree, right)
    if given is not None and given != value:
        yield Finding(
            "error",
            (wrong, right),
            f"`{value}` is a value of `moe_token_dispatcher_type`, which is `{given}`",
            f"{right}={value}, and moe_token_dropping=false",
        )
        return
    paths.remove(tree, wrong)
    paths.put(tree, right, value)
    moved[right] = wrong
    yield Finding(
        "warning",
        (right,),
        f"`moe_token_dropping: {value}` is a typo of NeMo's documentation and is read as `moe_token_dispatcher_type`",
        f"{right}={value}",
    )
