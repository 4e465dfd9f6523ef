"""Load the chat template of a tokenizer from its files, or from `model.tokenizer.chat_template`."""

from __future__ import annotations

from pathlib import Path

from ...utils.environment import user_path
from ...utils.errors import UserError
from ..tokenizers.tokenizer import Tokenizer
from ..tokenizers.tokenizer_config import configured_tokens, read_text, read_tokenizer_config
from .chat_template import MAX_TEMPLATE_BYTES, TOKEN_NAMES, ChatTemplate, default_template

CHAT_TEMPLATE_FILE = "chat_template.jinja"
_KEY = "model.tokenizer.chat_template"


def load_chat_template(folder: Path, named_by: str) -> ChatTemplate | None:
    """Load the chat template of a Hugging Face tokenizer: `chat_template.jinja`, or from its `tokenizer_config.json`.

    Args:
        named_by: the option that named it, for messages.

    Raises:
        UserError: a file cannot be read.
    """
    settings = read_tokenizer_config(folder, named_by)
    if (folder / CHAT_TEMPLATE_FILE).is_file():
        source = _read_template(folder / CHAT_TEMPLATE_FILE, named_by)
    else:
        source = _default_template(settings.get("chat_template"))
    if source is None:
        return None
    return ChatTemplate(source, configured_tokens(settings, TOKEN_NAMES))


def _read_template(path: Path, named_by: str) -> str:
    return read_text(path, MAX_TEMPLATE_BYTES, named_by, "chat template")


def _default_template(found: object) -> str | None:
    """Return the template of a configuration; of a list of named templates, the one called `default`."""
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) and len(found) <= MAX_TEMPLATE_BYTES else None


def chat_template_from_config(text: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template of `model.tokenizer.chat_template`, given as text or as a path.

    Args:
        tokenizer: gives the special tokens.

    Raises:
        UserError: the file does not exist or cannot be read.
    """
    source = text if is_inline_template(text) else _read_template(user_path(text, _KEY), _KEY)
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
