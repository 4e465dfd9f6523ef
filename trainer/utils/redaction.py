"""What must never be written down: secrets, told by the names they go by."""

from __future__ import annotations

import re
from collections.abc import Sequence

REDACTED = "***"
"""What is written in the place of a secret."""

_SECRET_WORDS = frozenset({"secret", "password", "passwd", "credential", "credentials", "apikey"})
_LAST_WORDS = frozenset({"key", "token"})
"""Secret at the end of a name only: `HF_TOKEN` is, `model.moe_token_dropping` is not."""
_SPECIAL_TOKENS = "special_tokens."
_FIELDS = frozenset({"context_key", "label_key"})
"""Keys that say what a field of JSON lines is called."""
_ASSIGNMENT = re.compile(r"(?P<name>[+~-]*[\w.@/-]+)=(?P<value>.*)", re.DOTALL)
_IN_BLOCK = re.compile(r"(?<=[{,\s])([\w.\-]+)(\s*:\s*)[^,{}\s][^,{}]*")
"""`name: value` in a block that is typed as one override, `env_vars={A: 1, B: 2}`."""
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")


def is_secret(name: str) -> bool:
    """Whether a variable or dotted key is, by its name, one whose value must not be written down.

    `WANDB_API_KEY`, `HF_TOKEN`, `db.password` are; `TOKENIZERS_PARALLELISM` and
    `model.apply_query_key_layer_scaling` are not, nor are the texts of special tokens and the names of fields.
    """
    if _SPECIAL_TOKENS in name or name.rpartition(".")[2] in _FIELDS:
        return False
    return _words(name)[-1] in _LAST_WORDS or not is_ambiguous(name)


def is_ambiguous(name: str) -> bool:
    """Whether nothing but `key` or `token` at its end makes a name secret: `api_key`, and `text_key` as well."""
    return _SECRET_WORDS.isdisjoint(_words(name))


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", name.lower())


def without_secrets(text: str) -> str:
    """One word of a command line: the value of a secret `name=value` and the user part of a URL become `***`."""
    assignment = _ASSIGNMENT.fullmatch(text)
    if assignment and is_secret(assignment["name"]):
        return f"{assignment['name']}={REDACTED}"
    text = _IN_BLOCK.sub(lambda match: match[0] if not is_secret(match[1]) else f"{match[1]}{match[2]}{REDACTED}", text)
    return _USER_INFO.sub(f"{REDACTED}@", text)


def shown_value(name: str, text: str) -> str:
    """The value of a key or variable as it may be shown: `***` for a secret, unless it only says where one is."""
    return REDACTED if is_secret(name) and "${" not in text else without_secrets(text)


def words_without_secrets(words: Sequence[str]) -> list[str]:
    """A command line; also `VALUE` in `--api-key VALUE` becomes `***`."""
    kept: list[str] = []
    hides_next = False
    for word in words:
        is_option = word.startswith("-")
        kept.append(REDACTED if hides_next and not is_option else without_secrets(word))
        hides_next = is_option and "=" not in word and is_secret(word)
    return kept


def has_user(url: str) -> bool:
    """Whether a URL names a user, and so perhaps a password: `https://user:password@host/`."""
    return _USER_INFO.search(url) is not None
