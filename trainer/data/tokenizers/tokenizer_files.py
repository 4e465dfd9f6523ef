"""Load tokenizers from files: tokenizer.json, GPT-2's vocab.json and merges.txt, SentencePiece models.

Only local files are read: nothing is downloaded, and no code of a tokenizer is executed.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...config.schema.trainer_and_data import TokenizerBlock
from ...utils.environment import user_path
from ...utils.errors import UserError
from ..tasks.chat_files import SETTINGS, load_chat_template
from . import sentencepiece_tokenizer, tokenizer_json
from .gpt2_files import gpt2_tokenizer_json
from .sentencepiece_tokenizer import MAX_MODEL_BYTES
from .tokenizer import ByteTokenizer, Tokenizer

TOKENIZER_JSON, VOCAB_FILE, MERGES_FILE = "tokenizer.json", "vocab.json", "merges.txt"
_MODELS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_MAX_TEXT_BYTES = 128 << 20
_MAX_SETTINGS_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Special tokens named by the user.

    Attributes:
        eos: the token between documents; None uses the tokenizer's own settings, or the usual names.
        pad: the padding token; None likewise, falling back to eos.
        additional: tokens added to the vocabulary if it lacks them.
    """

    eos: str | None = None
    pad: str | None = None
    additional: Sequence[str] = ()

    def named(self) -> dict[str, str]:
        """Return the named tokens by kind."""
        return {kind: token for kind, token in (("eos", self.eos), ("pad", self.pad)) if token is not None}


def tokenizer_from_config(keys: TokenizerBlock) -> Tokenizer:
    """Load the tokenizer of `model.tokenizer`, for the libraries that read files.

    Raises:
        UserError: a file is missing, unreadable or not a tokenizer; or a named token is not in it.
    """
    section = "model.tokenizer"
    special_tokens = keys.special_tokens
    mask_tokens = [] if special_tokens.mask_token is None else [special_tokens.mask_token]
    special = SpecialTokens(
        special_tokens.eos_token, special_tokens.pad_token, [*keys.additional_special_tokens, *mask_tokens]
    )
    match keys.library:
        case "huggingface":
            name = "type" if keys.type else "model"
            return load_tokenizer_json(
                _path(keys.type or keys.model, f"{section}.{name}"), f"{section}.{name}", special
            )
        case "megatron":
            vocabulary = _path(keys.vocab_file, f"{section}.vocab_file")
            return load_gpt2(vocabulary, _path(keys.merge_file, f"{section}.merge_file"), section, special)
        case "sentencepiece":
            return load_sentencepiece(_path(keys.model, f"{section}.model"), f"{section}.model", special)
        case library:
            raise ValueError(f"`library` ({library}) must be one that reads files")


def load_tokenizer(name: str, named_by: str, special: SpecialTokens) -> Tokenizer:
    """Load the tokenizer of a file or folder of any supported kind.

    Args:
        name: `byte-level`, a tokenizer.json, a SentencePiece .model, or a folder with one of them or GPT-2's vocab.json
            and merges.txt.
        named_by: the option that gave the name, for messages.
        special: special tokens named by the user.

    Raises:
        UserError: as `tokenizer_from_config`.
    """
    if name == "byte-level":
        if special != SpecialTokens():
            raise UserError(f"{named_by} byte-level has its own end-of-document token (id 1); do not set another")
        return ByteTokenizer()
    path = _path(name, named_by)
    if path.is_dir():
        if (path / TOKENIZER_JSON).is_file():
            return load_tokenizer_json(path, named_by, special)
        for model in _MODELS:
            if (path / model).is_file():
                return load_sentencepiece(path / model, named_by, special)
        if (path / VOCAB_FILE).is_file():
            return load_gpt2(path / VOCAB_FILE, path / MERGES_FILE, named_by, special)
        found = f"{TOKENIZER_JSON}, {', '.join(_MODELS)}, or {VOCAB_FILE} with {MERGES_FILE}"
        raise UserError(f"{named_by}: the folder {path} holds no tokenizer ({found})")
    if path.suffix == ".model":
        return load_sentencepiece(path, named_by, special)
    return load_tokenizer_json(path, named_by, special)


