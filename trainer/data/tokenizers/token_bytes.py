"""Byte strings of the tokens of a `tokenizer.json`, and their byte counts.

The `decoder` section defines how tokens are spelled: GPT-2's printable characters for bytes, "▁" for a space, `<0x0A>`
for a byte, "##" for a word continuation. The bytes of a token do not depend on its neighbors here, so that text can be
printed while it is generated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAX_DECODERS = 32
_MAX_GROWTH, _MAX_INSERTED = 4, 64
"""Limits of a token's length after a `Replace` of the decoder."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_LOSSLESS_SPLITS = {"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"}
"""Behaviors of a pre-tokenizer that keep all text; the fifth is `Removed`."""

Part = Mapping[str, Any]


def unicode_to_bytes() -> dict[str, int]:
    """Return GPT-2's `bytes_to_unicode`, inverted: byte by character.

    A byte that is visible Latin-1 is represented by itself, the others by characters from 256 on, in order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


def token_byte_strings(
    definition: Part, vocabulary: Mapping[str, int], added: Mapping[int, str], special_ids: Collection[int]
) -> list[bytes]:
    """Return the UTF-8 bytes of every token id, [largest id + 1]; empty for ids in `special_ids` and ids without a
    token.

    Args:
        vocabulary: id by token.
        added: tokens that are spelled literally, by id.

    Raises:
        ValueError: the decoder is of an unsupported type.
    """
    spell = _token_decoder(definition)
    pieces = [b""] * (max(vocabulary.values()) + 1)
    for token, id_ in vocabulary.items():
        if id_ not in special_ids:
            pieces[id_] = added[id_].encode() if id_ in added else spell(token)
    return pieces


def adds_prefix_space(definition: Part) -> bool:
    """Return True if encoding may add a space before the text, which decoding must remove."""
    if _always_prepends_space(definition):
        return True
    parts = [*_steps(definition, "pre_tokenizer"), *_steps(definition, "normalizer")]
    if any(part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never" for part in parts):
        return True
    if any(part["type"] == "ByteLevel" and part.get("add_prefix_space", True) for part in parts):
        return True
    decoders = _steps(definition, "decoder")
    return not decoders or any(part["type"] in ("WordPiece", "BPEDecoder") for part in decoders)


def token_byte_counts(
    definition: Part, pieces: Sequence[bytes], vocabulary: Mapping[str, int], eos: int | None
) -> NDArray[np.int64]:
    """Return the number of bytes of each id, int64 [len(pieces)]; all 0 if tokens do not add up to the text.

    They add up if tokenization is lossless: byte-level BPE, and BPE with byte fallback without a normalizer that
    changes text (NFC, lower case). The sum may be smaller, but never larger, than the size of the text: for a special
    token, or a "▁" that stands for a space, written literally in it.
    """
    if is_byte_level(definition, vocabulary):
        return piece_byte_counts(pieces, eos, adds_prefix_space=False)
    if _is_byte_fallback_bpe(definition) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return piece_byte_counts(pieces, eos, adds_prefix_space=_always_prepends_space(definition))
    return np.zeros(len(pieces), np.int64)


def is_byte_level(definition: Part, vocabulary: Mapping[str, int]) -> bool:
    """Return True for a lossless byte-level BPE: every byte has a token, and nothing is normalized."""
    steps = _steps(definition, "pre_tokenizer")
    levels = [step for step in steps if step["type"] == "ByteLevel"]
    return (
        _model_is_bpe(definition)
        and not _steps(definition, "normalizer")
        and len(levels) > 0
        and not any(level.get("add_prefix_space", True) for level in levels)
        and all(step["type"] == "ByteLevel" or _is_lossless(step) for step in steps)
        and unicode_to_bytes().keys() <= vocabulary.keys()
    )


def piece_byte_counts(pieces: Sequence[bytes], eos: int | None, *, adds_prefix_space: bool) -> NDArray[np.int64]:
    """Return the length of each piece, int64 [len(pieces)].

    Args:
        pieces: the bytes of each id.
        eos: the id that ends documents.
        adds_prefix_space: encoding adds a space before every text. EOS then counts -1 byte, so that the counts of a
            document sum to the size of its text; without EOS they cannot, and all are 0.
    """
    lengths = np.fromiter((len(piece) for piece in pieces), np.int64, len(pieces))
    if adds_prefix_space:
        if eos is None:
            return np.zeros_like(lengths)
        lengths[eos] = -1
    return lengths


def _token_decoder(definition: Part) -> Callable[[str], bytes]:
    decoders = _steps(definition, "decoder")
    kinds = {part["type"] for part in decoders}
    if "ByteLevel" in kinds:
        alphabet = unicode_to_bytes()
        return lambda token: (
            bytes(alphabet[character] for character in token)
            if all(character in alphabet for character in token)
            else token.encode()
        )
    unknown = kinds - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece", "BPEDecoder"}
    if unknown:
        raise ValueError(f"its decoder {sorted(unknown)[0]!r} is not supported")
    if len(decoders) > _MAX_DECODERS:
        raise ValueError(f"its decoder has {len(decoders)} steps; at most {_MAX_DECODERS} are supported")
    if not decoders:
        return lambda token: f" {token}".encode()

    def spell(token: str) -> bytes:
        for part in decoders:
            match part["type"]:
                case "Replace" if isinstance(part.get("pattern"), dict) and "String" in part["pattern"]:
                    pattern, content, length = part["pattern"]["String"], part["content"], len(token)
                    if length + token.count(pattern) * len(content) > _MAX_GROWTH * length + _MAX_INSERTED:
                        raise ValueError("a `Replace` of its decoder makes tokens many times longer; remove it")
                    token = token.replace(pattern, content)
                case "ByteFallback" if byte := _BYTE_PIECE.fullmatch(token):
                    return bytes([int(byte[1], 16)])
                case "Metaspace":
                    token = token.replace(part["replacement"], " ")
                case "WordPiece":
                    token = token.removeprefix(part["prefix"]) if token.startswith(part["prefix"]) else f" {token}"
                case "BPEDecoder":
                    token = token.removesuffix(part["suffix"]) + " " * token.endswith(part["suffix"])
        return token.encode()

    return spell


def _steps(definition: Part, name: str) -> list[Part]:
    """Return the steps of a normalizer, pre-tokenizer or decoder, with sequences flattened."""
    waiting, found = [definition.get(name)], []
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        if part.get("type") == "Sequence":
            inner = next((part[key] for key in ("normalizers", "pretokenizers", "decoders") if key in part), [])
            waiting += reversed(inner)
        else:
            found.append(part)
    return found


def _model_is_bpe(definition: Part) -> bool:
    model = definition["model"]
    return model.get("type", "BPE") == "BPE" and isinstance(model.get("merges"), list)


def _is_byte_fallback_bpe(definition: Part) -> bool:
    model = definition["model"]
    return (
        _model_is_bpe(definition)
        and bool(model.get("byte_fallback"))
        and all(_replaces_spaces(step) or step["type"] == "Prepend" for step in _steps(definition, "normalizer"))
        and all(_is_lossless(step) or _only_replaces_spaces(step) for step in _steps(definition, "pre_tokenizer"))
    )


def _always_prepends_space(definition: Part) -> bool:
    return any(step["type"] == "Prepend" and step.get("prepend") == "▁" for step in _steps(definition, "normalizer"))


def _replaces_spaces(step: Part) -> bool:
    return step["type"] == "Replace" and step.get("pattern") == {"String": " "} and step.get("content") == "▁"


def _only_replaces_spaces(step: Part) -> bool:
    # The other schemes add a space only before texts that begin without one, so byte counts would not be exact.
    return step["type"] == "Metaspace" and step.get("replacement") == "▁" and step.get("prepend_scheme") == "never"


def _is_lossless(step: Part) -> bool:
    if step["type"] == "Digits":
        return True
    return step["type"] in ("Split", "Punctuation") and step.get("behavior") in _LOSSLESS_SPLITS
