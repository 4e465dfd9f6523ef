"""Redaction of secrets, recognized by the names of keys and variables."""

from __future__ import annotations

import re
from collections.abc import Sequence

REDACTED = "***"
"""Replacement of a secret."""

_SECRET_WORDS = frozenset({"secret", "password", "passwd", "credential", "credentials", "apikey"})
_LAST_WORDS = frozenset({"key", "token"})
"""Secret at the end of a name only: `HF_TOKEN` is, `model.moe_token_dropping` is not."""
_SPECIAL_TOKENS = "special_tokens."
_FIELDS = frozenset({"context_key", "label_key"})
"""Keys whose value is the name of a JSON field, not a secret."""
_ASSIGNMENT = re.compile(r"(?P<name>[+~-]*[\w.@/-]+)=(?P<value>.*)", re.DOTALL)
_IN_BLOCK = re.compile(r"(?<=[{,\s])([\w.\-]+)(\s*:\s*)[^,{}\s][^,{}]*")
"""`name: value` in an override with a dict value: `env_vars={A: 1, B: 2}`."""
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")


def is_secret(name: str) -> bool:
    """Return True if the name of a variable or dotted key indicates a secret.

    `WANDB_API_KEY`, `HF_TOKEN`, `db.password` do; `TOKENIZERS_PARALLELISM` and `model.apply_query_key_layer_scaling`
    do not, nor do special tokens and names of JSON fields.
    """
    if _SPECIAL_TOKENS in name or name.rpartition(".")[2] in _FIELDS:
        return False
    return _words(name)[-1] in _LAST_WORDS or not is_ambiguous_secret(name)


def is_ambiguous_secret(name: str) -> bool:
    """Return True if only a final `key` or `token` makes a name secret: `api_key`, but also `text_key`."""
    return _SECRET_WORDS.isdisjoint(_words(name))


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", name.lower())


def redact(text: str) -> str:
    """Redact an argument: the value of a secret `name=value` and the user part of a URL become `***`."""
    assignment = _ASSIGNMENT.fullmatch(text)
    if assignment and is_secret(assignment["name"]):
        return f"{assignment['name']}={REDACTED}"
    text = _IN_BLOCK.sub(lambda match: match[0] if not is_secret(match[1]) else f"{match[1]}{match[2]}{REDACTED}", text)
    return _USER_INFO.sub(f"{REDACTED}@", text)


def redact_value(name: str, text: str) -> str:
    """Redact the value of a key or variable: `***` for a secret, unless it only refers to one (`${...}`)."""
    return REDACTED if is_secret(name) and "${" not in text else redact(text)


def redact_arguments(words: Sequence[str]) -> list[str]:
    """Redact a command line; also `VALUE` in `--api-key VALUE` becomes `***`."""
    redacted: list[str] = []
    hides_next = False
    for word in words:
        is_option = word.startswith("-")
        redacted.append(REDACTED if hides_next and not is_option else redact(word))
        hides_next = is_option and "=" not in word and is_secret(word)
    return redacted


def has_user_info(url: str) -> bool:
    """Return True if a URL has a user part, and so perhaps a password: `https://user:password@host/`."""
    return _USER_INFO.search(url) is not None
