"""Rows of the key table (NeMo and Megatron keys that do not act here), and helpers to write them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class KeyState(StrEnum):
    """State of a key; see `key_table.py`."""

    ACTS = "acts"
    NOT_YET = "not yet"
    REFUSED = "refused"
    HISTORICAL = "historical"


@dataclass(frozen=True, slots=True)
class Row:
    """A key, or all keys below a path, that do not act.

    Attributes:
        pattern: dotted path, or `path.*`.
        state: not yet, refused or historical.
        note: description; for a refused key the alternative.
        off: values accepted because they change nothing; null always is.
        default: NeMo's default, used by references to the key if no file sets it.
        switch: path of the key that enables its feature; while that is off, every value is accepted.
        same_as: path of the key that replaces it; a value equal to that key's is accepted.
        fix: fix for a refused key, with `{path}` for the key; empty: none; None: derived from `off` and `same_as`.
    """

    pattern: str
    state: KeyState
    note: str
    off: tuple[Any, ...] = ()
    default: Any = None
    switch: str = ""
    same_as: str = ""
    fix: str | None = None


def rows(state: KeyState, parent: str, names: str, note: str, **fields: Any) -> Iterator[Row]:
    """Yield a row for each of the space-separated `names` below `parent`."""
    for name in names.split():
        yield Row(f"{parent}.{name}" if parent else name, state, note, **fields)


def off(parent: str, name: str, note: str, off: Any, *more: Any, **fields: Any) -> Row:
    """Return a row of a feature that is not supported yet; the first `off` value is also NeMo's default."""
    return Row(f"{parent}.{name}", KeyState.NOT_YET, note, (off, *more), default=off, **fields)


def refused(parent: str, name: str, note: str, allowed: Any, *more: Any, **fields: Any) -> Row:
    """Return a row of a feature that will not be supported; the first allowed value is also NeMo's default."""
    return Row(f"{parent}.{name}", KeyState.REFUSED, note, (allowed, *more), default=allowed, **fields)


def history(parent: str, names: str, note: str, default: Any = None) -> Iterator[Row]:
    """Yield rows of historical keys, which have no effect here."""
    return rows(KeyState.HISTORICAL, parent, names, note, default=default)


COMMUNICATION_NOTE = "a performance setting of NeMo's communication; results do not depend on it"
CHECKPOINT_NOTE = "belongs to NeMo's checkpoint format; stoker writes safetensors, atomically"
