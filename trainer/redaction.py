"""What must never be written down: secrets, told by the names they go by."""

from __future__ import annotations

import re

REDACTED = "***"
"""What is written in the place of a secret."""

_SECRET_WORDS = frozenset({"secret", "password", "passwd", "credential", "credentials", "apikey", "token"})
_SPECIAL_TOKENS = "special_tokens."
_ASSIGNMENT = re.compile(r"(?P<name>[+~-]*[\w.@/-]+)=(?P<value>.*)", re.DOTALL)
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")


def is_secret(name: str) -> bool:
    """Whether a variable or dotted key is, by its name, one whose value must not be written down.

    `WANDB_API_KEY`, `HF_TOKEN`, `db.password` are; `TOKENIZERS_PARALLELISM` and
    `model.apply_query_key_layer_scaling` are not, nor are the texts of special tokens.
    """
    if _SPECIAL_TOKENS in name:
        return False
    words = re.split(r"[^a-z0-9]+", name.lower())
    return words[-1] == "key" or not _SECRET_WORDS.isdisjoint(words)


def without_secrets(text: str) -> str:
    """One word of a command line: the value of a secret `name=value` and the user part of a URL become `***`."""
    assignment = _ASSIGNMENT.fullmatch(text)
    if assignment and is_secret(assignment["name"]):
        return f"{assignment['name']}={REDACTED}"
    return _USER_INFO.sub(f"{REDACTED}@", text)


def has_user(url: str) -> bool:
    """Whether a URL names a user, and so perhaps a password: `https://user:password@host/`."""
    return _USER_INFO.search(url) is not None
