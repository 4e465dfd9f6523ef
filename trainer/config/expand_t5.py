"""Expand T5 keys that are written at `model` into its encoder and decoder stacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...models.config.key_block import Finding
from ...models.config.t5 import DecoderKeys
from . import dotted_paths
from .dotted_paths import Tree
from .override_typos import quoted_override
from .schema.key_index import STACKS, format_value, schema_keys
from .schema.root import family_of


def expand_stack_keys(tree: Tree, kind_of: Callable[[str], str], moved: dict[str, str]) -> Iterator[Finding]:
    """Move stack keys of a T5 from `model` to its stacks, rewriting `tree` in place.

    A key that only the decoder has goes to the decoder, every other one to both stacks. An override replaces a stack's
    value from a file; otherwise a stack's own value must be equal.

    Args:
        tree: resolved values.
        kind_of: the kind of origin of a path; see `Origin`.
        moved: receives new path -> old path for every moved key.

    Yields:
        A warning for each key that was moved, an error for each contradiction.
    """
    model = tree.get("model")
    if family_of(model) != "t5" or not isinstance(model, dict):
        return
    known = schema_keys("t5")
    for name in [name for name in model if name in DecoderKeys.model_fields]:
        path, value = f"model.{name}", model.pop(name)
        targets = [f"{stack}.{name}" for stack in STACKS["t5"] if f"{stack}.{name}" in known]
        readers = "both stacks" if len(targets) > 1 else "the decoder"
        for target in targets:
            current = dotted_paths.get(tree, target, dotted_paths.MISSING)
            is_overridden = kind_of(path) == "override" != kind_of(target)
            if current in (dotted_paths.MISSING, value) or is_overridden:
                dotted_paths.put(tree, target, value)
                moved[target] = path
                continue
            yield Finding.error(
                (target,),
                f"`{path}` ({format_value(value)}) is for {readers} and contradicts `{target}` "
                f"({format_value(current)})",
                f"~{path}, or set {' and '.join(targets)}",
            )
        shown = format_value(value)
        yield Finding.warning(
            tuple(targets),
            f"`{path}` belongs to a stack and is applied to "
            + ("both, the encoder and the decoder" if len(targets) > 1 else readers),
            " ".join((f"~{path}", *(quoted_override(target, shown) for target in targets))),
        )