def load_tokenizer_json(path: Path, named_by: str, special: SpecialTokens) -> Tokenizer:
    """Load a tokenizer.json, or its folder; EOS, BOS and padding come from a tokenizer_config.json in the folder."""
    file = path / TOKENIZER_JSON if path.is_dir() else path
    if not os.path.lexists(file):
        kind = f"the folder {path} holds no {TOKENIZER_JSON}" if path.is_dir() else f"there is no file {path}"
        raise UserError(
            f"`{named_by}`: {kind}; stoker downloads no tokenizers: give the path of a {TOKENIZER_JSON}, or of "
            "its folder"
        )
    named = {**_configured_special_tokens(file.parent / SETTINGS, named_by), **special.named()}
    tokenizer = _build_json_tokenizer(_text(file, _MAX_TEXT_BYTES, named_by), named, special, f"`{named_by}`: {file}")
    tokenizer.chat = load_chat_template(file.parent, named_by)
    return tokenizer


def load_gpt2(vocab_file: Path, merge_file: Path, named_by: str, special: SpecialTokens) -> Tokenizer:
    """Load GPT-2's byte-level BPE from its two files."""
    vocabulary = _text(vocab_file, _MAX_TEXT_BYTES, named_by)
    merges = _text(merge_file, _MAX_TEXT_BYTES, named_by)
    location = f"`{named_by}`: {vocab_file} and {merge_file}"
    try:
        definition = gpt2_tokenizer_json(vocabulary, merges)
    except ValueError as error:
        raise UserError(f"{location}: {error}") from None
    tokenizer = _build_json_tokenizer(definition, special.named(), special, location)
    tokenizer.chat = load_chat_template(vocab_file.parent, named_by)
    return tokenizer


def load_sentencepiece(path: Path, named_by: str, special: SpecialTokens) -> Tokenizer:
    """Load a SentencePiece .model file; missing special tokens get the ids after its last."""
    data = _bytes(path, MAX_MODEL_BYTES, named_by)
    try:
        tokenizer = sentencepiece_tokenizer.define(data, special.named(), special.additional)
    except ValueError as error:
        raise UserError(f"`{named_by}`: {path}: {error}") from None
    tokenizer.chat = load_chat_template(path.parent, named_by)
    return tokenizer


def _build_json_tokenizer(
    definition: str, named: Mapping[str, str], special: SpecialTokens, location: str
) -> Tokenizer:
    try:
        return tokenizer_json.define(tokenizer_json.canonical(definition), named, special.additional)
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # the last three: fields of the wrong type
        raise UserError(f"{location}: {' '.join(str(error).split())[:300] or type(error).__name__}") from None


def _configured_special_tokens(path: Path, named_by: str) -> dict[str, str]:
    """Return the eos, bos and padding tokens of a tokenizer_config.json; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        settings = json.loads(_text(path, _MAX_SETTINGS_BYTES, named_by))
    except (ValueError, RecursionError):
        raise UserError(f"`{named_by}`: {path} is not JSON; repair or remove it") from None
    tokens: dict[str, str] = {}
    for name in ("eos", "bos", "pad"):
        token = settings.get(f"{name}_token") if isinstance(settings, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token:
            tokens[name] = token
    return tokens


def _path(text: str | None, named_by: str) -> Path:
    if not text:
        raise UserError(f"`{named_by}` must name a file")
    return user_path(text, named_by)


def _text(path: Path, limit: int, named_by: str) -> str:
    try:
        return _bytes(path, limit, named_by).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"`{named_by}`: {path} is not UTF-8 text: bad byte at offset {error.start}") from None


def _bytes(path: Path, limit: int, named_by: str) -> bytes:
    try:
        with path.open("rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UserError(f"`{named_by}`: {path} is not a regular file")
            data = file.read(limit + 1)
    except OSError as error:
        raise UserError(f"`{named_by}`: cannot read {path}: {error.strerror}") from None
    if len(data) > limit:
        raise UserError(f"`{named_by}`: {path} has more than {limit:,} bytes: it is not a tokenizer")
    return data
