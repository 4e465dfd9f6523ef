"""Keys and groups that a command line gives more than once: the same twice is one, two meanings are refused.

`~key` may stand before `key=value`: what a file says goes, then the value comes. After it, the value would not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override

from ..utils.redaction import without_secrets
from . import dotted_paths
from .problems import Problem
from .schema.key_index import key_of_any_family, show_value

if TYPE_CHECKING:
    from .overrides import Edit

_RESET = "~"


def keys_given_twice(edits: Iterable[Edit]) -> Iterator[Problem]:
    """Keys of which one override says what another takes back."""
    said = _Said()
    for edit in edits:
        for path, value in _claims(edit):
            said.add(path, value, edit.typed)
    yield from said.problems()


def choices_given_twice(choices: Iterable[Override]) -> Iterator[Problem]:
    """Groups of which two files are chosen by two overrides."""
    said = _Said()
    for choice in choices:
        group = choice.key_or_group if choice.package is None else f"{choice.key_or_group}@{choice.package}"
        value = _RESET if choice.is_delete() else show_value(choice.value())
        said.add(group, value, choice.input_line or group)
    yield from said.problems()


def given_twice(key: str, words: Sequence[str]) -> Problem:
    """The problem of a key, or a group, that several words of the command line set."""
    *others, last = map(without_secrets, words)
    told = f"is given more than once: {', '.join(others)} and {last}"
    return Problem(key, None, "command line", told, "keep one of them")


class _Said:
    """What the overrides so far have said of each path, in the order typed."""

    def __init__(self) -> None:
        self._at: dict[str, tuple[str, str]] = {}
        self._below: dict[str, str] = {}
        self._contradictions: dict[str, list[str]] = {}

    def add(self, path: str, value: str, typed: str) -> None:
        """Take in `value` at `path` (or `~`), and what it contradicts."""
        known, word = self._at.get(path, (_RESET, ""))
        if known not in (_RESET, value):
            self._contradict(path, word, typed)
        if path in self._below:  # a whole block, after keys of it
            below = self._below[path]
            self._contradict(below, self._at[below][1], typed)
        above = dotted_paths.parent_of(path)
        while above:
            known, word = self._at.get(above, (_RESET, ""))
            if known != _RESET and not known.startswith("{") and value != _RESET:  # a key of what has one value
                self._contradict(above, word, typed)
            if value != _RESET:
                self._below[above] = path
            above = dotted_paths.parent_of(above)
        self._at[path] = (value, typed)

    def problems(self) -> Iterator[Problem]:
        """One for each path."""
        for path, words in self._contradictions.items():
            yield given_twice(path, words)

    def _contradict(self, path: str, word: str, typed: str) -> None:
        words = self._contradictions.setdefault(path, [word])
        words.append(typed)


def _claims(edit: Edit) -> Iterator[tuple[str, str]]:
    """The paths that an override sets, each with its value as shown."""
    if edit.is_reset:
        yield edit.path, _RESET
        return
    value: Any = edit.value
    key = key_of_any_family(edit.path)
    if isinstance(value, dict) and value and not (key is not None and key.is_open):
        for path, leaf in dotted_paths.leaves(value, edit.path):
            yield path, show_value(leaf)
    else:
        yield edit.path, show_value(value)
