"""Load the chat template of a tokenizer from its files, or from `model.tokenizer.chat_template`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...utils.environment import user_path
from ...utils.errors import UserError
from ..tokenizers.tokenizer import Tokenizer
from .chat_template import MAX_TEMPLATE_BYTES, TOKEN_NAMES, ChatTemplate, default_template

CHAT_TEMPLATE_FILE, TOKENIZER_CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
_MAX_SETTINGS_BYTES = 32 << 20
_KEY = "model.tokenizer.chat_template"


def load_chat_template(folder: Path, named_by: str) -> ChatTemplate | None:
    """Load the chat template of a Hugging Face tokenizer: `chat_template.jinja`, or from its `tokenizer_config.json`.

    Args:
        folder: of its files.
        named_by: the option that named it, for messages.

    Raises:
        UserError: a file cannot be read.
    """
    settings: Any = {}
    if (folder / TOKENIZER_CONFIG_FILE).is_file():
        try:
            settings = json.loads(_text(folder / TOKENIZER_CONFIG_FILE, _MAX_SETTINGS_BYTES, named_by))
        except (ValueError, RecursionError):
            raise UserError(
                f"`{named_by}`: {folder / TOKENIZER_CONFIG_FILE} is not JSON; repair or remove it"
            ) from None
    settings = settings if isinstance(settings, dict) else {}
    if (folder / CHAT_TEMPLATE_FILE).is_file():
        source = _text(folder / CHAT_TEMPLATE_FILE, MAX_TEMPLATE_BYTES, named_by)
    else:
        source = _default_template(settings.get("chat_template"))
    if source is None:
        return None
    tokens = {name: _token_text(settings.get(name)) for name in TOKEN_NAMES}
    return ChatTemplate(source, {name: token for name, token in tokens.items() if token})


def _default_template(found: object) -> str | None:
    """Return the template of a configuration; of a list of named templates, the one called `default`."""
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) and len(found) <= MAX_TEMPLATE_BYTES else None


def _token_text(found: object) -> str:
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else ""


def chat_template_from_config(text: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template of `model.tokenizer.chat_template`, given as text or as a path.

    Args:
        text: the value of the key.
        tokenizer: gives the special tokens.

    Raises:
        UserError: the file does not exist or cannot be read.
    """
    source = text if is_inline_template(text) else _text(user_path(text, _KEY), MAX_TEMPLATE_BYTES, _KEY)
    return ChatTemplate(source, special_tokens_map(tokenizer))


def is_inline_template(text: str) -> bool:
    """Return True if a value is a template, and not the path of one."""
    return "{%" in text or "{{" in text


def special_tokens_map(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the special tokens by their names in templates, such as `bos_token`, as far as the tokenizer has them."""
    if tokenizer.chat_template is not None and tokenizer.chat_template.tokens:
        return dict(tokenizer.chat_template.tokens)
    special = tokenizer.special
    ids = {"bos_token": special.bos, "unk_token": special.unk}
    ids |= {"eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    names = {name: None if id_ is None else tokenizer.token_name(id_) for name, id_ in ids.items()}
    return {name: text for name, text in names.items() if text is not None}


def get_chat_template(tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template of a tokenizer, or stoker's default.

    Raises:
        UserError: it has no template, and no EOS token to end an answer.
    """
    if tokenizer.chat_template is not None:
        return tokenizer.chat_template
    eos = None if tokenizer.eos_id is None else tokenizer.token_name(tokenizer.eos_id)
    if eos is None:
        raise UserError(
            "chat needs a tokenizer with an EOS token to end answers, and this one has none; use tokenizer=byte, or "
            "set model.tokenizer.chat_template"
        )
    return default_template(eos)


def _text(path: Path, limit: int, named_by: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"`{named_by}`: cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"`{named_by}`: {path} is not UTF-8 text: bad byte at offset {error.start}") from None
    if len(data) > limit:
        raise UserError(f"`{named_by}`: {path} has more than {limit:,} bytes")
    return text
