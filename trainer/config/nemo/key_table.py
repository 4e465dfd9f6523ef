"""Tables of NeMo's and Megatron's keys that do not act here, and of unsupported values of keys that do.

Together with the schema (keys that act), `inactive_keys.yaml` holds all known keys. A key is in exactly one of four
states:

- acts: it is in the schema;
- not yet: an error, unless its value means "off" or its feature is off;
- refused: an error, with the reason; only values that change nothing are accepted;
- historical: accepted with any value and without effect; listed once per run.

A pattern that ends in `.*` covers everything below a path. An exact path takes precedence over a pattern. The YAML
files are part of the package and read when first needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from ..dotted_paths import join
from ..yaml_reader import read_table

_TABLES = Path(__file__).parent


class KeyState(StrEnum):
    """State of a key, as described above."""

    ACTS = "acts"
    NOT_YET = "not yet"
    REFUSED = "refused"
    HISTORICAL = "historical"


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A key, or all keys below a path, that do not act; the fields are described in `inactive_keys.yaml`."""

    pattern: str
    state: KeyState
    note: str
    accepts: tuple[Any, ...] = ()
    default: Any = None
    switch: str = ""
    same_as: str = ""
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class UnsupportedValue:
    """Reason why some values of a key that acts are not supported; see `unsupported_values.yaml`."""

    state: KeyState
    note: str
    use: str = ""
    needs: tuple[tuple[str, Any], ...] = ()


def _state_and_note(fields: dict[str, Any]) -> tuple[KeyState, str]:
    """Remove and return the field that is named after a state."""
    (state,) = fields.keys() & {state.value for state in KeyState}
    return KeyState(state), fields.pop(state)


@cache
def key_table() -> Mapping[str, KeyRow]:
    """Return all rows by pattern, in the order of the documentation."""
    rows: dict[str, KeyRow] = {}
    for block, entries in read_table(_TABLES / "inactive_keys.yaml").items():
        for names, entry in entries.items():
            fields = dict(entry)
            state, note = _state_and_note(fields)
            accepts = tuple(fields.pop("accepts", ()))
            fields.setdefault("default", next(iter(accepts), None))
            for name in names.split():
                pattern = join(block, name)
                assert pattern not in rows, f"{pattern} is listed twice"
                rows[pattern] = KeyRow(pattern, state, note, accepts, **fields)
    return rows


@cache
def unsupported_values() -> Mapping[str, Mapping[Any, UnsupportedValue]]:
    """Return the unsupported values of keys that act, by path of the key."""
    tables = read_table(_TABLES / "unsupported_values.yaml")
    return {path: dict(_unsupported_values(entries)) for path, entries in tables.items()}


def _unsupported_values(entries: list[dict[str, Any]]) -> Iterator[tuple[Any, UnsupportedValue]]:
    for fields in entries:
        state, note = _state_and_note(fields)
        values, needs = fields.pop("values"), tuple(fields.pop("with", {}).items())
        yield from dict.fromkeys(values, UnsupportedValue(state, note, needs=needs, **fields)).items()


def find_row(path: str, family: str = "gpt") -> KeyRow | None:
    """Return the row of a key: its own, or that of the closest enclosing pattern; None if there is none.

    In a T5, keys below `model.encoder` and `model.decoder` have the state of the same key below `model`.
    """
    table = key_table()
    if family == "t5":
        for stack in ("model.encoder.", "model.decoder."):
            name = path.removeprefix(stack)
            if name != path:
                row = table.get(f"model.{name}")
                return row and _moved(row, stack)
    if family == "bert" and path.startswith("model.bert."):
        return None
    if path in table:
        return table[path]
    above = path
    while "." in above:
        above = above.rpartition(".")[0]
        if f"{above}.*" in table:
            return table[f"{above}.*"]
        if above in table:
            return None
    return table.get(f"{path}.*")


def _moved(row: KeyRow, stack: str) -> KeyRow:
    """Return the row of a `model` key for the same key of a stack."""
    pattern, switch, same_as = (text.replace("model.", stack, 1) for text in (row.pattern, row.switch, row.same_as))
    return replace(row, pattern=pattern, switch=switch, same_as=same_as)


def has_rows_below(path: str) -> bool:
    """Return True if the table has rows below `path`, such as `model.nsys_profile`."""
    return any(pattern.startswith(f"{path}.") for pattern in key_table())
