"""A row of the key table: a key that NeMo and Megatron know and that does not act here. Short forms to write rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """What happens to a key; see `key_table.py`."""

    ACTS = "acts"
    NOT_YET = "not yet"
    REFUSED = "refused"
    HISTORICAL = "historical"


@dataclass(frozen=True, slots=True)
class Row:
    """One key, or everything below a path, that does not act.

    Attributes:
        pattern: dotted path, or `path.*`.
        state: not yet, refused or historical.
        note: what it is, and for a refused key what to do instead.
        off: values that are accepted because they change nothing; null always is.
        default: NeMo's default, which references to the key get where a file does not set it.
        switch: path of the key that turns its feature on; while that is off, every value is accepted.
        same_as: path of the key whose value it may repeat, and which has the value of a refused one instead.
        cure: the way out of a refusal, with `{path}` for the key; empty: there is none; None: by `off` and `same_as`.
    """

    pattern: str
    state: State
    note: str
    off: tuple[Any, ...] = ()
    default: Any = None
    switch: str = ""
    same_as: str = ""
    cure: str | None = None


def rows(state: State, parent: str, names: str, note: str, **facts: Any) -> Iterator[Row]:
    """A row for each of the `names` below `parent`."""
    for name in names.split():
        yield Row(f"{parent}.{name}" if parent else name, state, note, **facts)


def off(parent: str, name: str, note: str, off: Any, *more: Any, **facts: Any) -> Row:
    """A feature to come whose first `off` value is also NeMo's default."""
    return Row(f"{parent}.{name}", State.NOT_YET, note, (off, *more), default=off, **facts)


def refused(parent: str, name: str, note: str, allowed: Any, *more: Any, **facts: Any) -> Row:
    """What stoker will never do; the first allowed value is also NeMo's default."""
    return Row(f"{parent}.{name}", State.REFUSED, note, (allowed, *more), default=allowed, **facts)


def history(parent: str, names: str, note: str, default: Any = None) -> Iterator[Row]:
    """Keys without meaning here."""
    return rows(State.HISTORICAL, parent, names, note, default=default)


NCCL = "a speed setting of NeMo's communication; results do not depend on it"
PICKLE = "belongs to NeMo's own checkpoint format; stoker writes safetensors, atomically"
