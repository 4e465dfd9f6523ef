"""Every key that NeMo and Megatron know and that does not act here, in one table: why, and which values are accepted.

With the schema (keys that act) this is every key stoker knows. A key is in exactly one of four states:

- acts: it is in the schema;
- not yet: refused, unless its value means "off", or the feature it belongs to is off;
- refused: never, with the reason; only the values that change nothing are accepted;
- historical: accepted whatever its value, since it has no meaning here; listed once per run.

A pattern ends in `.*` where everything below a path has one state. An exact path wins over a pattern.
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
"""Every row, in the order of the documentation."""

_EXACT: Mapping[str, Row] = MappingProxyType({row.pattern: row for row in KEY_TABLE if not row.pattern.endswith(".*")})
_BELOW: Mapping[str, Row] = MappingProxyType({row.pattern[:-2]: row for row in KEY_TABLE if row.pattern.endswith(".*")})


def row_of(path: str, family: str = "gpt") -> Row | None:
    """The row of a key: its own, that of the block it lies in, or that of a key whose value is a block.

    Below `model.encoder` and `model.decoder` of a T5, a key has the state it has below `model` elsewhere.
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
    """The row of a key of `model` for the same key of a stack."""
    pattern, switch, same_as = (text.replace("model.", stack, 1) for text in (row.pattern, row.switch, row.same_as))
    return replace(row, pattern=pattern, switch=switch, same_as=same_as)


def is_block_of_rows(path: str) -> bool:
    """Whether rows lie below `path`, as below `model.nsys_profile`."""
    return path in _BELOW or any(row.pattern.startswith(path + ".") for row in KEY_TABLE)
