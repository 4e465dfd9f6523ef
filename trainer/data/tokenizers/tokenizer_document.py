"""Rebuild a tokenizer from its JSON document."""

from __future__ import annotations

from typing import Any

from ....models.config.extensions import extension_names
from ...config.own_components import IMPORT_HINT
from ..tasks.chat_template import ChatTemplate
from .own_tokenizer import own_tokenizer_from_dict
from .tokenizer import ByteTokenizer, CharTokenizer, Tokenizer


def tokenizer_from_dict(document: object) -> Tokenizer:
    """Build the tokenizer of a document.

    Args:
        document: output of `to_dict` or `tokenizer_state`, read back from JSON; fully validated.

    Raises:
        ValueError: it is not such a document; the message gives the reason.
    """
    if not isinstance(document, dict):
        raise ValueError(f"a tokenizer document must be an object, not {type(document).__name__}")
    tokenizer = _tokenizer_from_document({name: value for name, value in document.items() if name != "chat"})
    if "chat" in document:
        tokenizer.chat_template = ChatTemplate.from_dict(document["chat"])
    return tokenizer


def _tokenizer_from_document(document: dict[str, Any]) -> Tokenizer:
    match document.get("tokenizer"), set(document):
        case "byte-level", keys if keys <= {"tokenizer", "sentinels"}:
            return ByteTokenizer(document.get("sentinels", 0))
        case "char", keys if keys == {"tokenizer", "characters"}:
            characters = document["characters"]
            if not isinstance(characters, str):
                raise ValueError(f"`characters` must be a string, not {type(characters).__name__}")
            return CharTokenizer(characters)
        case "byte-level" | "char", keys:
            raise ValueError(f"unexpected keys in a tokenizer document: {', '.join(sorted(map(repr, keys)))[:200]}")
        case "huggingface", _:
            from .tokenizer_json import json_tokenizer_from_dict

            return json_tokenizer_from_dict(document)
        case "sentencepiece", _:
            from .sentencepiece_tokenizer import sentencepiece_from_dict

            return sentencepiece_from_dict(document)
        case name, _:
            known = ", ".join(("byte-level", "char", "huggingface", "sentencepiece", *extension_names("tokenizer")))
            if isinstance(name, str) and name in extension_names("tokenizer"):
                return own_tokenizer_from_dict(document)
            raise ValueError(f"unknown tokenizer {str(name)[:40]!r}; known are {known}; {IMPORT_HINT}")
