"""Detect mistyped overrides on the command line: `key: value`, `key = value`, `key value`, `key=[a, b]` unquoted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from ..utils.redaction import REDACTED, is_secret, redact
from .problems import Problem
from .schema.key_index import find_key

_KEY = r"\+{0,2}[A-Za-z_][\w./@-]*"
_NAME = re.compile(_KEY)
_COLON = re.compile(rf"({_KEY})\s*:\s*(.*)", re.DOTALL)
_SPACED = re.compile(rf"({_KEY})\s+=\s*(.*)", re.DOTALL)
_OPENED = re.compile(rf"({_KEY})=([\[{{(].*)", re.DOTALL)
_RULE = "is not an override, which is key=value in one word"
_SPLIT = "is several words for the shell: a value with spaces needs quotes"


def detect_override_typos(words: Sequence[str]) -> Iterator[str | Problem]:
    """Yield the words as typed, with one problem in place of words that together form a mistyped override."""
    index = 0
    while index < len(words):
        rule = _SPLIT
        count, override = _match_brackets(words, index)
        if override is None:
            rule = _RULE
            count, override = _match(words[index : index + 3])
        yield words[index] if override is None else _problem(words[index : index + count], *override, rule)
        index += count


def quoted_override(key: str, value: str) -> str:
    """Return `key=value` quoted for a shell, with secrets redacted."""
    return shlex.quote(f"{key}={REDACTED if is_secret(key) else redact(value)}")


def _match_brackets(words: Sequence[str], index: int) -> tuple[int, tuple[str, str] | None]:
    """Return how many words a list or block spans that the shell split at its spaces, and its (key, value)."""
    opened = _OPENED.fullmatch(words[index])
    if opened is None:
        return 1, None
    value = opened[2]
    for count, word in enumerate(words[index + 1 :], 2):
        if _open_brackets(value) <= 0 or not _is_value(word):
            return 1, None
        value += word if value[-1] in ",[(" else f" {word}"
        if _open_brackets(value) == 0:
            return count, (opened[1], value)
    return 1, None


def _open_brackets(value: str) -> int:
    return sum(value.count(mark) for mark in "[{(") - sum(value.count(mark) for mark in "]})")


def _match(words: Sequence[str]) -> tuple[int, tuple[str, str] | None]:
    """Return how many leading words form one override, and its (key, value); None if the first word is not mistyped."""
    first, second, third = (*words, "", "")[:3]
    if match := _COLON.fullmatch(first) or _SPACED.fullmatch(first):
        if match[2]:
            return 1, (match[1], match[2])
        return (2, (match[1], second)) if _is_value(second) else (1, None)
    name = first.removesuffix("=")
    if _NAME.fullmatch(name) is None or not second:
        return 1, None
    if first != name:  # `key= value`
        return (2, (name, second)) if _is_value(second) else (1, None)
    if second in ("=", ":") and _is_value(third):
        return 3, (name, third)
    if second.startswith("=") and second != "=":
        return 2, (name, second[1:])
    is_key = find_key(name.lstrip("+")) is not None
    return (2, (name, second)) if is_key and _is_value(second) else (1, None)


def _is_value(word: str) -> bool:
    return bool(word) and "=" not in word and not word.startswith("~")


def _problem(words: Sequence[str], key: str, value: str, rule: str) -> Problem:
    typed = f"{key} {REDACTED}" if is_secret(key) else " ".join(map(redact, words))
    return Problem(typed, None, "command line", rule, f"write {quoted_override(key, value)}")
