"""Redaction of secrets, recognized by the names of keys and variables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

REDACTED = "***"
"""Replacement of a secret."""

_SECRET_WORDS = frozenset(
    [
        *("secret", "secrets", "password", "passwords", "passwd", "passphrase", "passcode", "credential"),
        *("credentials", "creds", "cookie", "cookies", "bearer", "authorization", "jwt", "apikey", "apitoken"),
        *("authkey", "authtoken", "accesskey", "accesstoken", "privatekey", "secretkey"),
    ]
)
_QUALIFIERS = frozenset(
    ["access", "api", "auth", "encryption", "oauth", "private", "refresh", "secret", "session", "signing", "ssh"]
)
_QUALIFIED = frozenset({"key", "keys", "token", "tokens"})
"""Secret after a qualifier, wherever it is: `PRIVATE_KEY_B64`, `api_tokens`."""
_LAST_WORDS = frozenset({"key", "token"})
"""Secret at the end of a name only: `HF_TOKEN` is, `model.moe_token_dropping` is not."""
_SECRET_ENDINGS = ("password", "passwd", "passphrase", "sshpass")
"""Secret at the end of a word: `PGPASSWORD`."""
_SHORT_WORDS = frozenset({"auth", "pass", "pat", "pwd"})
"""Secret at the end of a name, after another word: `DB_PASS`, `REDISCLI_AUTH`; `PWD` is the working directory."""
_HARMLESS_BEFORE = frozenset(
    [
        *("backward", "backwards", "each", "first", "forward", "last", "multi", "one", "per", "second", "single"),
        *("two", "by", "file", "glob", "name", "old", "path"),
    ]
)
"""Words before those: `forward_pass`, `file_pat`."""
_ENCODINGS = frozenset({"b64", "base64", "hex", "pem", "json", "value", "str"})
"""Words after a secret that do not change what it is: `TOKEN_B64`."""
_LOCATIONS = frozenset({"dir", "file", "folder", "name", "path"})
"""Last words of the name of a file, which is no secret: `PRIVATE_KEY_PATH`."""
_WORD_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Boundaries in `authToken` and `APIKey`."""
_SPECIAL_TOKENS = "special_tokens."
_FIELDS = frozenset({"context_key", "label_key"})
"""Keys whose value is the name of a JSON field, not a secret."""
_ASSIGNMENT = re.compile(r"(?P<name>[+~-]*[\w.@/-]+)=(?P<value>.*)", re.DOTALL)
_IN_BLOCK = re.compile(r"(?<=[{,\s])(?P<name>[\"']?[\w.\-]+[\"']?)(\s*:\s*)[^,{}\s][^,{}]*")
"""`name: value` in an override with a dict value: `env_vars={A: 1, B: 2}`."""
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")
_IN_QUERY = re.compile(r"(?<=[?&;])(?P<name>[\w.\-]+)=(?P<value>[^&;#\s\"'}\]]+)")
_SIGNATURES = frozenset({"sig", "signature", "x-amz-signature", "x-goog-signature"})
"""Parameters of a presigned URL that give access."""
_KNOWN_FORMS = re.compile(
    r"(?i:\b(?:bearer|basic)) +(?=[\w.~+/=-]*\d)[\w.~+/=-]{16,}"
    r"|\b(?:gh[pousr]_|hf_|sk-)[A-Za-z0-9]{24,}|\b(?:github_pat_|glpat-|xox[abprs]-|sk-(?:ant|proj)-)[\w-]{16,}"
    r"|\bAKIA[0-9A-Z]{16}\b"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*",
    re.DOTALL,
)
"""Values that are secrets whatever their name: headers, and tokens by their prefixes."""


@lru_cache(maxsize=4096)  # of every key of a configuration, each time it is loaded
def is_secret(name: str) -> bool:
    """Return True if the name of a variable or dotted key indicates a secret.

    `WANDB_API_KEY`, `HF_TOKEN`, `authToken`, `DB_PASS`, `db.password` do; `TOKENIZERS_PARALLELISM`, `max_tokens`,
    `pass_through` and `model.apply_query_key_layer_scaling` do not, nor do special tokens and names of JSON fields.
    """
    name = name.lstrip("+~")  # of an override
    first, *below = name.removeprefix("env_vars.").split(".")
    if below and name.startswith("env_vars."):  # a block in place of a value
        return is_secret(first) or is_secret(".".join(below))
    if _SPECIAL_TOKENS in name or name.rpartition(".")[2] in _FIELDS:
        return False
    return _words(name)[-1] in _LAST_WORDS or not is_ambiguous_secret(name)


def is_ambiguous_secret(name: str) -> bool:
    """Return True if only a final `key` or `token` makes a name secret: `label_token`, but also `text_key`."""
    words = _words(name)
    if not _SECRET_WORDS.isdisjoint(words) or any(word.endswith(_SECRET_ENDINGS) for word in words):
        return False
    *_, before, last = ["", *_words(name.rpartition(".")[2])]
    if last in _SHORT_WORDS and before not in _HARMLESS_BEFORE and (before or last == "pass"):
        return False
    pairs = pairwise(words)
    is_qualified = any(first in _QUALIFIERS and second in _QUALIFIED for first, second in pairs)
    return not is_qualified or words[-1] in _LOCATIONS


def _words(name: str) -> list[str]:
    """Return the words of a name in lower case, without the encodings that it ends with."""
    words = [word for word in re.split(r"[^a-z0-9]+", _WORD_BOUNDARY.sub("_", name).lower()) if word] or [""]
    while len(words) > 1 and words[-1] in _ENCODINGS:
        words.pop()
    return words


def redact(text: str) -> str:
    """Redact an argument: the value of a secret `name=value`, user part and secret parameters of a URL become `***`."""
    assignment = _ASSIGNMENT.fullmatch(text)
    if assignment and is_secret(assignment["name"]):
        return f"{assignment['name']}={REDACTED}"
    text = _IN_BLOCK.sub(
        lambda match: match[0] if not is_secret(match[1].strip("\"'")) else f"{match[1]}{match[2]}{REDACTED}", text
    )
    return _redact_text(text)


def _redact_text(text: str) -> str:
    """Redact what is secret in a text whatever its name."""
    text = _KNOWN_FORMS.sub(REDACTED, _USER_INFO.sub(f"{REDACTED}@", text))
    return _IN_QUERY.sub(
        lambda match: (
            f"{match['name']}={REDACTED}"
            if is_secret(match["name"]) or match["name"].lower() in _SIGNATURES
            else match[0]
        ),
        text,
    )


def redact_value(name: str, text: str) -> str:
    """Redact the value of a key or variable: `***` for a secret, unless it only refers to one (`${...}`)."""
    return REDACTED if is_secret(name) and "${" not in text else redact(text)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Redact a command line; also `VALUE` in `--api-key VALUE` becomes `***`."""
    redacted: list[str] = []
    hides_next = False
    for word in arguments:
        is_option = word.startswith("-")
        redacted.append(REDACTED if hides_next and not is_option else redact(word))
        hides_next = is_option and "=" not in word and is_secret(word)
    return redacted


def holds_secret(text: str) -> bool:
    """Return True if a value is a secret whatever its name: a URL with a user part or a token, a known form."""
    return _redact_text(text) != text
