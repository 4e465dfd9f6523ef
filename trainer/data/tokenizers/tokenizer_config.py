"""Read the files of a tokenizer, which may come from an untrusted source, and its `tokenizer_config.json`."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...utils.errors import UserError

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_MAX_CONFIG_BYTES = 32 << 20


def read_tokenizer_config(folder: Path, named_by: str) -> dict[str, Any]:
    """Return the content of a folder's tokenizer_config.json; empty if there is none.

    Raises:
        UserError: it cannot be read, or is not JSON.
    """
    path = folder / TOKENIZER_CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        settings = json.loads(read_text(path, _MAX_CONFIG_BYTES, named_by))
    except (ValueError, RecursionError):
        raise UserError(f"`{named_by}`: {path} is not JSON; repair or remove it") from None
    return settings if isinstance(settings, dict) else {}


def configured_tokens(settings: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Return the texts of the special tokens that a tokenizer_config.json has, by name such as `eos_token`."""
    tokens: dict[str, str] = {}
    for name in names:
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token:
            tokens[name] = token
    return tokens


def read_text(path: Path, limit: int, named_by: str, kind: str = "tokenizer") -> str:
    """Read a UTF-8 text file, with or without a byte order mark; arguments and errors as `read_bytes`."""
    try:
        return read_bytes(path, limit, named_by, kind).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"`{named_by}`: {path} is not UTF-8 text: bad byte at offset {error.start}") from None


def read_bytes(path: Path, limit: int, named_by: str, kind: str = "tokenizer") -> bytes:
    """Read a file of at most `limit` bytes.

    Args:
        named_by: the option that named the file, for messages.
        kind: of the file, for messages.

    Raises:
        UserError: it cannot be read, is no regular file, or is larger.
    """
    try:
        # A pipe without a writer would be waited for.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UserError(f"`{named_by}`: {path} is not a regular file")
            data = file.read(limit + 1)
    except OSError as error:
        raise UserError(f"`{named_by}`: cannot read {path}: {error.strerror or error}") from None
    if len(data) > limit:
        raise UserError(f"`{named_by}`: {path} has more than {limit:,} bytes: it is not a {kind}")
    return data
