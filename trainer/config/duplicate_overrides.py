"""Detect contradicting duplicate overrides on the command line; identical duplicates are allowed.

`~key` may precede `key=value` (reset, then set), but not follow it, since the value would be lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override

from ..utils.redaction import redact
from . import dotted_paths
from .problems import Problem
from .schema.key_index import find_key, format_value

if TYPE_CHECKING:
    from .overrides import ValueOverride

_RESET = "~"


def duplicate_keys(edits: Iterable[ValueOverride]) -> Iterator[Problem]:
    """Yield a problem for each key with contradicting value overrides."""
    seen = _SeenOverrides()
    for edit in edits:
        for path, value in _assigned_values(edit):
            seen.add(path, value, edit.typed)
    yield from seen.problems()


def duplicate_choices(choices: Iterable[Override]) -> Iterator[Problem]:
    """Yield a problem for each group with contradicting choices."""
    seen = _SeenOverrides()
    for choice in choices:
        group = choice.key_or_group if choice.package is None else f"{choice.key_or_group}@{choice.package}"
        value = _RESET if choice.is_delete() else format_value(choice.value())
        seen.add(group, value, choice.input_line or group)
    yield from seen.problems()


def duplicate_problem(key: str, words: Sequence[str]) -> Problem:
    """Return the problem for a key or group set by several overrides (`words`)."""
    *others, last = map(redact, words)
    rule = f"is given more than once: {', '.join(others)} and {last}"
    return Problem(key, None, "command line", rule, "keep one of them")


class _SeenOverrides:
    """Values set by the overrides seen so far, in the order typed."""

    def __init__(self) -> None:
        self._at: dict[str, tuple[str, str]] = {}
        self._below: dict[str, str] = {}
        self._contradictions: dict[str, list[str]] = {}

    def add(self, path: str, value: str, typed: str) -> None:
        """Record `value` (or `~`) at `path`, and contradictions with earlier overrides."""
        known, word = self._at.get(path, (_RESET, ""))
        if known not in (_RESET, value):
            self._contradict(path, word, typed)
        if path in self._below:  # a whole block after one of its keys
            below = self._below[path]
            self._contradict(below, self._at[below][1], typed)
        above = dotted_paths.parent_of(path)
        while above:
            known, word = self._at.get(above, (_RESET, ""))
            if known != _RESET and not known.startswith("{") and value != _RESET:  # a key below a plain value
                self._contradict(above, word, typed)
            if value != _RESET:
                self._below[above] = path
            above = dotted_paths.parent_of(above)
        self._at[path] = (value, typed)

    def problems(self) -> Iterator[Problem]:
        """Yield one problem per contradicted path."""
        for path, words in self._contradictions.items():
            yield duplicate_problem(path, words)

    def _contradict(self, path: str, word: str, typed: str) -> None:
        words = self._contradictions.setdefault(path, [word])
        words.append(typed)


def _assigned_values(edit: ValueOverride) -> Iterator[tuple[str, str]]:
    """Yield each path that an override sets, with its value as text."""
    if edit.is_reset:
        yield edit.path, _RESET
        return
    value: Any = edit.value
    key = find_key(edit.path)
    if isinstance(value, dict) and value and not (key is not None and key.is_open):
        for path, leaf in dotted_paths.leaves(value, edit.path):
            yield path, format_value(leaf)
    else:
        yield edit.path, format_value(value)
