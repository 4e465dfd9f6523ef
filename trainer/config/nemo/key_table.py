"""Table of NeMo and Megatron keys that do not act here, with the reason and the accepted values.

Together with the schema (keys that act) these are all known keys. A key is in exactly one of four states:

- acts: it is in the schema;
- not yet: an error, unless its value means "off" or its feature is off;
- refused: an error, with the reason; only values that change nothing are accepted;
- historical: accepted with any value and without effect; listed once per run.

A pattern that ends in `.*` covers everything below a path. An exact path takes precedence over a pattern.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from .key_row import Row
from .key_rows_model import rows_of_model
from .key_rows_run import rows_of_run
from .key_rows_training import rows_of_training


def _all_rows() -> Iterator[Row]:
    for row in (*rows_of_run(), *rows_of_model(), *rows_of_training()):
        parent, _, names = row.pattern.rpartition(".")
        for name in names.split():
            yield replace(row, pattern=f"{parent}.{name}" if parent else name)


KEY_TABLE: tuple[Row, ...] = tuple(_all_rows())
"""All rows, in the order of the documentation."""

_EXACT: Mapping[str, Row] = MappingProxyType({row.pattern: row for row in KEY_TABLE if not row.pattern.endswith(".*")})
_BELOW: Mapping[str, Row] = MappingProxyType({row.pattern[:-2]: row for row in KEY_TABLE if row.pattern.endswith(".*")})


def row_of(path: str, family: str = "gpt") -> Row | None:
    """Return the row of a key: its own, or that of the closest enclosing pattern; None if there is none.

    In a T5, keys below `model.encoder` and `model.decoder` have the state of the same key below `model`.
    """
    if family == "t5":
        for stack in ("model.encoder.", "model.decoder."):
            name = path.removeprefix(stack)
            if name != path:
                row = _EXACT.get(f"model.{name}")
                return row and _moved(row, stack)
    if family == "bert" and path.startswith("model.bert."):
        return None
    if path in _EXACT:
        return _EXACT[path]
    above = path
    while "." in above:
        above = above.rpartition(".")[0]
        if above in _BELOW:
            return _BELOW[above]
        if above in _EXACT:
            return None
    return _BELOW.get(path)


def _moved(row: Row, stack: str) -> Row:
    """Return the row of a `model` key for the same key of a stack."""
    pattern, switch, same_as = (text.replace("model.", stack, 1) for text in (row.pattern, row.switch, row.same_as))
    return replace(row, pattern=pattern, switch=switch, same_as=same_as)


def has_rows_below(path: str) -> bool:
    """Return True if the table has rows below `path`, such as `model.nsys_profile`."""
    return path in _BELOW or any(row.pattern.startswith(path + ".") for row in KEY_TABLE)
