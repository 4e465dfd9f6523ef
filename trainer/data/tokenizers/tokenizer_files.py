"""Load tokenizers from files: tokenizer.json, GPT-2's vocab.json and merges.txt, SentencePiece models.

Only local files are read: nothing is downloaded, and no code of a tokenizer is executed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....models.config.extensions import extension_names
from ...config.own_components import IMPORT_HINT
from ...config.schema.trainer_and_data import TokenizerBlock
from ...utils.environment import user_path
from ...utils.errors import UserError
from ...utils.text import one_line
from ..tasks.chat_files import load_chat_template
from . import sentencepiece_tokenizer, tokenizer_json
from .gpt2_files import gpt2_tokenizer_json
from .own_tokenizer import make_own_tokenizer
from .sentencepiece_tokenizer import MAX_MODEL_BYTES
from .tokenizer import ByteTokenizer, Tokenizer
from .tokenizer_config import configured_tokens, read_bytes, read_text, read_tokenizer_config
from .tokenizer_document import tokenizer_from_dict

TOKENIZER_JSON, VOCAB_FILE, MERGES_FILE = "tokenizer.json", "vocab.json", "merges.txt"
_MODELS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_MAX_TEXT_BYTES = 128 << 20


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

    def by_kind(self) -> dict[str, str]:
        """Return the named tokens by kind."""
        return {kind: token for kind, token in (("eos", self.eos), ("pad", self.pad)) if token is not None}


def tokenizer_from_config(keys: TokenizerBlock) -> Tokenizer:
    """Load the tokenizer of `model.tokenizer`, for the libraries that read files, for that of a checkpoint and for the
    user's own.

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
        case "checkpoint":
            return _stored_tokenizer(_path(keys.type, f"{section}.type"), f"{section}.type")
        case library:
            return _own_tokenizer(library, keys.kwargs, f"`{section}.library` ({library})")


def _stored_tokenizer(checkpoint: Path, named_by: str) -> Tokenizer:
    from ...utils.safetensors_io import DamagedFileError, read_json  # imports torch

    try:
        return tokenizer_from_dict(read_json(checkpoint / TOKENIZER_JSON))
    except (DamagedFileError, ValueError) as error:
        raise UserError(f"`{named_by}`: {checkpoint} is no checkpoint with a tokenizer: {error}") from None


def _own_tokenizer(name: str, kwargs: Mapping[str, Any], named_by: str) -> Tokenizer:
    try:
        return make_own_tokenizer(name, kwargs)
    except LookupError as error:
        raise UserError(f"{named_by}: {error}; {IMPORT_HINT}") from None
    except ValueError as error:
        raise UserError(f"{named_by}: {error}") from None


def load_tokenizer(name: str, named_by: str, special: SpecialTokens) -> Tokenizer:
    """Load the tokenizer of a file or folder of any supported kind.

    Args:
        name: `byte-level`, a registered tokenizer of the user's own, a tokenizer.json, a SentencePiece .model, or a
            folder with one of them or GPT-2's vocab.json and merges.txt.
        named_by: the option that gave the name, for messages.
        special: special tokens named by the user.

    Raises:
        UserError: as `tokenizer_from_config`.
    """
    if name == "byte-level":
        if special != SpecialTokens():
            raise UserError(f"{named_by} byte-level has its own end-of-document token (id 1); do not set another")
        return ByteTokenizer()
    if name in extension_names("tokenizer"):
        if special != SpecialTokens():
            raise UserError(f"{named_by} {name} has its own end-of-document token; do not set another")
        return _own_tokenizer(name, {}, named_by)
    path = _path(name, named_by)
    if name == "byte" and not path.exists():  # the name of the file conf/tokenizer/byte.yaml
        raise UserError(f"{named_by} byte: there is no such file; for a token per byte, set {named_by} byte-level")
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
    configured = configured_tokens(
        read_tokenizer_config(file.parent, named_by), ("eos_token", "bos_token", "pad_token")
    )
    named = {name.removesuffix("_token"): token for name, token in configured.items()} | special.by_kind()
    tokenizer = _build_json_tokenizer(
        read_text(file, _MAX_TEXT_BYTES, named_by), named, special, f"`{named_by}`: {file}"
    )
    tokenizer.chat_template = load_chat_template(file.parent, named_by)
    return tokenizer


def load_gpt2(vocab_file: Path, merge_file: Path, named_by: str, special: SpecialTokens) -> Tokenizer:
    """Load GPT-2's byte-level BPE from its two files."""
    vocabulary = read_text(vocab_file, _MAX_TEXT_BYTES, named_by)
    merges = read_text(merge_file, _MAX_TEXT_BYTES, named_by)
    location = f"`{named_by}`: {vocab_file} and {merge_file}"
    try:
        definition = gpt2_tokenizer_json(vocabulary, merges)
    except ValueError as error:
        raise UserError(f"{location}: {error}") from None
    tokenizer = _build_json_tokenizer(definition, special.by_kind(), special, location)
    tokenizer.chat_template = load_chat_template(vocab_file.parent, named_by)
    return tokenizer


def load_sentencepiece(path: Path, named_by: str, special: SpecialTokens) -> Tokenizer:
    """Load a SentencePiece .model file; missing special tokens get the ids after its last."""
    data = read_bytes(path, MAX_MODEL_BYTES, named_by)
    try:
        tokenizer = sentencepiece_tokenizer.build_sentencepiece_tokenizer(data, special.by_kind(), special.additional)
    except ValueError as error:
        raise UserError(f"`{named_by}`: {path}: {error}") from None
    tokenizer.chat_template = load_chat_template(path.parent, named_by)
    return tokenizer


def _build_json_tokenizer(
    definition: str, named: Mapping[str, str], special: SpecialTokens, location: str
) -> Tokenizer:
    try:
        return tokenizer_json.build_json_tokenizer(tokenizer_json.canonical_json(definition), named, special.additional)
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # the last three: fields of the wrong type
        raise UserError(f"{location}: {one_line(error, 300) or type(error).__name__}") from None


def _path(text: str | None, named_by: str) -> Path:
    if not text:
        raise UserError(f"`{named_by}` must name a file")
    return user_path(text, named_by)
